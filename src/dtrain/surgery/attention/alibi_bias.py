"""The biases of ALiBi: slopes by head, and masks with the bias."""

from __future__ import annotations

import math

import torch
from einops import rearrange
from torch import Tensor

from dtrain.arguments import check_int
from dtrain.errors import ConfigError


def alibi_slopes(heads: int, *, device: torch.device | str | None = None) -> Tensor:
    """Return the ALiBi slope of each head: float32 ``[heads]``.

    Formula: ``2 ** (-8 * h / heads)``, ``h = 1 ... heads``, for a power of two; else the slopes of the next lower power of two,
    then every second slope of twice that power, from the first on.

    Host sync: none.

    Example:
        >>> import dtrain as dt
        >>> dt.surgery.alibi_slopes(4).tolist()
        [0.25, 0.0625, 0.015625, 0.00390625]
        >>> dt.surgery.alibi_slopes(3).tolist()
        [0.0625, 0.00390625, 0.25]

    Raises:
        ConfigError: ``heads`` is not an integer >= 1.

    Source: Press et al. 2022, arXiv:2108.12409, section 3; other numbers of heads as in the authors' code.
    """
    check_int("alibi_slopes", "heads", heads)
    power = 2 ** int(math.log2(heads))
    first = torch.arange(1, power + 1, device=device) * (-8.0 / power)
    rest = (2 * torch.arange(heads - power, device=device) + 1) * (-4.0 / power)
    return torch.exp2(torch.cat([first, rest]))


def alibi_bias(
    heads: int,
    length: int,
    keys: int | None = None,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return the ALiBi bias that is added to attention scores: ``[heads, length, keys]``.

    The bias is symmetric, for bidirectional attention. A causal mask hides later tokens. Use the bias in a custom model as
    ``scaled_dot_product_attention(q, k, v, attn_mask=dt.surgery.alibi_bias(heads, length) + causal_mask)``.

    Formula: ``bias[h, i, j] = -slope[h] * abs(i + keys - length - j)``

    Args:
        heads: number of attention heads.
        length: number of queries, at the last positions of the keys.
        keys: number of keys; None uses ``length``.
        device: device of the result.
        dtype: dtype of the result; the computation uses float32.

    Host sync: none.

    Example:
        >>> import dtrain as dt
        >>> dt.surgery.alibi_bias(2, 3)[0].tolist()  # slope 1/16
        [[-0.0, -0.0625, -0.125], [-0.0625, -0.0, -0.0625], [-0.125, -0.0625, -0.0]]
        >>> dt.surgery.alibi_bias(2, 1, 3)[1].tolist()  # slope 1/256
        [[-0.0078125, -0.00390625, -0.0]]

    Raises:
        ConfigError: ``heads`` is not an integer >= 1.

    Source: Press et al. 2022, arXiv:2108.12409, section 3.
    """
    num_keys = length if keys is None else keys
    queries = torch.arange(num_keys - length, num_keys, device=device)
    distance = (rearrange(queries, "q -> q 1") - torch.arange(num_keys, device=device)).abs()
    return (-rearrange(alibi_slopes(heads, device=device), "h -> h 1 1") * distance).to(dtype)


def add_alibi_bias(mask: Tensor | None, bias: Tensor, *, causal: bool) -> Tensor:
    """Add an ALiBi bias to an attention mask: returns an additive float mask ``[batch or 1, heads, length, keys]``.

    Formula: ``bias`` for visible tokens, the minimum of the dtype for hidden tokens

    Args:
        mask: ``[batch, 1 or heads, length or 1, keys]`` of bools (True is visible) or floats (additive); None hides nothing.
        bias: bias from ``alibi_bias``.
        causal: if True and ``mask`` is None, hide later tokens.

    Example:
        >>> import dtrain as dt
        >>> mask, bias = torch.tensor([[[[True, False]]]]), dt.surgery.alibi_bias(1, 1, 2) - 2.0
        >>> dt.surgery.add_alibi_bias(mask, bias, causal=False).tolist()
        [[[[-2.00390625, -3.4028234663852886e+38]]]]

    Raises:
        ConfigError: a mask of another type, or with another number of keys.

    Source: Press et al. 2022, arXiv:2108.12409, section 3.
    """
    least = torch.finfo(bias.dtype).min
    length, keys = bias.shape[-2:]
    if mask is None:
        if causal:
            visible = torch.ones(length, keys, dtype=torch.bool, device=bias.device).tril(keys - length)
            bias = torch.where(visible, bias, least)
        return bias.unsqueeze(0)
    if not isinstance(mask, Tensor) or mask.ndim != 4 or not (mask.dtype == torch.bool or mask.is_floating_point()):
        actual = f"{mask.dtype} {list(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise ConfigError(
            f"alibi: mask must be a bool or float tensor [batch, heads, length, keys], got {actual}. Use sdpa or eager."
        )
    if mask.shape[-1] != keys:
        raise ConfigError(f"alibi: mask must have {keys} keys, got {mask.shape[-1]}. Do not use caches of a fixed size.")
    if mask.dtype == torch.bool:
        return torch.where(mask, bias, least)
    # The sum may be below the range of the dtype.
    return (mask + bias).clamp(min=least)
