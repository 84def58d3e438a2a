"""Promises of every edit of a model, as functions that raise ``AssertionError``. Each takes the name of a row."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

import dtrain as dt
from battery.run import differences, snapshot
from battery.surgery import row
from dtrain.data.sample_order import rank_share
from dtrain.dist.init import get_dist_info
from dtrain.dist.rng import seed_all
from dtrain.errors import ConfigError
from dtrain.testing import Ranks, count_host_syncs

STEPS, FIRST = 5, 2  # of a whole run, and before it is interrupted
SAMPLES = 8  # of a global batch; two ranks have as many each
TOLERANCE = 1e-12  # norm of the difference over norm of all, in float64; rounding gives about 1e-15

Step = Callable[[dt.TrainState], tuple[dt.TrainState, dt.typing.Metrics]]


def plain(name: str) -> nn.Module:
    """The model of a row, the same each time."""
    torch.manual_seed(11)
    return row(name).make().double()


def edited(name: str) -> nn.Module:
    return row(name).edit(plain(name))


def inputs(name: str, step: int = 0) -> torch.Tensor:
    """The global batch of a step."""
    shape, numbers = row(name).inputs
    generator = torch.Generator().manual_seed(step)
    if numbers is not None:
        return torch.randint(numbers, (SAMPLES, *shape), generator=generator)
    return torch.randn(SAMPLES, *shape, generator=generator, dtype=torch.float64)


def begin(name: str) -> tuple[Step, dt.TrainState]:
    """A step over the edited model, sharded where there are process groups, and its first state."""
    model = edited(name)
    seed_all(7, get_dist_info().rank)
    if torch.distributed.is_initialized():
        model = dt.shard_model(model, dt.build_mesh(), strategy="full_shard", blocks=row(name).blocks)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
    loss = dt.mean_loss(
        lambda net, batch: (net(batch["x"]).flatten(1) - 1.0).square().mean(), weight=lambda batch: len(batch["x"])
    )
    step = dt.compose_step(loss, [], grad=partial(dt.microbatch_step, microbatch_size=SAMPLES))
    start, stop = rank_share(0, SAMPLES, get_dist_info().rank, get_dist_info().world_size)

    def take(state: dt.TrainState) -> tuple[dt.TrainState, dt.typing.Metrics]:
        return step(state, {"x": inputs(name, state.step)[start:stop]})

    return take, step.init(model, optimizer, seed=5)


def train(take: Step, state: dt.TrainState, until: int) -> dt.TrainState:
    while state.step < until:
        state, _ = take(state)
    return state


def check_report(name: str) -> None:
    """The edit replaces the modules that the row names, and no other module."""
    before, after = dict(plain(name).named_modules()), dict(edited(name).named_modules())
    kinds = {key: type(module) for key, module in before.items()}
    changes = {
        key: type(module).__name__
        for key, module in after.items()
        if key in kinds and kinds[key] is not type(module) and not _below(key, row(name).changes)
    }
    gone = [key for key in before if key not in after and not _below(key, row(name).changes)]
    assert changes == row(name).changes, f"report: {name}: changed {changes}, but the row says {row(name).changes}"
    assert gone == [], f"report: {name}: {gone} are gone"


def _below(key: str, changed: dict[str, str]) -> bool:
    return any(key != place and key.startswith(f"{place}." if place else "") for place in changed)


def check_raises_when_nothing_fits(name: str) -> None:
    """A model in which there is nothing to do is an error, or a warning where that is usual, and stays as it was."""
    make = row(name).outside
    if make is None:
        return
    model = make()
    before = [type(module) for module in model.modules()]
    with warnings.catch_warnings(record=True, action="always") as warned:
        try:
            row(name).edit(model)
            said = "".join(str(warning.message) for warning in warned)
        except ConfigError as error:
            said = str(error)
    assert said, f"nothing fits: {name}: found nothing to do, and said nothing"
    assert "\n" not in said, f"nothing fits: {name}: the message has several lines"
    assert [type(module) for module in model.modules()] == before, f"nothing fits: {name}: changed the model all the same"


def refused(name: str) -> str:
    """Return the error of the edit for a sharded model."""
    model = dt.shard_model(plain(name), dt.build_mesh(), blocks=row(name).blocks)
    try:
        row(name).edit(model)
    except ConfigError as error:
        return str(error)
    return ""


def refused_all(names: list[str]) -> list[str]:
    """The same for several rows, in one visit to the ranks."""
    return [refused(name) for name in names]


def check_refuses_sharded(name: str, ranks: Callable[[int], Ranks]) -> None:
    """A sharded model is refused."""
    said = ranks(1).run(refused, name)[0]
    assert said, f"sharded: {name}: took a model that is sharded"


def trained_numbers(name: str) -> list[float]:
    """All parameters at the end of a run."""
    return numbers(train(*begin(name), STEPS))


def numbers(state: dt.TrainState) -> list[float]:
    """All parameters of a state."""
    return [value for _, tensor in dt.full_params(state) for value in tensor.flatten().tolist()]


def check_ranks_equal_one(name: str, ranks: Callable[[int], Ranks]) -> None:
    """Two ranks that share each batch end where one does."""
    alone, *pair = (
        torch.tensor(n, dtype=torch.float64) for n in ranks(1).run(trained_numbers, name) + ranks(2).run(trained_numbers, name)
    )
    for params in pair:
        apart = ((alone - params).norm() / alone.norm()).item()
        assert apart <= TOLERANCE, f"ranks: {name}: parameters on two ranks are {apart:.1e} from those on one"


def check_resumed_by_fewer_ranks(name: str, root: str, ranks: Callable[[int], Ranks]) -> None:
    """Saved by two ranks, and continued by one, it ends where a run of one rank alone does."""
    ranks(2).run(_saved_in_the_middle, name, root)
    resumed, alone = (
        torch.tensor(ranks(1).run(function, name, root)[0], dtype=torch.float64) for function in (_continued, _alone)
    )
    if row(name).per_rank:
        assert resumed.isfinite().all(), f"fewer: {name}: continued by one rank it is not finite"
        return
    apart = ((alone - resumed).norm() / alone.norm()).item()
    assert apart <= TOLERANCE, f"fewer: {name}: continued by one rank it ends {apart:.1e} from a run of one rank"


def _saved_in_the_middle(name: str, root: str) -> None:
    dt.save_sharded(root, train(*begin(name), FIRST))


def _continued(name: str, root: str) -> list[float]:
    take, state = begin(name)
    return numbers(train(take, dt.load_sharded(root, state), STEPS))


def _alone(name: str, root: str) -> list[float]:
    return trained_numbers(name)


def check_resume_equals_straight(name: str, root: str) -> None:
    """Interrupted in the middle, saved, loaded into a fresh model and continued: every bit is that of the run in one piece."""
    straight = snapshot(train(*begin(name), STEPS))
    dt.save_sharded(root, train(*begin(name), FIRST))
    take, state = begin(name)
    seed_all(99)  # as a new process would have it
    state = train(take, dt.load_sharded(root, state), STEPS)
    changed = differences(straight, snapshot(state))
    assert changed == [], f"resume: {name}: differs from the straight run at {changed}"


def check_no_host_sync(name: str) -> None:
    """A forward and backward in training makes the host wait as often as that of the plain model."""
    counts = []
    for model in (plain(name), edited(name)):
        x = inputs(name)
        model(x).sum().backward()  # reads now the values that are read only once
        with count_host_syncs() as seen:
            model(x).sum().backward()
        counts.append(seen.count)
    more = counts[1] - counts[0]
    assert more <= row(name).syncs, f"syncs: {name}: waits {more} times more, the row says {row(name).syncs}"


def check_what_stays_is_kept(name: str) -> None:
    """Mode and dtype everywhere; and of parameters under their old names (and shapes) the value, and whether they train."""
    before, model = plain(name).eval(), plain(name).eval()
    for net in (before, model):
        next(iter(net.parameters())).requires_grad_(False)
    after = row(name).edit(model)
    problems = [f"{key} is in training mode" for key, module in after.named_modules() if module.training]
    for key, tensor in [*after.named_parameters(), *after.named_buffers()]:
        if key.endswith("blur_kernel"):  # its numbers are exact in float32, and it computes in the dtype of its input
            continue
        if tensor.is_floating_point() and tensor.dtype != torch.float64:
            problems.append(f"{key} is {tensor.dtype}")
    now = dict(after.named_parameters())
    for key, param in before.named_parameters():
        if key in now and now[key].shape == param.shape and not _below(key, _replaced_whole(name, after)):
            if not torch.equal(now[key], param):
                problems.append(f"{key} has other values")
            if now[key].requires_grad != param.requires_grad:
                problems.append(f"{key} has another requires_grad")
    assert problems == [], f"kept: {name}: {problems}"


def _replaced_whole(name: str, after: nn.Module) -> dict[str, str]:
    """Places where other modules stand, which have parameters of their own, maybe of the old names."""
    kinds = {key: type(module) for key, module in plain(name).named_modules()}
    return {key: kind for key, kind in row(name).changes.items() if not isinstance(after.get_submodule(key), kinds[key])}


def check_materializes(name: str) -> None:
    """Edited on meta, a model gets all its values afterwards, and computes."""
    with torch.device("meta"):
        model = row(name).make()
    model = row(name).edit(model)
    left = []
    try:
        model = dt.materialize(model, seed=3).double()
    except ConfigError as error:
        left = [str(error)]
    assert left == [], f"meta: {name}: {left}"
    out = model(inputs(name))
    assert out.isfinite().all(), f"meta: {name}: computes numbers that are not finite"


def check_computes_the_same(name: str) -> None:
    """Require that, in evaluation, the edited model computes the outputs of the plain model, up to rounding."""
    x = inputs(name)
    here, there = plain(name).eval()(x), edited(name).eval()(x)
    apart = ((here - there).norm() / here.norm()).item()
    assert apart <= TOLERANCE, f"initial: {name}: computes {apart:.1e} from the plain model"


CHECKS: dict[str, Callable[..., Any]] = {
    "report": check_report,
    "nothing fits": check_raises_when_nothing_fits,
    "sharded": check_refuses_sharded,
    "ranks": check_ranks_equal_one,
    "fewer": check_resumed_by_fewer_ranks,
    "resume": check_resume_equals_straight,
    "syncs": check_no_host_sync,
    "kept": check_what_stays_is_kept,
    "meta": check_materializes,
    "initial": check_computes_the_same,
}
