"""Compiling a model block by block: the same blocks as sharding, so that its hooks stay outside of compiled code."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from dtrain import spans
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
    """Have torch compile each block, when it first runs; return the model.

    Blocks of one class are compiled once. Names of parameters stay as they are. Under ``dtrain launch`` compiled code is kept
    in the launch's folder, where other ranks and a restarted attempt find it, unless ``TORCHINDUCTOR_CACHE_DIR`` is set.

    Args:
        model: plain, or from ``shard_model``; ``checkpoint_activations`` and ``offload_activations`` come before.
        blocks: which modules, usually those given to ``shard_model``: classes, names, or a function of (name, module).
        backend: of ``torch.compile``.
        memory_budget: from 0 (keep only what a block was given, compute all else again) to 1 (keep what makes backward fastest,
            torch's own choice): the compiler computes again what is cheapest to. For backends that partition, such as
            ``"inductor"``; not with ``mode`` or ``options``.
        fullgraph: refuse what would break a block's graph.
        dynamic: as in ``torch.compile``: whether sizes are variables. None lets torch find out, and means False for blocks that
            are checkpointed and have buffers.
        mode: as in ``torch.compile``.
        options: as in ``torch.compile``.

    Mutates: ``model`` (attributes of the chosen modules), and ``TORCHINDUCTOR_CACHE_DIR`` of this process where it is not set.

    Raises:
        ConfigError: blocks that pick nothing, or are compiled already; a ``memory_budget`` that is no share, or comes with
            ``mode`` or ``options``; a block that keeps some operators (``keep=``) and has buffers or offloads.
    """
    _check_budget(memory_budget, mode, options)
    chosen = select_blocks(model, blocks, caller="compile_blocks")
    if not chosen:
        raise ConfigError(f"compile_blocks: {blocks=} picks no module inside the model; e.g. blocks=(Block,)")
    if any(map(is_compiled, chosen)):
        raise ConfigError("compile_blocks: these blocks are compiled already; call it once")
    _set_cache_dir()
    settings: dict[str, Any] = {
        "backend": backend if memory_budget is None else _backend_with_budget(backend, memory_budget),
        "fullgraph": fullgraph,
        "dynamic": dynamic,
        "mode": mode,
        "options": dict(options) if options is not None else None,
    }
    for module in chosen:
        if not compile_inner_forward(module, settings):
            module.compile(**settings)
    time_compilation()  # which is loaded by now
    return model


def time_compilation() -> None:
    """Count the time that torch's compiler takes from now on, if it is loaded in this process; called again it does nothing.

    Mutates: the callbacks of the compiler. ``torch.compiler.reset()`` forgets them.
    """
    if "torch._dynamo" in sys.modules:
        handler = torch._dynamo.callback.callback_handler
        if _begin_compile_span not in handler.start_callbacks:
            handler.register_start_callback(_begin_compile_span)
            handler.register_end_callback(_end_compile_span)


def _begin_compile_span(_: object) -> None:
    spans.begin("compile")


def _end_compile_span(_: object) -> None:
    spans.end("compile")  # which did not begin if another thread has compiled first


def _check_budget(budget: float | None, mode: str | None, options: Mapping[str, Any] | None) -> None:
    if budget is None:
        return
    if isinstance(budget, bool) or not isinstance(budget, int | float) or not 0 <= budget <= 1:
        raise ConfigError(f"compile_blocks: memory_budget is a share from 0 to 1, got {budget!r}")
    if mode is not None or options is not None:
        raise ConfigError("compile_blocks: memory_budget does not go with mode or options; leave one of them out")


def _backend_with_budget(backend: str | Callable[..., Any], budget: float) -> Callable[..., Any]:
    """``backend`` with the compiler's budget set while it works: torch has it as a setting of the process only."""
    compiler: Any = torch._dynamo.lookup_backend(backend) if isinstance(backend, str) else backend

    def compiled(graph: Any, inputs: Any, **settings: Any) -> Any:
        with torch._functorch.config.patch(activation_memory_budget=float(budget)):
            return compiler(graph, inputs, **settings)

    return compiled


def _set_cache_dir() -> None:
    folder = get_dist_info().run_dir
    if folder is not None:
        os.environ.setdefault(
            _CACHE_DIR_VARIABLE, str(folder / "compiled")
        )  # torch reads it when it compiles; there is no other way
