"""Selective backprop: the chosen samples, their chances, and equal numbers of forwards on all ranks."""

import math

import pytest
import torch
from torch import nn

import dtrain as dt
from dtrain.dist.dtensor import is_dtensor
from dtrain.errors import ConfigError, PeerError
from dtrain.schedules.durations import RunLength
from dtrain.testing import count_collectives
from dtrain.transforms.batches.selective_backprop import select_by_loss, selective_backprop


def losses_of(model, batch):
    return model(batch["x"])[:, 0]


LOSS = dt.mean_loss(lambda model, batch: model(batch["x"]).mean(), weight=lambda batch: len(batch["x"]))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).double()


def begin(transform, *, model=None, seed=0, run=None, loss=LOSS, **parts):
    model = model or net()
    step = dt.compose_step(loss, [transform], **parts)
    return step, step.init(model, torch.optim.SGD(model.parameters(), lr=0.1), seed=seed, run_length=run)


def samples(count, seed=0):
    x = torch.randn(count, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return {"x": x, "id": [f"s{number}" for number in range(count)]}


def seen_by(calls):
    def loss(model, batch):
        calls.append(batch)
        return LOSS(model, batch)

    return loss


# ---- the chosen samples -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "keep", "kept"), [(1, 0.1, 1), (7, 0.5, 4), (30, 0.1, 3), (10, 1.0, 10), (0, 0.5, 0), (3, 1e-12, 1)]
)
def test_kept_sample_count_is_rounded_up(count, keep, kept):
    picked = select_by_loss(torch.rand(count, device="cpu"), keep, generator=torch.Generator().manual_seed(0))
    assert len(picked) == kept
    assert picked.tolist() == sorted(set(picked.tolist()))


def test_probabilities_of_two_samples_match_the_formula():
    """With keep 0.5 the exponent is 1, and the percentiles of two samples are 1/4 and 3/4: so are their chances."""
    draws = 4000
    generator = torch.Generator().manual_seed(0)
    larger = sum(
        select_by_loss(torch.tensor([0.9, 0.1], device="cpu"), 0.5, generator=generator).item() == 0 for _ in range(draws)
    )
    assert larger / draws == pytest.approx(0.75, abs=4 * math.sqrt(0.75 * 0.25 / draws))


def test_probabilities_with_a_different_keep_match_the_formula():
    """One of four, exponent 3: chances (1, 27, 125, 343) / 496 by rank."""
    draws, counts = 4000, [0] * 4
    generator = torch.Generator().manual_seed(1)
    for _ in range(draws):
        losses = torch.tensor([3.0, 1.0, 4.0, 2.0], device="cpu")
        counts[select_by_loss(losses, 0.25, generator=generator).item()] += 1
    for count, chance in zip(counts, (125 / 496, 1 / 496, 343 / 496, 27 / 496), strict=True):
        assert count / draws == pytest.approx(chance, abs=4 * math.sqrt(chance * (1 - chance) / draws) + 1e-9)


def test_injected_uniforms_decide_exactly():
    """Keys are log(uniform) / chance, the largest first: with chances 1/4 and 3/4 equal keys are at u1 = u2 ** (1/3)."""
    losses = torch.tensor([1.0, 2.0], dtype=torch.float64)
    even = 0.5 ** (1 / 3)
    assert select_by_loss(losses, 0.5, uniforms=torch.tensor([even + 1e-9, 0.5], dtype=torch.float64)).tolist() == [0]
    assert select_by_loss(losses, 0.5, uniforms=torch.tensor([even - 1e-9, 0.5], dtype=torch.float64)).tolist() == [1]


def test_select_by_loss_with_a_tiny_fraction_does_not_underflow():
    losses = torch.arange(10_000.0)
    picked = select_by_loss(losses.cpu(), 0.001, generator=torch.Generator().manual_seed(0))
    assert len(picked) == 10
    assert picked.min().item() > 9900


def test_select_by_loss_counts_nan_as_the_largest():
    losses = torch.tensor([1.0, float("nan"), 2.0])
    assert select_by_loss(losses, 0.01, uniforms=torch.full((3,), 0.5)).tolist() == [1]


def test_samples_with_equal_losses_have_equal_probabilities():
    draws, counts = 4000, [0] * 4
    generator = torch.Generator().manual_seed(1)
    for _ in range(draws):
        counts[select_by_loss(torch.full((4,), 0.5, device="cpu"), 0.25, generator=generator).item()] += 1
    assert [count / draws for count in counts] == [pytest.approx(0.25, abs=4 * math.sqrt(0.1875 / draws))] * 4


@pytest.mark.parametrize(
    ("losses", "keep", "given", "message"),
    [
        (torch.zeros(2), 0.0, {"uniforms": torch.zeros(2)}, "keep must be a finite number above 0 and at most 1"),
        (torch.zeros(2), 1.5, {"uniforms": torch.zeros(2)}, "keep must be a finite number above 0 and at most 1"),
        (torch.zeros(2, 2), 0.5, {"uniforms": torch.zeros(2)}, r"losses must be \[n\], one per sample, got shape \(2, 2\)"),
        (torch.zeros(2), 0.5, {}, "exactly one of generator and uniforms must be given, got neither"),
        (torch.zeros(2), 0.5, {"uniforms": torch.zeros(3)}, r"uniforms must be \[2\], one per loss, got shape \(3,\)"),
    ],
    ids=["none", "more than all", "losses", "neither", "uniforms"],
)
def test_select_by_loss_refuses_invalid_arguments(losses, keep, given, message):
    with pytest.raises(ConfigError, match=f"select_by_loss: {message}"):
        select_by_loss(losses, keep, **given)


# ---- in a step --------------------------------------------------------------------------------------------------------------


def test_step_uses_only_the_selected_samples():
    calls = []
    step, state = begin(selective_backprop(losses_of, 0.4), loss=seen_by(calls))
    state, metrics = step(state, samples(5))
    (batch,) = calls
    assert len(batch["x"]) == len(batch["id"]) == 2
    assert [f"s{samples(5)['x'].tolist().index(row)}" for row in batch["x"].tolist()] == batch["id"]
    assert (metrics["loss"].weight.item(), state.clock.samples) == (2.0, 2)
    other, start = begin(selective_backprop(losses_of, 1.0))
    start, _ = other(start, batch)
    assert all(torch.equal(state.params[name], param) for name, param in start.params.items())


def test_keep_of_one_matches_the_plain_step():
    runs = []
    for keep in (1.0, None):
        step, state = begin(selective_backprop(losses_of, keep or 0.1, start="9ba" if keep is None else 0))
        state, _ = step(state, samples(5))
        runs.append([*state.params.values(), *state.model.buffers()])
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))


def test_selection_forward_leaves_no_gradients_and_no_statistics():
    seen = []

    def looking(model, batch):
        seen.append((model.training, torch.is_grad_enabled(), len(batch["x"])))
        return losses_of(model, batch)

    step, state = begin(selective_backprop(looking, 0.5, microbatch_size=3))
    state, _ = step(state, samples(5))
    assert seen == [(True, False, 3), (True, False, 2)]
    assert state.model[1].num_batches_tracked.item() == 1  # of the step's own forward
    assert torch.is_grad_enabled()


def test_selection_depends_on_seed_and_step():
    def drawn(seed):
        calls = []
        step, state = begin(selective_backprop(losses_of, 0.3), seed=seed, loss=seen_by(calls))
        for number in range(3):
            state, _ = step(state, samples(20, number))
        return [batch["id"] for batch in calls]

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({"start": 2, "end": 4}, [4, 4, 2, 2, 4, 4]),
        ({"start": "0.5dur"}, [4, 4, 4, 2, 2, 2]),
        ({"interrupt": 2}, [2, 2, 4, 2, 4, 2]),
    ],
    ids=["between", "share of the run", "interrupted"],
)
def test_selection_runs_only_between_start_and_end(options, sizes):
    calls = []
    step, state = begin(selective_backprop(losses_of, 0.5, **options), run=RunLength(total=6), loss=seen_by(calls))
    for number in range(6):
        state, _ = step(state, samples(4, number))
    assert [len(batch["x"]) for batch in calls] == sizes


def test_batch_is_cut_along_its_described_axis():
    calls = []

    def turned(model, batch):
        calls.append(batch)
        return LOSS(model, {"x": batch["x"].T})

    spec = dt.batch_spec({"x": "feature batch"})
    grad = lambda *given, **options: dt.microbatch_step(*given, batch_spec=spec, **options)  # noqa: E731
    choose = selective_backprop(lambda model, batch: model(batch["x"].T)[:, 0], 0.5, batch_spec=spec, microbatch_size=2)
    step, state = begin(choose, loss=turned, grad=grad)
    step(state, {"x": samples(6)["x"].T, "name": "whole"})
    assert tuple(calls[0]["x"].shape) == (2, 3)
    assert calls[0]["name"] == "whole"


@pytest.mark.parametrize(
    ("bad", "got"),
    [(lambda model, batch: model(batch["x"]), r"shape \(5, 1\)"), (lambda model, batch: 1.0, "a float")],
    ids=["shape", "number"],
)
def test_losses_of_the_wrong_shape_are_refused_in_the_step(bad, got):
    step, state = begin(selective_backprop(bad))
    with pytest.raises(ConfigError, match=rf"sample_losses must return a tensor \[5\], one loss per sample, got {got}"):
        step(state, samples(5))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"sample_losses": 3}, r"sample_losses must be a function \(model, batch\) -> losses, got 3"),
        ({"keep": 0.0}, r"selective_backprop: keep must be in \(0, 1\], got 0\.0\."),
        ({"start": 5, "end": 5}, "start must be before end, got start='5ba', end='5ba'"),
        ({"microbatch_size": 0}, "microbatch_size must be an integer of at least 1"),
    ],
    ids=["function", "keep", "window", "size"],
)
def test_selective_backprop_refuses_invalid_arguments(given, message):
    with pytest.raises(ConfigError, match=message):
        selective_backprop(**{"sample_losses": losses_of, **given})


def test_invalid_scheduled_keep_is_refused_in_the_step():
    step, state = begin(selective_backprop(losses_of, lambda step: 2.0))
    with pytest.raises(ConfigError, match=r"selective_backprop: keep must be in \(0, 1\], got 2\.0 from its schedule"):
        step(state, samples(4))


# ---- on ranks ---------------------------------------------------------------------------------------------------------------


def sharded(strategy, transform):
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    return begin(transform, model=dt.shard_model(model, dt.build_mesh(), strategy=strategy, blocks=(nn.Linear,)))


def ragged(strategy: str, counts: list[int]) -> list[float]:
    """Three steps over batches of which ranks have different shares; samples scored, samples that count, and a parameter."""
    forwards = []

    def looking(model, batch):
        forwards.append(len(batch["x"]))
        return losses_of(model, batch)

    step, state = sharded(strategy, selective_backprop(looking, 0.5, microbatch_size=2))
    for number in range(3):
        mine = {"x": samples(counts[state.spec.data_rank], number)["x"]}
        state, metrics = step(state, mine)
    last = [whole for _, whole in dt.full_params(state)][-1]
    return [sum(forwards), state.clock.samples, dt.reduce_metrics(metrics)["loss"], last.item()]


@pytest.mark.parametrize("strategy", ["full_shard", "replicate"])
@pytest.mark.parametrize("counts", [[4, 3], [5, 1], [0, 4]], ids=str)
def test_ranks_with_ragged_batches_score_their_own_samples(ranks, strategy, counts):
    kept = sum(math.ceil(count / 2) for count in counts)
    results = ranks(2).run(ragged, strategy, counts)
    assert [scored for scored, *_ in results] == [3 * count for count in counts]
    assert results[0][1:] == results[1][1:]
    assert results[0][1] == 3 * kept


def spoiled() -> str:
    def losses(model, batch):
        values = losses_of(model, batch)
        return values[:-1] if torch.distributed.get_rank() == 1 else values

    step, state = sharded("full_shard", selective_backprop(losses))
    try:
        step(state, {"x": samples(4)["x"]})
    except (ConfigError, PeerError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_wrong_loss_shape_on_one_rank_is_refused_on_all(ranks):
    first, second = ranks(2).run(spoiled)
    assert first.startswith("PeerError: step: rank 1 could not use its batch")
    assert second.startswith("ConfigError: selective_backprop: sample_losses must return a tensor [4]")


def failing() -> list:
    """A forward without gradients that fails on all ranks in one step; is the model left cut, and does the next step run?"""
    calls = []

    def losses(model, batch):
        values = losses_of(model, batch)
        calls.append(values)
        if len(calls) == 2:
            raise RuntimeError("after the forward")
        return values

    step, state = sharded("shard_grad_op", selective_backprop(losses))
    state, _ = step(state, {"x": samples(4)["x"]})
    try:
        step(state, {"x": samples(4)["x"]})
    except RuntimeError as error:
        cut = [is_dtensor(param) for param in state.model.parameters()]
        state, _ = step(state, {"x": samples(4)["x"]})
        return [str(error), all(cut), torch.is_grad_enabled(), state.step]
    return []


def test_error_in_the_forward_leaves_the_model_sharded(ranks):
    assert ranks(2).run(failing) == [["after the forward", True, True, 2]] * 2


def uncountable() -> str:
    step, state = sharded("full_shard", selective_backprop(losses_of))
    x = samples(4)["x"]
    try:
        step(state, {"x": x, "y": x[1:]} if torch.distributed.get_rank() == 0 else {"x": x})
    except (ConfigError, PeerError) as error:
        return type(error).__name__
    return "nothing"


def test_uncountable_batch_on_one_rank_is_refused_on_all_ranks(ranks):
    assert ranks(2).run(uncountable) == ["ConfigError", "PeerError"]


def cost() -> list[dict]:
    """Return the collectives of a step with and without the transform."""
    counts = []
    for start in ("9ba", 0):
        step, state = sharded("full_shard", selective_backprop(losses_of, start=start))
        state, _ = step(state, {"x": samples(4)["x"]})
        with count_collectives() as seen:
            step(state, {"x": samples(4)["x"]})
        counts.append(seen.counts())
    return counts


def test_step_adds_one_record_exchange_and_one_forward_of_gathers(ranks):
    without, with_it = ranks(2).run(cost)[0]
    # The records of a step are no collectives on one node.
    assert "control" not in without
    assert with_it["control"] == {"all_gather": 1}
    assert with_it["training"]["reduce_scatter"] == without["training"]["reduce_scatter"]
    # Forward and backward gather each of two blocks, of which the last stays gathered in between.
    assert without["training"]["all_gather"] < with_it["training"]["all_gather"] <= 2 * without["training"]["all_gather"]


def on_context_parallelism() -> str:
    model = nn.Sequential(nn.Linear(2, 1)).double()
    model = dt.shard_model(model, dt.build_mesh(cp=2), strategy="full_shard", blocks=())
    try:
        begin(selective_backprop(losses_of), model=model)
    except ConfigError as error:
        return str(error)
    return "nothing"


def test_context_parallelism_is_refused(ranks):
    assert all("Ranks along cp have parts of samples" in error for error in ranks(2).run(on_context_parallelism))
