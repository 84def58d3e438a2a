import pytest
import torch

from dtrain.dist.init import get_dist_info
from dtrain.errors import ConfigError, StepError
from dtrain.monitors.reduce_metrics import reduce_metrics, tokens_per_second
from dtrain.schedules.clock import Clock
from dtrain.step.normalization import add_metrics, make_metric
from dtrain.typing import Metric


def metric(total: float, weight: float) -> Metric:
    return Metric(torch.tensor(total, dtype=torch.float64), torch.tensor(weight, dtype=torch.float64))


def reduced() -> dict:
    rank = get_dist_info().rank
    return reduce_metrics({"loss": metric(10.0 * rank, rank), "count": metric(1.0, 1.0)})


def test_means_are_weighted_over_ranks(ranks):
    assert ranks(3).run(reduced) == [{"loss": 10.0, "count": 1.0}] * 3


def differing_names(extra: int) -> str:
    rank = get_dist_info().rank
    names = [f"m{i}" for i in range(3 + extra * rank)] if extra else ["a" if rank == 0 else "b"]
    try:
        reduce_metrics({name: metric(15.0, 1.0) for name in names})
    except StepError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("extra", [0, 1, 20])
def test_different_metric_names_raise_on_all_ranks(ranks, extra):
    for message in ranks(2).run(differing_names, extra):
        assert "metrics must have equal names on all ranks, got" in message


def test_many_metrics_are_reduced(ranks):
    assert reduce_metrics({f"m{i}": metric(float(i), 1.0) for i in range(100)}) == {f"m{i}": float(i) for i in range(100)}


def test_metrics_of_steps_are_added():
    both = add_metrics({"loss": metric(4, 2)}, {"loss": metric(2, 4), "lr": metric(1, 1)})
    assert reduce_metrics(both) == {"loss": 1.0, "lr": 1.0}


def epoch_of_sums(counts: list[list[int]]) -> list[dict]:
    """The mean over all samples of an epoch, from the sums of its steps; ranks have different numbers of samples in a step."""
    rank, first = get_dist_info().rank, 0
    epoch, means = {}, []
    for step in counts:
        begin = first + sum(step[:rank])
        mine = torch.arange(begin, begin + step[rank], dtype=torch.float64) ** 2
        metrics = {"square": Metric(mine.sum(), torch.tensor(len(mine), dtype=torch.float64))}
        epoch, first = add_metrics(epoch, metrics), first + sum(step)
        means.append(reduce_metrics(metrics)["square"])
    return [reduce_metrics(epoch)["square"], sum(means) / len(means)]


def test_epoch_mean_is_computed_from_sums_of_steps(ranks):
    counts = [[4, 4, 3], [4, 4, 3], [1, 0, 0]]
    exact = (torch.arange(23.0, dtype=torch.float64) ** 2).mean().item()
    for of_sums, of_means in ranks(3).run(epoch_of_sums, counts):
        assert of_sums == pytest.approx(exact, rel=1e-12)
        assert of_means != pytest.approx(exact, rel=1e-2), "a mean of the steps' means counts a short step too much"


def test_numbers_take_the_place_of_tensors():
    assert reduce_metrics({"reward": (torch.tensor(6.0), 4), "length": (3, 2.0)}) == {"reward": 1.5, "length": 1.5}
    made = make_metric(torch.tensor(6.0), 4)
    assert (made.weight.dtype, reduce_metrics({"reward": made, "one": make_metric(2, 1)})) == (
        torch.float64,
        {"reward": 1.5, "one": 2.0},
    )
    with pytest.raises(ConfigError, match=r"metric 'reward' must be a pair of scalars \(total, weight\), got \('a', 1\)"):
        reduce_metrics({"reward": ("a", 1)})


def test_empty_metrics_are_refused():
    with pytest.raises(ConfigError, match="metrics must have at least 1 metric, got none"):
        reduce_metrics({})
    with pytest.raises(StepError, match="'loss' must have a positive weight, got 0 over all ranks"):
        reduce_metrics({"loss": metric(0, 0)})


def test_tokens_per_second_without_elapsed_time_is_zero():
    assert tokens_per_second(Clock(), Clock()) == 0.0
