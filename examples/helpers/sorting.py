"""Sort digits: prompts, a checker of answers, and a sampler whose draws do not depend on the number of ranks."""

import torch
from tensordict import TensorDict
from torch import Tensor, nn

import dtrain as dt

DIGITS = 4
ASK = 10  # token between the digits and the answer


def prompts(numbers: Tensor, *seed: int | str) -> Tensor:
    """Return the prompts with these numbers, ``[n, DIGITS + 1]`` int64: random digits and ``ASK``."""
    digits = [torch.randint(10, (DIGITS,), generator=dt.dist.generator("cpu", *seed, k)) for k in numbers.tolist()]
    return torch.cat([torch.stack(digits), torch.full((len(digits), 1), ASK)], 1)


def score(texts: Tensor) -> Tensor:
    """Return the share of digits of each answer that stand where they stand in the sorted prompt: ``[n]``, 1 if all do."""
    return (texts[:, :DIGITS].sort(1).values == texts[:, DIGITS + 1 :]).double().mean(1)


@torch.no_grad()
def generate(model: nn.Module, prompts: Tensor, draws: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Write an answer behind each prompt; return texts ``[n, 2 * DIGITS + 1]`` and log-probabilities ``[n, DIGITS]``.

    Args:
        model: policy in evaluation mode.
        prompts: ``[n, DIGITS + 1]``.
        draws: ``[n, DIGITS]`` numbers in ``[0, 1)``, one for each digit to draw; None writes the most likely digits.

    Collective: ``DIGITS`` forwards of the model, also on a rank with fewer prompts.
    """
    texts, log_probs = prompts, []
    for position in range(DIGITS):
        logits = model(texts)[:, -1]
        if draws is None:
            token = logits.argmax(-1)
        else:
            cumulative = logits.double().softmax(-1).cumsum(-1)
            token = (cumulative <= draws[:, position, None] * cumulative[:, -1:]).sum(-1)
        log_probs.append(dt.token_log_probs(logits, token))
        texts = torch.cat([texts, token[:, None]], 1)
    return texts, torch.stack(log_probs, 1)


def roll_out(model: nn.Module, groups: Tensor, size: int, rollout: int, *, seed: int, device: torch.device) -> TensorDict:
    """Sample ``size`` answers to each prompt of ``groups``, and compare each with its group: one row per sample.

    A sample has the same prompt and draws on every number of ranks, because its seed is its number in the rollout.
    """
    numbers = (groups[:, None] * size + torch.arange(size)).flatten()
    draws = [torch.rand(DIGITS, generator=dt.dist.generator("cpu", seed, "draws", rollout, k)) for k in numbers.tolist()]
    asked = prompts(groups, seed, "prompt", rollout).repeat_interleave(size, 0)
    with dt.eval_mode(model):
        texts, log_probs = generate(model, asked.to(device), torch.stack(draws).double().to(device))
    reward = score(texts)
    of_group = reward.view(-1, size)
    advantage = (of_group - of_group.mean(1, keepdim=True)) / (of_group.std(1, keepdim=True) + 1e-4)
    rows = {"texts": texts, "log_probs": log_probs, "reward": reward, "advantage": advantage.flatten(), "number": numbers}
    return TensorDict({name: column.to(device) for name, column in rows.items()}, batch_size=[len(numbers)])
