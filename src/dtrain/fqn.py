"""Clean names: those that the plain model has, whatever wraps its modules by now, and patterns over them.

``module.compile()`` leaves names alone, but ``torch.compile(module)``, torch's activation checkpointing and DDP put a module
of their own in between, and its name into those of all parameters below. A checkpoint must not depend on that.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from dtrain.errors import ConfigError

_WRAPPER_NAMES = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
_PARALLEL_WRAPPERS = (DataParallel, DistributedDataParallel)  # these call what they wrap "module", as other modules may too


def modules_by_fqn(model: nn.Module, *, include_duplicates: bool = False) -> Iterator[tuple[str, nn.Module]]:
    """The modules that the plain model has, by clean name, parents first; wrappers are left out.

    Args:
        model: wrapped or not, at any depth.
        include_duplicates: a module that sits in several places comes once for each; otherwise once.
    """
    seen: set[int] = set()

    def walk(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        wrapped = _inner_module(module)
        if wrapped is not None:
            yield from walk(name, wrapped)
            return
        if id(module) not in seen or include_duplicates:
            seen.add(id(module))
            yield name, module
            for key, child in module._modules.items():
                if child is not None:
                    yield from walk(f"{name}.{key}" if name else key, child)

    yield from walk("", model)


def unwrap_module(model: nn.Module) -> nn.Module:
    """The model inside the wrappers that are around all of it; itself when there is none."""
    while (inner := _inner_module(model)) is not None:
        model = inner
    return model


def _inner_module(module: nn.Module) -> nn.Module | None:
    """What ``module`` wraps, None when it is a module of the model's own."""
    if isinstance(module, _PARALLEL_WRAPPERS):
        return module._modules["module"]
    inside = module._modules
    for key in _WRAPPER_NAMES:  # asked for in every step, so without a generator
        if key in inside:
            return inside[key]
    return None


def parameters_by_fqn(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Parameters by clean name, each once, and the further names of tied ones -> the name in the first."""
    first: dict[int, str] = {}
    params: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    for prefix, module in modules_by_fqn(model, include_duplicates=True):
        for key, param in module._parameters.items():
            if param is None:
                continue
            name = f"{prefix}.{key}" if prefix else key
            if id(param) in first:
                aliases[name] = first[id(param)]
            else:
                first[id(param)] = name
                params[name] = param
    return params, aliases


def buffers_by_fqn(model: nn.Module, *, persistent_only: bool = False) -> dict[str, Tensor]:
    """Buffers by clean name, each once; ``persistent_only`` leaves out what no state dict holds."""
    return {name: module._buffers[key] for name, module, key in buffer_slots(model, persistent_only=persistent_only)}  # type: ignore[misc]


def buffer_slots(model: nn.Module, *, persistent_only: bool = False) -> Iterator[tuple[str, nn.Module, str]]:
    """Where the buffers are: clean name, owner, and key there; each buffer once, whatever tensor is in it later."""
    seen: set[int] = set()
    for prefix, module in modules_by_fqn(model):
        for key, buffer in module._buffers.items():
            if buffer is None or id(buffer) in seen or (persistent_only and key in module._non_persistent_buffers_set):
                continue
            seen.add(id(buffer))
            yield f"{prefix}.{key}" if prefix else key, module, key


def compile_patterns(patterns: Iterable[str], *, caller: str) -> Callable[[str], bool]:
    """Whether a clean name fits one of ``patterns``, in which ``*`` stands for any text without a dot, ``**`` for any text.

    >>> fits = matcher(["layers.*.norm", "head.**"], caller="example")
    >>> fits("layers.3.norm"), fits("layers.3.attn.norm"), fits("head.out.bias")
    (True, False, True)

    Raises:
        ConfigError: something that is not text.
    """
    parts = []
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise ConfigError(f"{caller}: patterns of names are text, got {pattern!r}")
        pieces = re.split(r"(\*\*|\*)", pattern)
        parts.append("".join({"**": ".*", "*": "[^.]*"}.get(piece, re.escape(piece)) for piece in pieces))
    found = re.compile("|".join(f"(?:{part})" for part in parts) if parts else r"(?!)")
    return lambda name: found.fullmatch(name) is not None
