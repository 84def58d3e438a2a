"""Compile a model block by block. The blocks are those of sharding, so FSDP2's hooks stay outside of compiled code."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from dtrain import spans
from dtrain.arguments import check_number
from dtrain.dist.init import get_dist_info
from dtrain.errors import ConfigError
from dtrain.shard.activation_checkpoint import compile_inner_forward, is_compiled
from dtrain.shard.wrapping import Blocks, select_blocks

_CACHE_DIR_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def compile_blocks(
    model: nn.Module,
    *,
    blocks: Blocks,
    backend: str | Callable[..., Any] = "inductor",
    memory_budget: float | None = None,
    fullgraph: bool = False,
    dynamic: bool | None = None,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Compile each block with ``torch.compile`` at its first run; return the model.

    Blocks of one class are compiled once. Parameter names stay the same. Under ``dtrain launch``, compiled code is cached in
    the folder of the launch for all ranks and restarted attempts, unless ``TORCHINDUCTOR_CACHE_DIR`` is set.

    Args:
        model: plain, or from ``shard_model``. Call ``checkpoint_activations`` and ``offload_activations`` before.
        blocks: modules to compile, usually the ``blocks`` of ``shard_model``: classes, names, or a function of (name, module).
        backend: backend of ``torch.compile``.
        memory_budget: 0 stores only block inputs and recomputes all activations, 1 stores the activations that make backward
            fastest (torch's default); the compiler recomputes the cheapest operators first. The backend must partition the
            graph, as ``"inductor"`` does; not with ``mode`` or ``options``.
        fullgraph: if True, raise if the graph of a block breaks.
        dynamic: if True, compile with dynamic shapes, as in ``torch.compile``. None lets torch decide, and means False for
            checkpointed blocks with buffers.
        mode: as in ``torch.compile``.
        options: as in ``torch.compile``.

    Mutates: ``model`` (attributes of the selected modules), and ``TORCHINDUCTOR_CACHE_DIR`` of this process if unset.

    Example:
        model = dt.shard.checkpoint_activations(model, blocks=(Block,))
        model = dt.shard_model(model, mesh, blocks=(Block,))
        model = dt.compile_blocks(model, blocks=(Block,))

    Raises:
        ConfigError: ``blocks`` selects no module or compiled modules, ``memory_budget`` is out of range or combined with
            ``mode`` or ``options``, or a block combines a selective policy (``keep=``) with buffers or offloading.
    """
    _check_budget(memory_budget, mode, options)
    modules = select_blocks(model, blocks, caller="compile_blocks")
    if not modules:
        raise ConfigError(f"compile_blocks: {blocks=} selects no module inside the model. Pass for example blocks=(Block,).")
    if any(map(is_compiled, modules)):
        raise ConfigError("compile_blocks: blocks are compiled already. Call compile_blocks once.")
    _set_cache_dir()
    settings: dict[str, Any] = {
        "backend": backend if memory_budget is None else _backend_with_budget(backend, memory_budget),
        "fullgraph": fullgraph,
        "dynamic": dynamic,
        "mode": mode,
        "options": dict(options) if options is not None else None,
    }
    for module in modules:
        if not compile_inner_forward(module, settings):
            module.compile(**settings)
    # The compiler is loaded by now.
    time_compilation()
    return model


def time_compilation() -> None:
    """Measure compilation time from now on, if the compiler is loaded. Repeated calls have no effect.

    Mutates: the callbacks of the compiler. ``torch.compiler.reset()`` removes the callbacks.
    """
    if "torch._dynamo" in sys.modules:
        handler = torch._dynamo.callback.callback_handler
        if _begin_compile_span not in handler.start_callbacks:
            handler.register_start_callback(_begin_compile_span)
            handler.register_end_callback(_end_compile_span)


def _begin_compile_span(_: object) -> None:
    spans.begin("compile")


def _end_compile_span(_: object) -> None:
    # The span did not begin if another thread compiled first.
    spans.end("compile")


def _check_budget(budget: float | None, mode: str | None, options: Mapping[str, Any] | None) -> None:
    if budget is None:
        return
    check_number("compile_blocks", "memory_budget", budget, minimum=0, maximum=1)
    if mode is not None or options is not None:
        raise ConfigError(
            "compile_blocks: memory_budget cannot be combined with mode or options. Leave one of the arguments out."
        )


def _backend_with_budget(backend: str | Callable[..., Any], budget: float) -> Callable[..., Any]:
    """Return ``backend`` with torch's process-wide memory budget set during each compilation."""
    compile_fn: Any = torch._dynamo.lookup_backend(backend) if isinstance(backend, str) else backend

    def compile_graph(graph: Any, inputs: Any, **settings: Any) -> Any:
        with torch._functorch.config.patch(activation_memory_budget=float(budget)):
            return compile_fn(graph, inputs, **settings)

    return compile_graph


def _set_cache_dir() -> None:
    folder = get_dist_info().run_dir
    if folder is not None:
        # torch reads only the environment variable, at compile time.
        os.environ.setdefault(_CACHE_DIR_VARIABLE, str(folder / "compiled"))
