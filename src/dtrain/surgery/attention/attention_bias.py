"""Linear biases of attention as numbers, and masks that have them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dtrain.errors import ConfigError


def alibi_slopes(heads: int, *, device: torch.device | str | None = None) -> Tensor:
    """How fast each head forgets: float32 ``[heads]``.

    Formula: for a power of two ``2 ** (-8 * h / heads)``, ``h = 1 ... heads``; else those of the power of two below, and then
    every other one of twice that power, from the first on.

    Host sync: none.

    Raises:
        ConfigError: ``heads`` is no whole number of at least 1.

    Source: Press et al. 2022, arXiv:2108.12409, section 3; other numbers of heads as in the authors' code.

    Example:
        >>> alibi_slopes(4).tolist()
        [0.25, 0.0625, 0.015625, 0.00390625]
        >>> alibi_slopes(3).tolist()
        [0.0625, 0.00390625, 0.25]
    """
    if type(heads) is not int or heads < 1:
        raise ConfigError(f"alibi_slopes: needs a whole number of heads of at least 1, got {heads!r}")
    below = 2 ** int(math.log2(heads))
    first = torch.arange(1, below + 1, device=device) * (-8.0 / below)
    others = (2 * torch.arange(heads - below, device=device) + 1) * (-4.0 / below)
    return torch.exp2(torch.cat([first, others]))


def alibi_bias(
    heads: int,
    length: int,
    keys: int | None = None,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """What is added to the scores of attention: ``[heads, length, keys]``.

    It is symmetric, for attention that sees both sides; a causal mask hides what comes after a token. In a model of one's own:
    ``scaled_dot_product_attention(q, k, v, attn_mask=alibi_bias(heads, length) + causal_mask)``.

    Formula: ``bias[h, i, j] = -slope[h] * abs(i + keys - length - j)``

    Args:
        heads: of attention.
        length: queries, which are the last ones of the keys.
        keys: as many as queries by default.
        device: of the result.
        dtype: of the result; it is computed in float32.

    Host sync: none.

    Raises:
        ConfigError: ``heads`` is no whole number of at least 1.

    Source: Press et al. 2022, arXiv:2108.12409, section 3.

    Example:
        >>> alibi_bias(2, 3)[0].tolist()  # the slope is 1/16
        [[-0.0, -0.0625, -0.125], [-0.0625, -0.0, -0.0625], [-0.125, -0.0625, -0.0]]
        >>> alibi_bias(2, 1, 3)[1].tolist()  # and 1/256
        [[-0.0078125, -0.00390625, -0.0]]
    """
    total = length if keys is None else keys
    queries = torch.arange(total - length, total, device=device)
    apart = (queries.unsqueeze(1) - torch.arange(total, device=device)).abs()
    return (-alibi_slopes(heads, device=device).view(-1, 1, 1) * apart).to(dtype)


def add_alibi_bias(mask: Tensor | None, bias: Tensor, *, causal: bool) -> Tensor:
    """A mask of attention with the bias in it: a float mask that is added to the scores, ``[batch or 1, heads, length, keys]``.

    Formula: ``bias`` where a token may be seen, the least number of the dtype where not

    Args:
        mask: ``[batch, 1 or heads, length or 1, keys]``, of bools (True is seen) or of floats (added); None hides nothing.
        bias: from ``alibi_bias``.
        causal: whether, without a mask, a token sees none that comes after it.

    Raises:
        ConfigError: a mask of another kind, or that is not for as many keys.

    Source: Press et al. 2022, arXiv:2108.12409, section 3.

    Example:
        >>> add_alibi_bias(torch.tensor([[[[True, False]]]]), alibi_bias(1, 1, 2) - 2.0, causal=False).tolist()
        [[[[-2.00390625, -3.4028234663852886e+38]]]]
    """
    least = torch.finfo(bias.dtype).min
    length, keys = bias.shape[-2:]
    if mask is None:
        if causal:
            seen = torch.ones(length, keys, dtype=torch.bool, device=bias.device).tril(keys - length)
            bias = torch.where(seen, bias, least)
        return bias.unsqueeze(0)
    if not isinstance(mask, Tensor) or mask.ndim != 4 or not (mask.dtype == torch.bool or mask.is_floating_point()):
        what = f"{mask.dtype} {list(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise ConfigError(f"alibi: takes masks of bools or floats [batch, heads, length, keys], got {what}; use sdpa or eager")
    if mask.shape[-1] != keys:
        raise ConfigError(
            f"alibi: a mask for {mask.shape[-1]} keys, but there are {keys}; caches of a fixed size are not known"
        )
    if mask.dtype == torch.bool:
        return torch.where(mask, bias, least)
    return (mask + bias).clamp(min=least)  # a sum of two may be less than there is
