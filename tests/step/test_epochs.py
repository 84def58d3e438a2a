"""Epochs are the loader's, however many steps a loop makes of a batch."""

import copy
import io

import pytest
import torch
from torch import nn

import dtrain as dt
from dtrain.data.batch import get_batch_infos
from dtrain.schedules.clock import EpochPosition

LOSS = dt.mean_loss(lambda model, batch: model(batch["x"]).square().mean(), weight=lambda batch: len(batch["x"]))


def rows(count: int = 20) -> list[dict]:
    return [{"x": torch.full((1,), float(number + 1))} for number in range(count)]


def loader(count: int = 20, **options):
    return dt.build_loader(rows(count), **{"global_batch_size": 2, "seed": 0, **options})


def begin(*transforms, frozen_part: bool = False, lr: float = 1e-4, **options):
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)) if frozen_part else nn.Linear(1, 1)
    step = dt.compose_step(LOSS, transforms)
    return step, step.init(model, torch.optim.SGD(model.parameters(), lr=lr), **options)


def several_steps(source, until: str, *, steps: int):
    """``steps`` on each batch."""
    for batch in source.until(until):
        yield [batch] * steps


def now_and_then(source, until: str, *, every: int):
    """One step on each ``every``-th batch."""
    for number, batch in enumerate(source.until(until), 1):
        yield [batch] if number % every == 0 else []


def slices(source, until: str, *, parts: int):
    """Make one step on each slice of a batch, as on the minibatches of a rollout."""
    for batch in source.until(until):
        yield [{"x": piece.clone()} for piece in batch["x"].chunk(parts)]


LOOPS = {
    "one": lambda source, until: several_steps(source, until, steps=1),
    "four": lambda source, until: several_steps(source, until, steps=4),
    "third": lambda source, until: now_and_then(source, until, every=3),
    "slices": lambda source, until: slices(source, until, parts=2),
}
STEPS = {"one": 10, "four": 40, "slices": 20}  # in an epoch of ten batches


def run_of(loop: str, source, *transforms, until: str = "3ep", **options):
    """The loop; (state, crossed an epoch) after the steps on each batch."""
    step, state = begin(*transforms, **({"loader": source} if loop == "slices" else {}), **options)
    crossings = []
    for batches in LOOPS[loop](source, until):
        for batch in batches:
            state, _ = step(state, batch)
        if batches:
            crossings.append((state, state.crossed("1ep")))
    return state, crossings


@pytest.mark.parametrize("loop", LOOPS)
def test_clock_counts_three_epochs(loop):
    state, crossings = run_of(loop, loader())
    assert state.clock.epoch == 3
    assert sum(crossed for _, crossed in crossings) == 3


@pytest.mark.parametrize("loop", LOOPS)
def test_clock_position_follows_the_loader_position(loop):
    source = loader()
    step, state = begin(**({"loader": source} if loop == "slices" else {}))
    for batches in LOOPS[loop](source, "3ep"):
        for batch in batches:
            state, _ = step(state, batch)
            assert state.clock._position == (source.position.epoch, source.position.samples // 2)
            assert state.reached("2ep") == (source.position.epoch >= 2)


def test_run_fraction_in_epochs_depends_only_on_data():
    source = loader()
    for steps in (1, 4):
        source = loader()
        step, state = begin(run_length=source.run_length("2ep"))
        numbers = []
        for number, batch in enumerate(source.until("2ep"), 1):
            for _ in range(steps):
                state, _ = step(state, batch)
            if state.crossed("0.25dur"):
                numbers.append(number)
        assert numbers == [5, 10, 15, 20]
        assert state.clock.count("dur") == 1.0


def test_states_sharing_batches_cross_epochs_together():
    source = loader()
    (step, one), (_, other) = begin(), begin()
    for batch in source.until("2ep"):
        one, _ = step(one, batch)
        for _ in range(3):
            other, _ = step(other, batch)
        assert one.crossed("1ep") == other.crossed("1ep")
    assert (one.clock.epoch, other.clock.epoch, one.step, other.step) == (2, 2, 20, 60)


def test_states_with_separate_loaders_count_epochs_independently():
    long, short = loader(20), loader(8)
    (step, one), (_, other) = begin(), begin()
    for mine, theirs in zip(long.until("1ep"), short.until("10ep"), strict=False):
        one, _ = step(one, mine)
        other, _ = step(other, theirs)
    assert (one.clock.epoch, other.clock.epoch) == (1, 2)
    assert other.clock._position == (2, 2)


def test_zipped_loaders_require_the_loader_argument():
    def pairs():
        long, short = loader(20), loader(8)
        for mine, theirs in zip(long.until("1ep"), short.until("10ep"), strict=False):
            yield long, short, {"x": mine["x"], "y": theirs["x"]}

    step, state = begin()
    for _, _, batch in pairs():
        state, _ = step(state, batch)
    with pytest.raises(
        dt.errors.ConfigError, match=r"1ep is counted in epochs, .*tensors of 2 loaders.*step.init\(.*loader=loader"
    ):
        state.crossed("1ep")
    for index, epochs in ((0, 1), (1, 2)):
        state = None
        for *loaders, batch in pairs():
            step, state = (step, state) if state is not None else begin(loader=loaders[index])
            state, _ = step(state, batch)
        assert state.clock.epoch == epochs


def test_alternating_loaders_require_the_loader_argument():
    step, state = begin()
    first, second = loader(20), loader(8)
    for mine, theirs in zip(first.until("1ep"), second.until("10ep"), strict=False):
        state, _ = step(state, mine)
        state, _ = step(state, theirs)
        last = step(state, mine)[0]
        break
    with pytest.raises(dt.errors.ConfigError, match="batches of several loaders alternate"):
        last.crossed("1ep")


def test_second_stage_loader_continues_the_epoch_count():
    step, state = begin()
    for source in (loader(20), loader(8)):
        for batch in source.until("2ep"):
            state, _ = step(state, batch)
    assert state.clock.epoch == 4


@pytest.mark.parametrize(
    "use",
    [
        lambda state: state.crossed("1ep"),
        lambda state: state.reached("2ep"),
        lambda state: state.clock.count("ep"),
        lambda state: state.crossed("0.5dur"),
        lambda state: dt.monitors.early_stop("loss", patience="1ep")(state, {"loss": 1.0}),
    ],
    ids=["crossed", "reached", "count", "dur", "early_stop"],
)
def test_epoch_intervals_raise_without_a_loader(use):
    step, state = begin(run_length=dt.schedules.RunLength(total="2ep", steps_per_epoch=10))
    for batch in torch.utils.data.DataLoader(rows(), batch_size=2):
        state, _ = step(state, batch)
    with pytest.raises(
        dt.errors.ConfigError, match=r"counted in epochs, and this loop has none: .*dt.build_loader.*Or count in steps"
    ):
        use(state)
    assert state.crossed("10ba")


@pytest.mark.parametrize(
    "transform",
    [
        lambda: dt.transforms.freeze("0.**", start="1ep"),
        lambda: dt.transforms.swa(start="1ep", every="1ep", end="3ep"),
        lambda: dt.transforms.every("1ep", dt.transforms.clip_by_norm(1.0)),
        lambda: dt.transforms.between("1ep", "2ep", dt.transforms.clip_by_norm(1.0)),
        lambda: dt.transforms.scale_lr(dt.schedules.with_unit("ep", lambda epoch: 1.0 / (1 + epoch))),
        lambda: dt.transforms.ema(0.9, every="1ep"),
    ],
    ids=["freeze", "swa", "every", "between", "with_unit", "ema"],
)
def test_epoch_based_transforms_raise_without_a_loader(transform):
    step, state = begin(transform(), frozen_part=True)
    batch = next(iter(torch.utils.data.DataLoader(rows(), batch_size=2)))

    def two_steps():
        step(step(state, batch)[0], batch)

    with pytest.raises(dt.errors.ConfigError, match="counted in epochs, and this loop has none"):
        two_steps()


@pytest.mark.parametrize("loop", STEPS)
def test_freeze_starts_at_the_first_step_of_its_epoch(loop):
    source = loader()
    step, state = begin(
        dt.transforms.freeze("0.**", start="1ep"), frozen_part=True, **({"loader": source} if loop == "slices" else {})
    )
    moved = []
    for batches in LOOPS[loop](source, "2ep"):
        for batch in batches:
            before = state.model[0].weight.item()
            state, _ = step(state, batch)
            moved.append(state.model[0].weight.item() != before)
    assert moved == [True] * STEPS[loop] + [False] * STEPS[loop]


@pytest.mark.parametrize("loop", LOOPS)
def test_epoch_based_schedule_follows_the_loader(loop):
    source = loader()
    step, state = begin(
        dt.transforms.scale_lr(dt.schedules.with_unit("ep", lambda epoch: 1.0 - 0.1 * min(epoch, 5))),
        lr=1e-4,
        **({"loader": source} if loop == "slices" else {}),
    )
    for batches in LOOPS[loop](source, "3ep"):
        number = source.position.batches - 1
        for batch in batches:
            state, metrics = step(state, batch)
            assert dt.reduce_metrics(metrics)["lr"] == pytest.approx(1e-4 * (1.0 - 0.1 * (number // 10)))


@pytest.mark.parametrize("loop", LOOPS)
def test_swa_averages_once_per_epoch(loop):
    state, _ = run_of(loop, loader(), dt.transforms.swa(start="1ep", every="1ep", end="3ep"))
    assert state.transform_states["swa"]["averaged"] == 3


@pytest.mark.parametrize("loop", LOOPS)
def test_every_one_epoch_runs_in_each_epochs_first_step(loop):
    acted = []

    def update(inner):
        def noted(state, metrics):
            acted.append(state.step)
            return inner(state, metrics)

        return noted

    run_of(loop, loader(), dt.transforms.every("1ep", dt.Transform(name="noted", update=update)))
    assert acted == {"one": [0, 10, 20], "four": [0, 40, 80], "slices": [0, 20, 40], "third": [0, 3, 6]}[loop]


def timeless(state) -> dict:
    clock = state.clock.state_dict()
    return {**clock, "seconds": 0, "previous": {**clock["previous"], "seconds": 0}}


@pytest.mark.costly
@pytest.mark.parametrize("loop", ["four", "third", "slices"])
@pytest.mark.parametrize("stop_at", [7, 10, 14])
def test_resumed_run_counts_epochs_as_an_uninterrupted_run(loop, stop_at, tmp_path):
    def go(state, step, source, until):
        crossings = []
        for batches in LOOPS[loop](source, until):
            for batch in batches:
                state, _ = step(state, batch)
            if batches and state.crossed("1ep"):
                crossings.append(source.position.batches)
            if batches and source.position.batches >= stop_at and not dt.latest_checkpoint(tmp_path):
                dt.save_sharded(tmp_path, state)
        return state, crossings

    source = loader()
    step, state = begin(dt.transforms.swa(start="1ep", every="1ep", end="4ep"), loader=source)
    whole, crossed = go(state, step, source, "3ep")
    source = loader()
    step, state = begin(dt.transforms.swa(start="1ep", every="1ep", end="4ep"), loader=source)
    state = dt.load_sharded(tmp_path, state)
    saved = source.position.batches
    if loop == "third":  # its loop counts from where it begins
        assert saved % 3 == 0
    state, after = go(state, step, source, "3ep")
    assert after == [step_number for step_number in crossed if step_number > saved]
    assert timeless(state) == timeless(whole)
    assert state.transform_states["swa"]["averaged"] == whole.transform_states["swa"]["averaged"]


def test_checkpoint_epoch_count_continues_with_a_new_loader(tmp_path):
    first, second = loader(), loader()
    step, state = begin(loader=dt.checkpoint.not_saved(first))
    for batch in first.until("2ep"):
        state, _ = step(state, batch)
    dt.save_sharded(tmp_path, state)
    step, state = begin(loader=dt.checkpoint.not_saved(second))
    state = dt.load_sharded(tmp_path, state)
    for batch in second.until("1ep"):
        state, _ = step(state, batch)
    assert state.clock.epoch == 3


def test_manual_step_loop_counts_epochs():
    source, (_, state) = loader(), begin()
    for batch in source.until("2ep"):
        for _ in range(2):
            state, metrics = dt.microbatch_step(state, batch, loss_fn=LOSS, microbatch_size=1)
            state, metrics = dt.optimizer_step(state, metrics)
    assert (state.clock.epoch, state.step) == (2, 40)


def test_batch_position_survives_rewrapping_and_dtrain_copies():
    batch = next(loader().until("1ep"))
    (origin,) = get_batch_infos(batch)
    assert get_batch_infos({"again": [batch["x"]]}) == [origin]
    assert get_batch_infos((batch, 3)) == [origin]
    assert [get_batch_infos(piece) for piece in dt.data.split_batch(batch, 1)] == [[origin]] * 2
    assert [get_batch_infos(moved) for moved in dt.data.prefetch_to_device([batch], "meta")] == [[origin]]
    assert get_batch_infos(copy.deepcopy(dict(batch))) == [origin]
    assert get_batch_infos({"x": batch["x"][:1]}) == []


def test_saved_batch_loads_with_weights_only():
    file = io.BytesIO()
    torch.save(dict(next(loader().until("1ep"))), file)
    file.seek(0)
    assert torch.load(file, weights_only=True)["x"].shape == (2, 1)


def test_batch_rebuilt_by_a_transform_keeps_its_position():
    state, _ = run_of("one", loader(), dt.transforms.on_batch(lambda batch, generator: {"x": batch["x"] + 0.0}, name="new"))
    assert state.clock.epoch == 3


def test_batch_size_schedule_updates_the_epoch_position():
    step, state = begin()
    source = loader(global_batch_size=lambda step: 2 if step < 4 else 4)
    seen = []
    for batch in source.until("2ep"):
        for _ in range(2):
            state, _ = step(state, batch)
        seen.append(state.clock._position)
    assert seen == [(0, n) for n in range(1, 7)] + [(1, 0)] + [(1, n) for n in range(1, 5)] + [(2, 0)]


def test_epoch_positions_compare_as_tuples():
    assert EpochPosition(1, 0) == (1, 0)
