"""torch's own attention with linear biases."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dtrain.surgery.attention_bias import alibi_bias
from dtrain.surgery.mixed import become


class AlibiMultiheadAttention(nn.MultiheadAttention):
    """``nn.MultiheadAttention`` of a text with itself, with linear biases; masks are those of ``nn.MultiheadAttention``.

    Formula: ``softmax(q @ k.T * scale - slope[h] * abs(i - j) + mask)``

    Source: Press et al. 2022, arXiv:2108.12409, section 3.

    Example:
        >>> layer = AlibiMultiheadAttention(2, 1, batch_first=True).requires_grad_(False)
        >>> _ = layer.in_proj_weight.zero_()  # so all scores are 0, but for the bias of 1/256
        >>> x = torch.ones(1, 2, 2)
        >>> torch.softmax(torch.tensor([0.0, -1 / 256]), 0).allclose(layer(x, x, x)[1][0, 0])
        True
    """

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As ``nn.MultiheadAttention.forward``; ``is_causal`` needs no mask beside it."""
        axis = 1 if self.batch_first and query.ndim == 3 else 0
        length, keys = query.shape[axis], key.shape[axis]
        if is_causal and attn_mask is None:
            attn_mask = torch.ones(length, keys, dtype=torch.bool, device=query.device).triu(keys - length + 1)
        bias = alibi_bias(self.num_heads, length, keys, device=query.device, dtype=query.dtype)
        if query.ndim == 3:
            bias = bias.repeat(query.shape[1 - axis], 1, 1)
        mask, padding = (_added(each, query.dtype) for each in (attn_mask, key_padding_mask))
        return super().forward(
            query,
            key,
            value,
            key_padding_mask=padding,
            need_weights=need_weights,
            attn_mask=bias if mask is None else bias + mask,
            average_attn_weights=average_attn_weights,
        )


def biased(module: nn.MultiheadAttention) -> nn.Module:
    """``module`` with linear biases. A hook that does nothing keeps torch from its kernels for evaluation, which have none."""
    become(module, AlibiMultiheadAttention).register_forward_pre_hook(_nothing)
    return module


def sees_another_text(model: nn.Module) -> set[int]:
    """Identities of attentions that torch's decoder layers have for what the encoder has made."""
    return {id(layer.multihead_attn) for layer in model.modules() if isinstance(layer, nn.TransformerDecoderLayer)}


def pad_tensors_(model: nn.Module) -> None:
    """Let torch's encoders leave tensors padded: nested ones have no place for a bias. Mutates: ``model``."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False


def _nothing(module: nn.Module, given: Any) -> None:
    return None


def _added(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A mask that is added, of one that may be of bools (True is hidden)."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, -torch.inf)
