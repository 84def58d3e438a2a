"""An average in place of the parameters: for an evaluation, or for good."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from dtrain.algorithms.weights.averages import copy_
from dtrain.errors import ConfigError
from dtrain.shard.replicas import KeptBuffers
from dtrain.shard.whole import is_whole, reshard
from dtrain.state import TrainState
from dtrain.tensors import local


@contextmanager
def swapped(state: TrainState, name: str = "ema") -> Iterator[None]:
    """A context in which the model computes with an average of its parameters; on leaving, every bit is as it was.

    Formula: ``param, average = average, param`` on entering and again on leaving, for every name in
    ``state.slices[name]["params"]``

    The two exchange their contents, one local shard after the other, so it takes the memory of one shard more (of a parameter
    with fewer bits than its average, a copy for as long as it lasts), and gathers nothing. ``evaluate``, ``evaluating``,
    ``unsharded`` and ``full_params`` see the average inside. Buffers that are changed inside, by ``update_batch_norm_`` or in
    training mode, are put back too, also after an exception.

    The run stands still inside: a step, a save or a load of any of its states, and a second ``swapped``, raise.

    Args:
        state: the newest one of its run.
        name: of a transform whose slice has ``{"params": {name: average}}``: ``"ema"``, ``"swa"``.

    Mutates: parameters and the slice, while it lasts. Collective: none. Host sync: none.

    Raises:
        ConfigError: ``state`` has no such average, it has not begun, or the model is whole just now (``unsharded``).
        StaleStateError: ``state`` was stepped already, or an average is swapped in.

    Source: Tarvainen and Valpola 2017, arXiv:1703.01780, section 2: the averaged weights are those that predict.

    Example:
        >>> from dtrain.algorithms.weights.ema import ema
        >>> from dtrain.losses import mean_loss
        >>> from dtrain.step.compose import compose_step
        >>> step = compose_step(mean_loss(lambda model, x: model(x).sum() / len(x), weight=len), [ema(0.75)])
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> _ = torch.nn.init.constant_(model.weight, 4.0)
        >>> state, _ = step(step.init(model, torch.optim.SGD(model.parameters(), lr=0.5)), torch.ones(2, 1))
        >>> with swapped(state, "ema"):
        ...     model.weight.item()  # 0.75 * 4 + 0.25 * 3.5
        3.875
        >>> model.weight.item()
        3.5
    """
    averages = _averages(state, name, "swapped")
    buffers, undo = KeptBuffers(state.model), list[Callable[[], None]]()
    buffers.keep()
    reshard(state.model)  # an earlier forward may have left gathered copies, with which the next one would compute
    state.shared.swapped = name
    try:
        for key, average in averages.items():
            undo.append(_exchanged(state.params[key], average))
        yield
    finally:
        reshard(state.model)
        for back in undo:
            back()
        buffers.put_back()
        state.shared.swapped = None


def swap_in_(state: TrainState, name: str = "ema") -> None:
    """Leave an average in the parameters for good: what training has come to, when it is over.

    Formula: ``param = average``, for every name in ``state.slices[name]["params"]``

    The running statistics of batch normalisation are still those of the parameters before: ``update_batch_norm_`` makes new
    ones. The optimizer and the average stay as they are.

    Args:
        state: the newest one of its run, which stays so.
        name: of a transform whose slice has ``{"params": {name: average}}``.

    Mutates: parameters. Collective: none. Host sync: none.

    Raises:
        ConfigError: ``state`` has no such average, it has not begun, or the model is whole just now (``unsharded``).
        StaleStateError: ``state`` was stepped already, or an average is swapped in.

    Source: Izmailov et al. 2018, arXiv:1803.05407, algorithm 1: the average is the result.

    Example:
        >>> from dtrain.algorithms.weights.ema import ema
        >>> from dtrain.losses import mean_loss
        >>> from dtrain.step.compose import compose_step
        >>> step = compose_step(mean_loss(lambda model, x: model(x).sum() / len(x), weight=len), [ema(0.75)])
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> _ = torch.nn.init.constant_(model.weight, 4.0)
        >>> state, _ = step(step.init(model, torch.optim.SGD(model.parameters(), lr=0.5)), torch.ones(2, 1))
        >>> swap_in_(state, "ema")
        >>> model.weight.item()  # 0.75 * 4 + 0.25 * 3.5
        3.875
    """
    averages = _averages(state, name, "swap_in_")
    reshard(state.model)
    copy_(state.params, averages, averages)


def _averages(state: TrainState, name: str, where: str) -> Mapping[str, Tensor]:
    state.check_fresh(where)
    kept = state.slices.get(name, {})
    averages: Mapping[str, Tensor] = kept.get("params", {})
    if not averages or any(key not in state.params for key in averages):
        with_one = [key for key, content in state.slices.items() if "params" in content]
        raise ConfigError(f"{where}: the state has no average {name!r} of its parameters; it has {with_one or 'none'}")
    if not kept.get("averaged", 1):
        raise ConfigError(f"{where}: the average {name!r} has not begun at step {state.step}; see its start")
    if is_whole(state.model):
        raise ConfigError(f"{where}: the model is whole just now, and would not change; enter dt.unsharded inside of it")
    return averages


def _exchanged(param: Tensor, average: Tensor) -> Callable[[], None]:
    """Put ``average`` into ``param``. Mutates both. Returns: what undoes it."""
    with torch.no_grad():
        own, mean = local(param), local(average)
        kept = own.clone()
        own.copy_(mean)
        if own.dtype == mean.dtype:
            mean.copy_(kept)

            def back() -> None:
                _exchanged(param, average)

            return back

    def put_back() -> None:
        with torch.no_grad():
            local(param).copy_(kept)

    return put_back
