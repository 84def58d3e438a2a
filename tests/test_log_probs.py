"""Log-probabilities: equal at the rollout and in training within the stated tolerance, and the meter between both."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import dtrain as dt
from dtrain.errors import ConfigError


class Policy(nn.Module):
    """Causal model of one attention, so that padding on the right changes no earlier position."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.query, self.head = nn.Embedding(11, 8), nn.Linear(8, 24), nn.Linear(8, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        queries, keys, values = self.query(hidden).chunk(3, -1)
        mixed = nn.functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return self.head(hidden + mixed)


def rolled_out(dtype: torch.dtype) -> tuple[float, float, dict[str, float]]:
    """Sample token by token, each rank its rows, and compare with the training forward of padded microbatches."""
    torch.manual_seed(0)
    model = dt.shard_model(Policy().to(dtype), dt.build_mesh(), blocks=(nn.Linear,))
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    tokens = torch.randint(0, 11, (4, 3), generator=generator)
    steps: list[Tensor] = []
    with dt.eval_mode(model):
        for _ in range(6):
            logits = model(tokens)[:, -1]
            drawn = torch.multinomial((logits / 0.7).softmax(-1).float(), 1, generator=generator)
            steps.append(dt.token_log_probs(logits, drawn[:, 0], temperature=0.7))
            tokens = torch.cat([tokens, drawn], 1)
        rollout = torch.stack(steps, 1)
        whole = dt.token_log_probs(model(tokens)[:, 2:-1], tokens[:, 3:], temperature=0.7)
        again = dt.token_log_probs(model(tokens)[:, 2:-1], tokens[:, 3:], temperature=0.7)
    assert torch.equal(whole, again)
    apart: list[float] = []

    def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> dt.LossSum:
        padded = nn.functional.pad(batch["tokens"], (0, 5))
        training = dt.token_log_probs(model(padded)[:, 2:8], batch["tokens"][:, 3:], temperature=0.7)
        apart.append((training - batch["rollout"]).abs().max().item())
        aux = dt.monitors.rollout_mismatch(training, batch["rollout"])
        return dt.LossSum(total=-training.sum(), weight=training.numel(), aux=aux)

    step = dt.compose_step(loss_fn, microbatch_size=2)
    state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1))
    _, metrics = step(state, {"tokens": tokens, "rollout": rollout})
    return max(apart), (whole - rollout).abs().max().item(), dt.reduce_metrics(metrics)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-12), ("float32", 1e-5)])
def test_rollout_and_training_are_equal_within_the_stated_tolerance(ranks, dtype, tolerance):
    for apart, whole, metrics in ranks(2).run(compare, dtype):
        assert max(apart, whole) <= tolerance
        assert 0 <= metrics["rollout_kl"] <= tolerance
        assert metrics["rollout_gap"] <= tolerance
        assert metrics["rollout_differs"] == 0.0


def compare(dtype: str) -> tuple[float, float, dict[str, float]]:
    return rolled_out(getattr(torch, dtype))


def test_log_probs_are_those_of_the_softmax_with_a_gradient():
    logits = torch.randn(3, 4, 5, dtype=torch.float64, requires_grad=True)
    tokens = torch.randint(0, 5, (3, 4))
    result = dt.token_log_probs(logits, tokens, temperature=2.0)
    expected = (logits / 2).log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-14)
    assert dt.token_log_probs(logits.detach().bfloat16(), tokens).dtype == torch.float32
    (gradient,) = torch.autograd.grad(result.sum(), logits)
    (theirs,) = torch.autograd.grad(expected.sum(), logits)
    torch.testing.assert_close(gradient, theirs, rtol=0, atol=1e-14)


def test_mismatch_counts_only_the_tokens_of_the_mask():
    now, then = torch.tensor([-1.0, -2.0, math.nan]), torch.tensor([-1.0, -1.5, -1.0])
    sums = dt.monitors.rollout_mismatch(now, then, torch.tensor([True, True, False]))
    means = {name: (total / count).item() for name, (total, count) in sums.items()}
    expected = {
        "rollout_kl": (math.exp(-0.5) - 1 + 0.5) / 2,
        "rollout_gap": (math.exp(-1.5) - math.exp(-2)) / 2,
        "rollout_differs": 0.5,
    }
    assert means == pytest.approx(expected, abs=1e-6)


def test_refused():
    with pytest.raises(ConfigError, match=r"targets must be int64 of shape \(2, 3\), got torch\.int64 of shape"):
        dt.token_log_probs(torch.ones(2, 3, 4), torch.zeros(2, 4, dtype=torch.int64))
    with pytest.raises(ConfigError, match="token_log_probs: temperature must be a finite number above 0"):
        dt.token_log_probs(torch.ones(1, 3), torch.zeros(1, dtype=torch.int64), temperature=0.0)
    with pytest.raises(ConfigError, match=r"rollout_mismatch: rollout must have the shape of training \(2,\), got \(3,\)"):
        dt.monitors.rollout_mismatch(torch.ones(2), torch.ones(3))
