"""A run whose loss is infinite or NaN again and again stops by default, on all ranks, without a wait in any step."""

import pytest
import torch
from torch import Tensor, nn

import dtrain as dt
from dtrain.dist.init import get_dist_info
from dtrain.errors import NonFiniteError
from dtrain.run_context import AsyncScalar, NonfiniteLossCounter
from dtrain.testing import count_host_syncs

LOSS = dt.mean_loss(lambda model, x: model(x).mean(), weight=len)
NAN, INF, FINE = float("nan"), float("inf"), 1.0


def begin(*transforms: dt.Transform, make=dt.compose_step, **options) -> tuple[dt.step.Step, dt.TrainState]:
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    if torch.distributed.is_initialized():
        model = dt.shard_model(model, dt.build_mesh(), strategy="full_shard", blocks=())
    step = make(LOSS, transforms, **options)
    return step, step.init(model, torch.optim.SGD(model.parameters(), lr=0.1))


def run(step: dt.step.Step, state: dt.TrainState, values: list[float]) -> dt.TrainState:
    for value in values:
        state, _ = step(state, torch.full((2, 1), value))
    return state


def stopped_at(step: dt.step.Step, state: dt.TrainState, values: list[float]) -> tuple[int, str]:
    """Return the step that raised (-1 if none did) and its message."""
    for value in values:
        try:
            state, _ = step(state, torch.full((2, 1), value))
        except NonFiniteError as error:
            return state.step, str(error)
    return -1, ""


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_ten_nonfinite_losses_in_a_row_raise(bad):
    last, said = stopped_at(*begin(), [FINE] * 3 + [bad] * 20)
    assert last == 13
    assert said == (
        "step: the loss was infinite or NaN in 10 steps in a row, from step 3 on. The updates have spoiled the "
        "parameters, so load a checkpoint of step 2 or before, then lower the learning rate, clip, or look at the batches. "
        "dt.transforms.nonfinite skips such updates, and changes the number of steps that stops the run."
    )


def test_nonfinite_losses_from_step_zero_advise_a_restart():
    assert "from step 0 on. The updates have spoiled the parameters, so start again" in stopped_at(*begin(), [NAN] * 20)[1]


def spoiled_once() -> dt.Transform:
    """A gradient that is NaN in step 2, under a loss that is finite."""

    def update(inner):
        def spoiled(state, metrics):
            if state.step == 2:
                state.params["weight"].grad.fill_(NAN)
            return inner(state, metrics)

        return spoiled

    return dt.Transform(name="spoil", update=update)


def test_nan_gradient_is_detected_from_later_losses():
    last, said = stopped_at(*begin(spoiled_once()), [FINE] * 20)
    assert last == 13
    assert "from step 3 on" in said
    assert "a checkpoint of step 2 or before" in said  # that of step 3 has the NaN already


def test_optimizer_in_backward_stops_after_nonfinite_losses():
    assert (
        stopped_at(*begin(make=dt.step.optimizer_in_backward, batch_spec=dt.batch_spec(weight=len)), [FINE] + [NAN] * 20)[0]
        == 11
    )


def test_finite_loss_resets_the_nonfinite_count():
    step, state = begin(dt.transforms.nonfinite("allow"), dt.Transform(name="keep", update=lambda inner: lambda s, m: (s, m)))
    run(step, state, ([NAN] * 9 + [FINE]) * 4)


def test_two_gradients_per_step_count_as_one_nonfinite_step():
    twice = dt.Transform(
        name="twice",
        grad=lambda inner: lambda state, batch, **rest: (inner(state, batch, **rest), inner(state, batch, **rest))[1],
    )
    assert stopped_at(*begin(twice), [NAN] * 20)[0] == 9  # the second gradient of the tenth step


def test_allow_mode_sets_or_disables_the_nonfinite_limit():
    assert stopped_at(*begin(dt.transforms.nonfinite("allow", in_a_row=3)), [NAN] * 20)[0] == 3
    assert stopped_at(*begin(dt.transforms.nonfinite("allow", in_a_row=None)), [NAN] * 40)[0] == -1


def test_skip_mode_stops_after_the_nonfinite_limit():
    last, said = stopped_at(*begin(dt.transforms.nonfinite("skip")), [FINE] + [NAN] * 20)
    assert (last, said[:72]) == (10, "nonfinite: step 10: a gradient is not finite, 10 steps in a row (on this")
    assert stopped_at(*begin(dt.transforms.nonfinite("skip", in_a_row=None)), [NAN] * 40)[0] == -1


def test_skipped_updates_stop_on_nonfinite_gradients_with_finite_losses():
    def spoil(inner):
        def spoiled(state, metrics):
            state.params["weight"].grad.fill_(NAN)
            return inner(state, metrics)

        return spoiled

    def update(state, metrics):
        return dt.apply_gradients(state, metrics, nonfinite="skip")

    step, state = begin(dt.Transform(name="spoil", update=spoil), update=update)
    last, said = stopped_at(step, state, [FINE] * 20)
    assert last == 9
    assert "apply_gradients: step 9: a gradient is not finite, 10 steps in a row (on this rank: weight)" in said
    assert "so the parameters are intact" in said
    assert state.model.weight.isfinite().all()


def test_loss_scale_calibration_does_not_stop_the_run():
    """Gradients overflow for thirty steps, and the losses are finite."""
    step, state = begin(dt.transforms.loss_scale(2.0**120))
    state = run(step, state, [1e18] * 30)
    assert state.transform_states["loss_scale"]["scale"] < 2.0**100


def test_nan_loss_with_loss_scale_stops_the_run():
    assert stopped_at(*begin(dt.transforms.loss_scale()), [NAN] * 20)[0] == 10


def trained(*transforms: dt.Transform) -> list[Tensor]:
    step, state = begin(*transforms)
    state = run(step, state, [0.5, 2.0, 1.0])
    return [param.detach().clone() for param in state.params.values()]


def test_nonfinite_check_changes_no_numbers_and_adds_no_syncs():
    for watched, free in zip(trained(), trained(dt.transforms.nonfinite("allow", in_a_row=None)), strict=True):
        assert torch.equal(watched, free)
    step, state = begin()
    state = run(step, state, [FINE])
    with count_host_syncs() as seen:
        run(step, state, [FINE] * 3)
    assert [str(call) for call in seen.calls] == []


def test_load_sharded_resets_the_nonfinite_count(tmp_path):
    step, state = begin()
    state = run(step, state, [FINE])
    dt.save_sharded(tmp_path, state)
    state = run(step, state, [NAN] * 8)
    state = dt.load_sharded(tmp_path, state)
    run(step, state, [NAN] * 8)


class Late(AsyncScalar):
    """A scalar that arrives when it has been asked for several times, as on a GPU that is behind."""

    __slots__ = ("asked",)

    def copy_from(self, value: Tensor) -> None:
        self.asked = 0
        super().copy_from(value)

    def try_read(self) -> float | None:
        self.asked += 1
        return super().try_read() if self.asked > 3 else None


class OnDevice(Tensor):
    """A loss that is not on the CPU."""

    is_cpu = False


def test_delayed_device_results_are_all_counted():
    watch = NonfiniteLossCounter(limit=10)
    watch._host = Late(torch.device("cpu"))
    failures = []
    for step in range(30):
        failures.append(watch.first_failed_step())
        loss = torch.tensor(NAN if step >= 5 else 1.0, dtype=torch.float64)
        watch.record(step, loss.as_subclass(OnDevice))
    first = next(step for step in failures if step is not None)
    assert first == 5
    assert failures.index(first) <= 5 + 10 + 2 * 4


def on_ranks() -> list:
    """One rank's loss is NaN, and no update is made, so the other rank's losses stay finite."""
    step, state = begin(dt.Transform(name="keep", update=lambda inner: lambda s, m: (s, m)))
    values = [FINE] * 2 + [NAN if get_dist_info().rank == 1 else FINE] * 20
    return list(stopped_at(step, state, values))


def test_nonfinite_loss_on_one_rank_raises_on_all_ranks(ranks):
    first, second = ranks(2).run(on_ranks)
    assert first == second
    assert first[0] == 12
    assert "from step 2 on" in first[1]
