import pytest
import torch
from torch import nn

import dtrain as dt
from dtrain.errors import ConfigError
from dtrain.losses import soft_cross_entropy
from dtrain.transforms.batches.batch_transform import as_probabilities
from dtrain.transforms.batches.mixup import label_smoothing, smooth_labels

HALF = torch.tensor([[0.5, 0.5, 0.0, 0.0]])


@pytest.mark.parametrize(
    ("targets", "known"),
    [
        (torch.tensor([1]), [[0.1, 0.7, 0.1, 0.1]]),
        (torch.tensor([[1.0, 0.0, 0.0, 0.0]]), [[0.7, 0.1, 0.1, 0.1]]),
        (HALF, [[0.4, 0.4, 0.1, 0.1]]),
        (HALF / 2, [[0.2, 0.2, 0.05, 0.05]]),
        (torch.tensor([-100]), [[0.0, 0.0, 0.0, 0.0]]),
        (torch.zeros(1, 4), [[0.0, 0.0, 0.0, 0.0]]),
        (torch.tensor([[3], [-100]]), [[[0.1, 0.1, 0.1, 0.7]], [[0.0] * 4]]),
    ],
    ids=["index", "one-hot", "soft", "of half the weight", "ignored", "left out", "of more axes"],
)
def test_smooth_labels_spreads_a_fraction_over_all_classes(targets, known):
    torch.testing.assert_close(smooth_labels(targets, 0.4, num_classes=4), torch.tensor(known))


def test_smooth_labels_equals_smoothing_inside_the_loss():
    logits, targets = torch.randn(5, 4), torch.tensor([0, 3, -100, 1, 1])
    inside, outside = (
        soft_cross_entropy(logits, targets, smoothing=0.1),
        soft_cross_entropy(logits, smooth_labels(targets, 0.1, num_classes=4)),
    )
    torch.testing.assert_close(outside.total, inside.total)
    assert outside.weight == pytest.approx(4.0)


def test_smooth_labels_with_zero_changes_nothing():
    given = torch.rand(3, 4)
    assert torch.equal(smooth_labels(given, 0.0), given)


def test_as_probabilities_returns_probabilities_unchanged():
    given = torch.rand(3, 4)
    assert as_probabilities(given) is given


def test_as_probabilities_ignores_ignore_index_and_refuses_wrong_indices():
    assert as_probabilities(torch.tensor([0, 1]), 2, ignore_index=0).tolist() == [[0.0, 0.0], [0.0, 1.0]]
    with pytest.raises(RuntimeError, match="out of bounds"):
        as_probabilities(torch.tensor([2]), 2)


REFUSED = {
    "smoothing": (lambda: label_smoothing(1.1), r"label_smoothing: smoothing must be in \[0, 1\], got 1\.1"),
    "no classes": (
        lambda: smooth_labels(torch.tensor([1])),
        r"label_smoothing: num_classes must be given for class indices, got None\. Give num_classes=",
    ),
    "other classes": (
        lambda: smooth_labels(HALF, num_classes=3),
        r"label_smoothing: targets must be \[\*, 3\], got shape \(1, 4\)",
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32])
def test_label_smoothing_refuses_regression_targets(dtype):
    """Numbers of a regression, one each: smoothing would take the batch for the classes."""
    model = nn.Linear(1, 1)
    step = dt.compose_step(dt.mean_loss(lambda model, batch: model(batch["x"]).sum(), weight=len), [label_smoothing(0.1)])
    state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ConfigError, match=r"label_smoothing: .*class indices \(int64\) or probabilities .*, got torch\."):
        step(state, {"x": torch.ones(4, 1), "y": torch.zeros(4, dtype=dtype)})


@pytest.mark.parametrize("name", REFUSED)
def test_label_smoothing_refuses_invalid_arguments(name):
    make, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        make()
