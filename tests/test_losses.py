import pytest
import torch
import torch.nn.functional as F

from dtrain.errors import ConfigError
from dtrain.losses import mean_loss, token_cross_entropy


def test_token_cross_entropy_is_the_mean_when_divided():
    logits, targets = torch.randn(2, 5, 7), torch.randint(7, (2, 5))
    targets[0, :3] = -100
    loss = token_cross_entropy(logits, targets)
    assert loss.weight == 7
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
    torch.testing.assert_close(loss.total / loss.weight, expected)


def test_token_cross_entropy_takes_another_ignore_index():
    loss = token_cross_entropy(torch.zeros(1, 3, 4), torch.tensor([[0, 1, 0]]), ignore_index=0)
    assert loss.weight == 1
    assert loss.total == pytest.approx(torch.tensor(4.0).log().item())


def test_low_precision_logits_are_summed_in_float32():
    loss = token_cross_entropy(torch.zeros(1, 3, 4, dtype=torch.bfloat16), torch.zeros(1, 3, dtype=torch.int64))
    assert loss.total.dtype == torch.float32


def test_all_targets_ignored_is_zero_and_not_nan():
    loss = token_cross_entropy(torch.zeros(1, 3, 4), torch.full((1, 3), -100))
    assert (loss.total, loss.weight) == (0.0, 0)


def test_token_cross_entropy_refuses_other_shapes():
    with pytest.raises(ConfigError, match=r"got \(2, 5, 7\) and \(2, 4\)"):
        token_cross_entropy(torch.zeros(2, 5, 7), torch.zeros(2, 4, dtype=torch.int64))


def test_mean_loss_is_mean_times_weight():
    loss = mean_loss(lambda model, batch: batch["x"].mean(), weight=lambda batch: batch["x"].numel())
    result = loss(None, {"x": torch.tensor([1.0, 2.0, 6.0])})
    assert (result.total, result.weight) == (9.0, 3)


def test_mean_loss_wants_its_weight_stated():
    with pytest.raises(TypeError, match="weight"):
        mean_loss(lambda model, batch: batch)
    with pytest.raises(ConfigError, match="weight must be a function of the batch, got 3"):
        mean_loss(lambda model, batch: batch, weight=3)


def test_mean_loss_refuses_more_than_one_number():
    loss = mean_loss(lambda model, batch: batch, weight=len)
    with pytest.raises(ConfigError, match=r"must return one number, got shape \(3,\)"):
        loss(None, torch.zeros(3))
