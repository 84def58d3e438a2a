"""The registry of transforms: a new transform is a row in ``rows/``, and every contract tests it from then on.

``BROKEN`` has one transform per way of breaking a contract, each with the contract that must find it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

import dtrain as dt
from battery.row import Row
from battery.rows import batches, combinators, gradients, local, observe, precision, profiling, rates, text, weights
from battery.rows.combinators import halved_loss as halved
from dtrain.dist.dtensor import full_tensor

ROWS: dict[str, Row] = {
    name: row
    for module in (gradients, weights, local, batches, text, precision, rates, combinators, observe, profiling)
    for name, row in module.ROWS.items()
}


# ---- broken on purpose ------------------------------------------------------------------------------------------------------


def _before(name: str, act: Callable[[Any], Any], seam: str = "update") -> dt.Transform:
    """Return a transform that changes the state before the wrapped function runs, and does not change it back."""

    def wrap(inner: Any) -> Any:
        def acting(state: Any, *given: Any, **options: Any) -> Any:
            changed = act(state)
            return inner(changed if isinstance(changed, dt.TrainState) else state, *given, **options)

        return acting

    return dt.Transform(name=name, **{seam: wrap})


def memory_outside_the_slice() -> dt.Transform:
    """Counts in the process, so a new process counts from zero."""
    steps: list[int] = []

    def act(state: dt.TrainState) -> None:
        steps.append(state.step)
        for param in state.params.values():
            param.grad.mul_(1.0 / len(steps))

    return _before("memory", act)


def global_generator_in_init() -> dt.Transform:
    """Draws from the global generator when it begins, also when it never acts."""
    return dt.Transform(name="drawing", init=lambda state: {"number": torch.rand(()).item()})


def rate_changed_in_init() -> dt.Transform:
    """Changes the optimizer when it begins, also when it never acts."""

    def init(state: dt.TrainState) -> dict:
        state.optimizer.param_groups[0]["lr"] *= 0.5
        return {}

    return dt.Transform(name="rate", init=init)


def norm_of_the_shard() -> dt.Transform:
    """Clips by the norm of this rank's shard."""

    def act(state: dt.TrainState) -> None:
        for param in state.params.values():
            shard = param.grad.to_local() if hasattr(param.grad, "to_local") else param.grad
            shard.mul_(min(1.0, 0.05 / (shard.norm().item() + 1e-6)))

    return _before("shard_norm", act)


def mean_of_one_rank() -> dt.Transform:
    """Return a transform that reports a rank's own metric as that of the job."""

    def wrap(inner: Any) -> Any:
        def counted(state: Any, metrics: Any) -> Any:
            weight = torch.ones((), dtype=torch.float64)
            return inner(state, {**metrics, "share": dt.typing.Metric(metrics["loss"].weight, weight)})

        return counted

    return dt.Transform(name="share", update=wrap)


def counting_ranks() -> dt.Transform:
    """Keeps a number that depends on how many ranks there are."""

    def init(state: dt.TrainState) -> dict:
        return {"seen": 0.0}

    def wrap(inner: Any) -> Any:
        def pulled(state: Any, metrics: Any) -> Any:
            seen = state.transform_states["counting"]["seen"] + 0.01 * state.spec.data_ranks
            for param in state.params.values():
                param.grad.mul_(1.0 + seen)
            return inner(state.with_transform_state("counting", {"seen": seen}), metrics)

        return pulled

    return dt.Transform(name="counting", init=init, update=wrap)


def waiting_for_the_norm() -> dt.Transform:
    """Looks at a number of the gradient on the host."""
    return _before("waiting", lambda state: next(iter(state.params.values())).grad.norm().item() and None)


def gathering() -> dt.Transform:
    """Puts all parameters together on every rank."""
    return _before("gathering", lambda state: [full_tensor(param) for param in state.params.values()] and None)


def leaking(name: str, act: Callable[[dt.TrainState], Any], seam: str = "update") -> Callable[[], dt.Transform]:
    return lambda: _before(name, act, seam)


def _halve_rates(state: dt.TrainState) -> None:
    for group in state.optimizer.param_groups:
        group["lr"] *= 0.5


def _perturb(state: dt.TrainState) -> None:
    with torch.no_grad():
        for param in state.params.values():
            param.add_(0.01)


def _hook(state: dt.TrainState) -> None:
    next(iter(state.params.values())).register_post_accumulate_grad_hook(lambda param: None)


def _hook_from_a_loss() -> dt.Transform:
    def wrap(inner: Any, context: dt.step.StepContext) -> Any:
        context.state.model.register_forward_hook(lambda module, given, result: None)
        return inner

    return dt.Transform(name="loss_hook", loss=wrap)


def _count_in_place() -> dt.Transform:
    def act(state: dt.TrainState) -> None:
        state.transform_states["in_place"]["seen"] += 1

    return replace(_before("in_place", act), init=lambda state: {"seen": 0})


def unspent() -> dt.Transform:
    """Return a transform that accepts a stepped state as the newest state."""

    def wrap(inner: Any) -> Any:
        def reviving(state: Any, metrics: Any) -> Any:
            after, metrics = inner(state, metrics)
            state._run_context.generation = state._generation - 1
            return replace(after, _generation=state._generation - 1), metrics

        return reviving

    return dt.Transform(name="unspent", update=wrap)


def _slice(name: str, make: Callable[[dt.TrainState], Any]) -> Callable[[], dt.Transform]:
    return lambda: dt.Transform(name=name, init=make)


BROKEN: dict[str, tuple[str, Row]] = {
    "memory outside the slice": ("resume", Row(make=memory_outside_the_slice)),
    "global generator in init": ("never active", Row(make=global_generator_in_init)),
    "rate changed in init": ("never active", Row(make=rate_changed_in_init)),
    "norm of the shard": ("ranks", Row(make=norm_of_the_shard)),
    "mean of one rank": ("ranks", Row(make=mean_of_one_rank)),
    "state of a rank": ("fewer ranks", Row(make=counting_ranks)),
    "waiting for the device": ("host syncs", Row(make=waiting_for_the_norm)),
    "gathering all parameters": ("collectives", Row(make=gathering)),
    "a wrong number": ("points", Row(make=halved, points=lambda: [(1.0, 1.0), (2.0, 2.5)])),
    "one number only": ("points", Row(make=halved, points=lambda: [(1.0, 1.0)])),
    "one number twice": ("points", Row(make=halved, points=lambda: [(1.0, 1.0), (1.0, 1.0)])),
    "slice with an object": ("slices", Row(make=_slice("object", lambda state: {"device": state.device}))),
    "slice with a list": (
        "slices",
        Row(make=_slice("list", lambda state: {"all": [p.clone() for p in state.params.values()]})),
    ),
    "slice keyed by number": ("slices", Row(make=_slice("number", lambda state: {0: 1.0}))),
    "slice keyed by place": (
        "slices",
        Row(
            make=_slice(
                "place", lambda state: {str(number): p.detach().clone() for number, p in enumerate(state.params.values())}
            )
        ),
    ),
    "slice that is a parameter": ("slices", Row(make=_slice("alias", lambda state: {"params": dict(state.params)}))),
    "rate left changed": ("exception", Row(make=leaking("rate", _halve_rates))),
    "parameters left changed": ("exception", Row(make=leaking("perturb", _perturb, "grad"))),
    "hook left behind": ("exception", Row(make=leaking("hook", _hook, "grad"))),
    "hook left by a loss": ("exception", Row(make=_hook_from_a_loss)),
    "mode left changed": ("exception", Row(make=leaking("mode", lambda state: state.model.eval() and None, "grad"))),
    "random numbers used up": ("exception", Row(make=leaking("draw", lambda state: torch.rand(()) and None))),
    "slice changed in place": ("exception", Row(make=_count_in_place)),
    "spent state revived": ("spent", Row(make=unspent)),
}


def row(name: str) -> Row:
    """A row, sound or broken: ranks find it by name."""
    return ROWS[name] if name in ROWS else BROKEN[name][1]


def make(name: str) -> dt.Transform:
    """The transform of a row, anew."""
    return row(name).make()
