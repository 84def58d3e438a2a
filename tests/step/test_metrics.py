"""Scores against one line of torch, masked, cut, and over microbatches."""

import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import dtrain as dt
from dtrain.errors import ConfigError
from dtrain.losses import cross_entropy
from dtrain.monitors.reduce_metrics import perplexity, reduce_metrics, token_accuracy
from dtrain.testing import count_host_syncs


def data():
    g = torch.Generator().manual_seed(0)
    logits, targets = torch.randn(6, 5, 8, generator=g), torch.randint(8, (6, 5), generator=g)
    targets = torch.where(torch.rand(6, 5, generator=g) < 0.5, logits.argmax(-1), targets)
    return logits, targets.masked_fill(torch.rand(6, 5, generator=g) < 0.3, -100)


@pytest.mark.parametrize(
    ("use", "named"),
    [
        (float, r"float\(\)"),
        (lambda metric: metric.item(), r"item\(\)"),
        (lambda metric: f"{metric:.3f}", r"the format '.3f'"),
    ],
    ids=["float", "item", "format"],
)
def test_metric_of_one_rank_is_no_number(use, named):
    metric = dt.typing.Metric(torch.tensor(4.0), torch.tensor(2.0))
    with pytest.raises(
        ConfigError, match=rf"^metrics: {named} needs a number, .* Write dt\.reduce_metrics\(metrics\)"
    ) as caught:
        use(metric)
    assert isinstance(caught.value, TypeError)
    assert "\n" not in str(caught.value)
    assert f"{metric}" == str(metric) == "Metric(total=tensor(4.), weight=tensor(2.))"
    assert reduce_metrics({"loss": metric}) == {"loss": 2.0}


def test_accuracy_is_the_fraction_of_correct_predictions():
    logits, targets = data()
    kept = targets != -100
    right, counted = token_accuracy(logits.requires_grad_(), targets)
    assert counted == kept.sum()
    assert right == (logits.argmax(-1)[kept] == targets[kept]).sum()
    assert 0 < right < counted
    assert not right.requires_grad
    assert right.dtype == counted.dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_mask_excludes_tokens(dtype):
    logits, targets = data()
    mask = torch.arange(5).expand(6, 5) >= 2
    expected = token_accuracy(logits[:, 2:], targets[:, 2:])
    assert token_accuracy(logits, targets, mask=mask.to(dtype)) == expected
    assert expected[1] < token_accuracy(logits, targets)[1]


@pytest.mark.parametrize(
    ("logits", "target", "right"),
    [
        ([1.0, 1.0, 0.0], 0, 1),  # the first of equal ones
        ([1.0, 1.0, 0.0], 1, 0),
        ([math.nan, 1.0, 0.0], 0, 0),
        ([math.nan, 1.0, 0.0], 1, 0),
        ([-math.inf, -math.inf, 0.0], 2, 1),
    ],
)
def test_accuracy_of_ties_and_nan_is_defined(logits, target, right):
    correct, counted = token_accuracy(torch.tensor([logits]), torch.tensor([target]))
    assert (correct, counted) == (right, 1)


def test_custom_ignore_index_is_excluded():
    logits, targets = data()
    assert token_accuracy(logits, targets.masked_fill(targets == -100, 9), ignore_index=9) == token_accuracy(logits, targets)


def test_accuracy_needs_no_host_sync():
    logits, targets = data()
    with count_host_syncs() as seen:
        token_accuracy(logits, targets, mask=targets > 2)
    assert seen.count == 0


def loss_fn(model, batch):
    logits = model(batch["x"])
    loss = cross_entropy(logits, batch["y"])
    return dt.LossSum(total=loss.total, weight=loss.weight, aux={"accuracy": token_accuracy(logits, batch["y"])})


@pytest.mark.parametrize("size", [None, 1, 4])
def test_accuracy_metric_is_exact_for_any_microbatch_size(size):
    torch.manual_seed(0)
    model, (x, y) = nn.Linear(8, 8), data()
    step = dt.compose_step(loss_fn, grad=partial(dt.microbatch_step, microbatch_size=size))
    right, counted = token_accuracy(model(x), y)
    metrics = step(step.init(model, torch.optim.SGD(model.parameters(), lr=0.1)), {"x": x, "y": y})[1]
    assert reduce_metrics(metrics)["accuracy"] == (right / counted).item()


def cut(case):
    """Split the classes over the ranks."""
    logits, targets = data()
    if case == "ties":
        logits = logits.round()
    if case == "nan":
        logits[0, :, 6], logits[1, :, 1] = math.nan, math.nan
    if case == "half":
        logits = logits.bfloat16()
    whole = [value.item() for value in token_accuracy(logits, targets)]
    mesh = init_device_mesh("cpu", (2,))
    totals = [
        [value.item() for value in token_accuracy(distribute_tensor(logits, mesh, [place]), targets)]
        for place in (Shard(-1), Replicate())
    ]
    try:
        token_accuracy(distribute_tensor(logits, mesh, [Shard(0)]), targets)
    except ConfigError as error:
        return whole, totals, str(error)
    return whole, totals, "no error"


@pytest.mark.parametrize("case", ["plain", "ties", "nan", "half"])
def test_logits_sharded_over_classes_give_equal_accuracy(ranks, case):
    for whole, totals, error in ranks(2).run(cut, case):
        assert totals == [whole] * 2
        assert error.startswith("token_accuracy: takes a DTensor whose last dim is sharded evenly over one axis")


@pytest.mark.parametrize(
    ("shape", "mask", "message"),
    [
        ((6, 4), None, r"needs logits \[\*, classes\] and targets \[\*\], got \(6, 5, 8\) and \(6, 4\)"),
        ((6, 5), (6, 1), r"mask must be \(6, 5\) like targets, got \(6, 1\)"),
    ],
)
def test_mismatched_shapes_are_refused(shape, mask, message):
    mask = None if mask is None else torch.ones(mask)
    with pytest.raises(ConfigError, match=f"token_accuracy: {message}"):
        token_accuracy(torch.zeros(6, 5, 8), torch.zeros(shape, dtype=torch.int64), mask=mask)


@pytest.mark.parametrize(
    ("loss", "expected"), [(0.0, 1.0), (math.log(50.0), 50.0), (709.0, math.exp(709.0)), (710.0, math.inf)]
)
def test_perplexity_matches_known_values(loss, expected):
    assert perplexity(loss) == pytest.approx(expected, rel=1e-12)


def test_the_perplexity_of_nan_is_nan():
    assert math.isnan(perplexity(math.nan))
    assert perplexity(math.inf) == math.inf
