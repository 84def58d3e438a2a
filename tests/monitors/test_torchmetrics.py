"""torchmetrics, unmodified: on ranks with ragged and empty shares it gives the values of one process."""

from __future__ import annotations

import warnings
from functools import partial

import pytest
import torch
from torch import Tensor
from torchmetrics import CatMetric, MeanMetric, Metric
from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy, MulticlassConfusionMatrix
from torchmetrics.regression import MeanSquaredError, PearsonCorrCoef

from dtrain.dist.init import get_dist_info
from dtrain.dist.mesh import build_mesh, data_rank
from dtrain.errors import ConfigError
from dtrain.monitors.reduce_metrics import gather_metric_states

CLASSES, SIZE = 4, 11
SUMS_IN_ANOTHER_ORDER = 1e-5  # relative: torchmetrics adds up in float32
SHARES = [[11], [6, 5], [4, 4, 3], [10, 1]]
WITH_EMPTY = [[11, 0], [0, 11], [5, 0, 6], [0, 0, 11]]
KEEPS_ROWS = ("auroc", "rows")


def data() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    return torch.randn(SIZE, CLASSES, generator=g), torch.randint(CLASSES, (SIZE,), generator=g)


def metrics(**options) -> dict[str, Metric]:
    return {
        "accuracy": MulticlassAccuracy(CLASSES, **options),
        "confusion": MulticlassConfusionMatrix(CLASSES, **options),
        "auroc": BinaryAUROC(**options),  # keeps all rows: its state is as ragged as the shares
        "mse": MeanSquaredError(**options),
        "pearson": PearsonCorrCoef(**options),
        "mean": MeanMetric(**options),
        "rows": CatMetric(**options),
        "nothing": CatMetric(**options),
    }


def update(name: str, metric: Metric, logits: Tensor, targets: Tensor) -> None:
    if name in ("accuracy", "confusion"):
        metric.update(logits, targets)
    elif name == "auroc":
        metric.update(logits[:, 0].sigmoid(), (targets == 0).long())
    elif name in ("mse", "pearson"):
        metric.update(logits[:, 0], targets.float())
    elif name == "mean":
        metric.update(logits[:, 0], weight=targets + 1.0)
    elif name == "rows":
        metric.update(logits[:, 0])


def computed(chosen: dict[str, Metric], logits: Tensor, targets: Tensor) -> dict[str, object]:
    values = {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".* was called before the ``update`` method")  # meant: the share is empty
        warnings.filterwarnings("ignore", message="No samples to concatenate")
        for name, metric in chosen.items():
            for start in range(0, len(logits), 3):
                update(name, metric, logits[start : start + 3], targets[start : start + 3])
            value = metric.compute()
            values[name] = value.tolist() if isinstance(value, Tensor) else value
    return values


def single() -> dict[str, object]:
    return computed(metrics(), *data())


def share(counts: list[int], place: int) -> list[Tensor]:
    start = sum(counts[:place])
    return [tensor[start : start + counts[place]] for tensor in data()]


def by_torchmetrics(counts: list[int], left_out: list[str]) -> dict[str, object]:
    chosen = {name: metric for name, metric in metrics().items() if name not in left_out}
    return computed(chosen, *share(counts, get_dist_info().rank))


def by_states(counts: list[int]) -> dict[str, object]:
    return computed(metrics(dist_sync_fn=gather_metric_states), *share(counts, get_dist_info().rank))


def check(results: list[dict[str, object]], left_out: tuple[str, ...] = ()) -> None:
    expected = {name: value for name, value in single().items() if name not in left_out}
    for values in results:
        assert values.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(
                torch.tensor(values[name]),
                torch.tensor(value),
                rtol=SUMS_IN_ANOTHER_ORDER,
                atol=SUMS_IN_ANOTHER_ORDER,
                msg=name,
            )


@pytest.mark.costly
@pytest.mark.parametrize("counts", SHARES, ids=str)
def test_metrics_equal_single_process(ranks, counts):
    check(ranks(len(counts)).run(by_torchmetrics, counts, []))


@pytest.mark.parametrize("counts", WITH_EMPTY, ids=str)
def test_sum_metrics_allow_rank_without_samples(ranks, counts):
    check(ranks(len(counts)).run(by_torchmetrics, counts, KEEPS_ROWS), KEEPS_ROWS)


@pytest.mark.parametrize("counts", SHARES + WITH_EMPTY, ids=str)
def test_gathered_metrics_allow_rank_without_samples(ranks, counts):
    check(ranks(len(counts)).run(by_states, counts))


def with_tensor_parallel(counts: list[int]) -> dict[str, object]:
    mesh = build_mesh(tp=2)
    return computed(metrics(dist_sync_fn=partial(gather_metric_states, mesh=mesh)), *share(counts, data_rank(mesh)[0]))


@pytest.mark.costly
def test_ranks_sharing_a_batch_are_counted_once(ranks):
    check(ranks(4).run(with_tensor_parallel, [7, 4]))


def test_torchmetrics_process_group_is_refused():
    with pytest.raises(ConfigError, match=r"process_group must be None, got a group\. Remove process_group and pass mesh="):
        gather_metric_states(torch.ones(3), group=object())
