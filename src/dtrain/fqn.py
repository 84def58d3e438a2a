"""Find modules, parameters and buffers by fully qualified name (FQN) without wrappers, and match names with patterns.

``module.compile()`` does not change names. But ``torch.compile(module)``, torch's activation checkpointing and DDP insert a
module whose name becomes part of all parameter names. Checkpoints must not depend on such wrappers, so names here are clean.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator

from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from dtrain.errors import ConfigError

_WRAPPER_NAMES = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
# These wrappers store the wrapped module as "module", a name that other modules may use, too.
_PARALLEL_WRAPPERS = (DataParallel, DistributedDataParallel)


def modules_by_fqn(model: nn.Module, *, include_duplicates: bool = False) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of the unwrapped model by clean name, parents first.

    Args:
        model: wrapped or plain model, with wrappers at any depth.
        include_duplicates: if True, yield a module once for each of its places in the model; else once.
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
    """Return the model inside of all wrappers around the whole model."""
    while (inner := _inner_module(model)) is not None:
        model = inner
    return model


def is_transformers_model(module: nn.Module) -> bool:
    """Return True for a model of Hugging Face's transformers, without an import of the library."""
    return _has_base(module, "transformers", ["PreTrainedModel"])


def is_of_peft(module: nn.Module | None, *names: str) -> bool:
    """Return True for a module of one of these classes of Hugging Face's peft, without an import of the library."""
    return _has_base(module, "peft", names)


def _has_base(module: nn.Module | None, package: str, names: Collection[str]) -> bool:
    return any(base.__name__ in names and base.__module__.startswith(f"{package}.") for base in type(module).__mro__)


def _inner_module(module: nn.Module) -> nn.Module | None:
    """Return the module that ``module`` wraps, None if ``module`` is not a wrapper."""
    if isinstance(module, _PARALLEL_WRAPPERS):
        return module._modules["module"]
    inside = module._modules
    # A plain loop, because every step calls this function.
    for key in _WRAPPER_NAMES:
        if key in inside:
            return inside[key]
    return None


def parameters_by_fqn(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return parameters by clean name, each once, and the further names of tied parameters with the first name."""
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
    """Return buffers by clean name, each once. If ``persistent_only``, skip buffers that are not in the state dict."""
    return {name: module._buffers[key] for name, module, key in buffer_slots(model, persistent_only=persistent_only)}  # type: ignore[misc]


def buffer_slots(
    model: nn.Module, *, persistent_only: bool = False, include_none: bool = False
) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield clean name, owner and key of each buffer, each once. The key stays valid if the buffer is replaced.

    Args:
        model: module.
        persistent_only: if True, skip buffers that are not in the state dict.
        include_none: if True, yield buffers that are None, too, which a forward may set.
    """
    seen: set[int] = set()
    for prefix, module in modules_by_fqn(model):
        for key, buffer in module._buffers.items():
            if (buffer is None and not include_none) or (persistent_only and key in module._non_persistent_buffers_set):
                continue
            if buffer is not None and id(buffer) in seen:
                continue
            seen.add(id(buffer))
            yield f"{prefix}.{key}" if prefix else key, module, key


def compile_patterns(patterns: Iterable[str], *, caller: str) -> Callable[[str], bool]:
    """Return a predicate for clean names that match a pattern; ``*`` is any text without a dot, ``**`` is any text.

    >>> matches = compile_patterns(["layers.*.norm", "head.**"], caller="example")
    >>> matches("layers.3.norm"), matches("layers.3.attn.norm"), matches("head.out.bias")
    (True, False, True)

    Raises:
        ConfigError: a pattern that is not text.
    """
    parts = []
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise ConfigError(
                f"{caller}: patterns of names must be text, got {pattern!r}. Pass a pattern such as 'blocks.*.weight'."
            )
        pieces = re.split(r"(\*\*|\*)", pattern)
        parts.append("".join({"**": ".*", "*": "[^.]*"}.get(piece, re.escape(piece)) for piece in pieces))
    regex = re.compile("|".join(f"(?:{text})" for text in parts) if parts else r"(?!)")
    return lambda name: regex.fullmatch(name) is not None
