"""The gradient noise scale compared with that of known data; and that measuring it changes nothing."""

from functools import partial

import pytest
import torch
from torch import nn

import dtrain as dt
from dtrain.dist.dtensor import to_local
from dtrain.errors import ConfigError
from dtrain.transforms.gradients.noise_scale import estimate_noise_and_signal, noise_scale
from dtrain.transforms.gradients.nonfinite import nonfinite

LOSS = dt.mean_loss(lambda model, batch: model(batch["x"]).mean(), weight=lambda batch: len(batch["x"]))
DIM, TRUE = 50, 0.3  # the gradient of a sample is TRUE everywhere, plus a normal number of variance 1


def begin(*transforms, model=None, loss=LOSS, lr=0.0, **parts):
    model = model or nn.Linear(DIM, 1, bias=False).double()
    step = dt.compose_step(loss, transforms, **parts)
    return step, step.init(model, torch.optim.SGD(model.parameters(), lr=lr))


def samples(step, count):
    generator = torch.Generator().manual_seed(step)
    return {"x": TRUE + torch.randn(count, DIM, generator=generator, dtype=torch.float64)}


def test_noise_scale_matches_the_known_value_of_the_data():
    """The variance of a sample's gradient is DIM, the square of the true one DIM * TRUE**2: their quotient is 1 / TRUE**2."""
    step, state = begin(noise_scale(lambda step: step / (step + 1), every=1))  # the plain mean over all steps
    for number in range(200):
        state, metrics = step(state, samples(number, 32))
    estimate = state.transform_states["noise_scale"]
    # Standard deviations of the means: noise 200 steps of 50 numbers, 1.4%; signal about 2%.
    assert estimate["noise"].item() == pytest.approx(DIM, rel=0.06)
    assert estimate["signal"].item() == pytest.approx(DIM * TRUE**2, rel=0.1)
    assert metrics["noise_scale"].total.item() == pytest.approx(1 / TRUE**2, rel=0.1)
    assert estimate["measured"] == 200


def test_estimates_from_batch_halves_match_the_paper():
    """Compute the mean squared norm of two halves by the formulas of appendix A.1."""
    one, other = torch.randn(2, 40, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    whole, few, many = (one + other) / 2, 8, 16
    small, big = (one.square().sum() + other.square().sum()) / 2, whole.square().sum()
    noise, signal = estimate_noise_and_signal({"w": one}, {"w": whole}, part_samples=few, whole_samples=many)
    assert noise.item() == pytest.approx(((small - big) / (1 / few - 1 / many)).item(), rel=1e-12)
    assert signal.item() == pytest.approx(((many * big - few * small) / (many - few)).item(), rel=1e-12)


def test_missing_gradient_counts_as_zero():
    one, two = torch.tensor([3.0]), torch.tensor([4.0])
    noise, signal = estimate_noise_and_signal({"a": one}, {"b": two}, part_samples=1, whole_samples=2)
    assert (noise.item(), signal.item()) == pytest.approx((25.0 / 0.5, 16.0 - 25.0), rel=1e-6)


@pytest.mark.parametrize(("few", "many"), [(0, 2), (2, 2), (3, 2)])
def test_estimates_refuse_invalid_part_sizes(few, many):
    with pytest.raises(
        ConfigError, match=f"part_samples must be above 0 and below whole_samples, got part_samples={few}, whole_samples={many}"
    ):
        estimate_noise_and_signal({}, {}, part_samples=few, whole_samples=many)


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(DIM, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1)).double()

    def forward(self, x):
        return self.layers(x)


def test_measurement_does_not_change_training_bits():
    runs = []
    for transforms in ([], [noise_scale(every=2)]):
        torch.manual_seed(3)
        step, state = begin(*transforms, model=Deep(), lr=0.1)
        losses = []
        for number in range(4):
            state, metrics = step(state, samples(number, 5))
            losses.append(metrics["loss"].total)
        runs.append([*losses, *state.params.values(), *state.model.buffers(), torch.get_rng_state()])
        assert ("noise_scale" in metrics) == bool(transforms)
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))


def test_single_sample_batch_is_trained_but_not_measured():
    step, state = begin(noise_scale(every=1))
    state, metrics = step(state, samples(0, 1))
    assert "noise_scale" not in metrics
    assert state.transform_states["noise_scale"]["measured"] == 0
    state, metrics = step(state, samples(1, 2))
    assert state.transform_states["noise_scale"]["measured"] == 1
    assert state.clock.samples == 3
    state, again = step(state, samples(2, 1))
    assert torch.equal(metrics["noise_scale"].total, again["noise_scale"].total)


def test_measurement_runs_in_the_first_step_of_each_interval():
    step, state = begin(noise_scale(every=3))
    counts = []
    for number in range(7):
        state, _ = step(state, samples(number, 4))
        counts.append(state.transform_states["noise_scale"]["measured"])
    assert counts == [1, 1, 1, 2, 2, 2, 3]


def test_a_batch_is_halved_along_its_described_axis():
    turned = dt.mean_loss(lambda model, batch: model(batch["x"].T).mean(), weight=lambda batch: batch["x"].shape[1])
    spec = dt.batch_spec({"x": "feature batch"})
    grad = lambda *given, **options: dt.microbatch_step(*given, batch_spec=spec, **options)  # noqa: E731
    scales = []
    for turn, loss, parts in ((False, LOSS, {}), (True, turned, {"grad": grad})):
        model = nn.Linear(DIM, 1, bias=False).double()
        step = dt.compose_step(loss, [noise_scale(batch_spec=spec if turn else None)], **parts)
        batch = {"x": samples(0, 6)["x"].T} if turn else samples(0, 6)
        _, metrics = step(step.init(model, torch.optim.SGD(model.parameters(), lr=0.1)), batch)
        scales.append(metrics["noise_scale"].total.item())
    assert scales[0] == pytest.approx(scales[1], rel=1e-9)


def test_uncountable_batch_raises_the_error_of_the_step():
    step, state = begin(noise_scale())
    with pytest.raises(ConfigError, match="the first axis must be the batch axis"):
        step(state, {"x": torch.zeros(2, DIM), "y": torch.zeros(3)})


def test_batch_countable_only_by_the_step_is_refused():
    step, state = begin(
        noise_scale(), grad=partial(dt.microbatch_step, batch_spec=dt.batch_spec(count=lambda batch: len(batch["x"])))
    )
    with pytest.raises(ConfigError, match="the first axis must be the batch axis"):
        step(state, {**samples(0, 2), "y": torch.zeros(3)})


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_nonfinite_gradient_does_not_change_the_averages(bad):
    step, state = begin(nonfinite(), noise_scale(every=1), lr=0.1)
    broken = {"x": torch.full((4, DIM), bad, dtype=torch.float64)}
    state, metrics = step(state, broken)
    assert metrics["noise_scale"].total.isnan()
    state, first = step(state, samples(0, 4))
    state, again = step(state, broken)
    assert first["noise_scale"].total.isfinite()
    assert torch.equal(first["noise_scale"].total, again["noise_scale"].total)


def of_this_copy(counts: list[int]) -> list[float]:
    """Return the measurements of two replicas that train apart on their own samples."""
    mesh = dt.build_mesh()
    model = dt.shard_model(nn.Linear(DIM, 1, bias=False).double(), mesh, strategy="replicate", blocks=())
    step, state = begin(dt.transforms.local_sgd(4), noise_scale(), model=model)
    rank = state.spec.data_rank
    state, metrics = step(state, samples(rank, counts[rank]))
    scale = metrics["noise_scale"].total.item() if "noise_scale" in metrics else 0.0
    return [scale, state.transform_states["noise_scale"]["measured"]]


def test_local_replicas_are_measured_by_their_own_samples(ranks):
    expected = []
    for rank, count in enumerate([4, 7]):
        step, state = begin(noise_scale())
        expected.append([pytest.approx(step(state, samples(rank, count))[1]["noise_scale"].total.item(), rel=1e-12), 1])
    assert ranks(2).run(of_this_copy, [4, 7]) == expected
    assert ranks(2).run(of_this_copy, [1, 7]) == [[0.0, 0]] * 2  # one of them has nothing to halve


def uneven(counts: list[int]) -> list[float]:
    """This rank's share of a batch that is shared out unevenly; the metric, and how many were measured."""
    mesh = dt.build_mesh()
    model = dt.shard_model(nn.Linear(DIM, 1, bias=False).double(), mesh, strategy="full_shard", blocks=())
    step, state = begin(noise_scale(), model=model)
    rank = state.spec.data_rank
    whole = samples(0, sum(counts))
    first = sum(counts[:rank])
    mine = {"x": whole["x"][first : first + counts[rank]]}
    state, metrics = step(state, mine)
    assert to_local(state.params["weight"]).grad is None
    return dt.reduce_metrics(metrics).get("noise_scale", 0.0)


@pytest.mark.parametrize("counts", [[3, 2], [1, 4], [5, 0], [0, 5]], ids=str)
def test_batch_half_does_not_depend_on_the_rank_split(ranks, counts):
    step, state = begin(noise_scale())
    _, metrics = step(state, samples(0, 5))
    expected = metrics["noise_scale"].total.item()
    assert ranks(2).run(uneven, counts) == [pytest.approx(expected, rel=1e-12)] * 2


def test_one_sample_on_two_ranks_is_not_measured(ranks):
    assert ranks(2).run(uneven, [0, 1]) == [0.0, 0.0]


@pytest.mark.parametrize("decay", [-0.1, 1.0, float("nan")])
def test_noise_scale_refuses_an_invalid_decay(decay):
    with pytest.raises(ConfigError, match=r"noise_scale: decay must be (a finite number|in \[0, 1\))"):
        noise_scale(decay)


def test_noise_scale_refuses_an_invalid_scheduled_decay():
    step, state = begin(noise_scale(lambda step: 2.0))
    with pytest.raises(ConfigError, match=r"noise_scale: decay must be in \[0, 1\), got 2\.0 from"):
        step(state, samples(0, 4))
