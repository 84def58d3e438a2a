"""Log-probabilities: equal at the rollout and in training within the stated tolerance, and the meter between both."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import dtrain as dt
from dtrain.errors import ConfigError
from dtrain.testing import memory_budget

CLASSES = 4096  # of 400 targets: 13 MB of logits, several blocks of rows


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


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_without_logits_equal_those_of_the_logits(bias, temperature):
    head, hidden = nn.Linear(5, CLASSES, bias=bias, dtype=torch.float64), torch.randn(4, 100, 5, dtype=torch.float64)
    tokens, inputs = torch.randint(CLASSES, (4, 100)), [hidden.requires_grad_(), *head.parameters()]
    both = [
        dt.linear_token_log_probs(hidden, head, tokens, temperature=temperature),
        dt.token_log_probs(head(hidden), tokens, temperature=temperature),
    ]
    torch.testing.assert_close(*both, rtol=0, atol=1e-12)
    # A loss whose weights follow from the log-probabilities.
    grads = [torch.autograd.grad((value.exp() * value.sin()).sum(), inputs) for value in both]
    for grad, other in zip(*grads, strict=True):
        assert (grad - other).norm() <= 1e-12 * other.norm()
    with torch.no_grad():
        assert not dt.linear_token_log_probs(hidden, head, tokens).requires_grad


def test_log_probs_of_low_precision_are_those_of_float32():
    torch.manual_seed(0)
    hidden, head = torch.randn(2, 50, 8, dtype=torch.bfloat16, requires_grad=True), nn.Linear(8, 300, dtype=torch.bfloat16)
    tokens, inputs = torch.randint(300, (2, 50)), [hidden, *head.parameters()]
    results = [dt.linear_token_log_probs(hidden, head, tokens), dt.token_log_probs(head(hidden), tokens)]
    expected = head(hidden).float().log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    for result in results:
        assert result.dtype is torch.float32
        torch.testing.assert_close(result, expected, rtol=0, atol=1e-5)
        for grad, other in zip(
            *(torch.autograd.grad(r.sum(), inputs, retain_graph=True) for r in (result, expected)), strict=True
        ):
            assert (grad - other).float().norm() <= 0.01 * other.float().norm()


def saved_bytes(function: Callable[[], Tensor], *free: Tensor) -> tuple[int, Tensor]:
    """Return the bytes that a function keeps for backward, without those of tensors that live anyway; and its result."""
    storages: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = function()
    return sum(size for place, size in storages.items() if place not in {x.untyped_storage().data_ptr() for x in free}), result


def test_bytes_for_backward_are_a_few_numbers_per_token():
    rows, classes = 512, 10_240
    hidden, head = torch.randn(rows, 4, requires_grad=True), nn.Linear(4, classes)
    tokens, logits = torch.randint(classes, (rows,)), torch.randn(rows, classes, dtype=torch.bfloat16, requires_grad=True)
    alive = (hidden, tokens, logits, head.weight, head.bias)
    for function in (
        lambda: dt.linear_token_log_probs(hidden, head, tokens, temperature=0.7),
        lambda: dt.token_log_probs(logits, tokens, temperature=0.7),
    ):
        kept, result = saved_bytes(function, *alive)
        assert kept <= 8 * rows
        result.sum().backward()


@pytest.mark.parametrize("has_logits", [False, True])
def test_peak_beyond_inputs_and_gradients_is_a_sixteenth_of_the_logits(has_logits):
    with memory_budget(2**40) as budget:
        hidden, head = torch.randn(2048, 2, requires_grad=True), nn.Linear(2, 10_240)
        tokens, logits = torch.randint(10_240, (2048,)), torch.randn(2048 * has_logits, 10_240, requires_grad=True)
        before = budget.live
        if has_logits:
            dt.token_log_probs(logits, tokens, temperature=0.7).sum().backward()
        else:
            dt.linear_token_log_probs(hidden, head, tokens, temperature=0.7).sum().backward()
        gradients = sum(x.grad.nbytes for x in (logits, hidden, *head.parameters()) if x.grad is not None)
        assert budget.peak - before - gradients <= 2048 * 10_240 * 4 / 16


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
    with pytest.raises(ConfigError, match=r"linear_token_log_probs: hidden must be \[\*, 2\]"):
        dt.linear_token_log_probs(torch.ones(4, 3), nn.Linear(2, 3), torch.zeros(4, dtype=torch.int64))
    with pytest.raises(ConfigError, match=r"forward of torch, got Identity\. Use dt\.token_log_probs\(head"):
        dt.linear_token_log_probs(torch.ones(4, 3), nn.Identity(), torch.zeros(4, dtype=torch.int64))
    with pytest.raises(ConfigError, match=r"rollout_mismatch: rollout must have the shape of training \(2,\), got \(3,\)"):
        dt.monitors.rollout_mismatch(torch.ones(2), torch.ones(3))
