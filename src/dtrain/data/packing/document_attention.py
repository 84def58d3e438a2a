"""Attention that stays inside a document, for packed blocks: as a mask, and as the bounds of variable-length attention."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dtrain.errors import ConfigError


class DocumentBounds(NamedTuple):
    """Where the documents of a batch begin and end when its rows are put one after the other.

    ``cu_seqlens`` is int32 ``[parts + 1]`` on the documents' device, from 0 to the number of tokens; ``max_seqlen`` the most tokens
    of one part. They are what variable-length attention calls ``cu_seqlens`` and ``max_seqlen``.
    """

    cu_seqlens: Tensor
    max_seqlen: int


def document_mask(documents: Tensor, *, causal: bool = True) -> Tensor:
    """Which tokens may look at which: those of one document, and with ``causal`` only back.

    Args:
        documents: ``[batch, seq]`` the document of each token, as in a packed block. Padding is a document of its own, so no
            row of the mask is empty.
        causal: whether a token sees those after it.

    Returns:
        bool ``[batch, 1, seq, seq]``, True where token ``[.., .., query, key]`` may look: ``attn_mask`` of
        ``scaled_dot_product_attention``, for all heads. A byte for each pair of tokens; ``document_bounds`` needs none.

    Raises:
        ConfigError: documents of another shape.

    Example:
        >>> document_mask(torch.tensor([[4, 4, 5]])).int().squeeze().tolist()
        [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
    """
    _check_documents(documents, "document_mask")
    same = documents[:, None, :, None] == documents[:, None, None, :]
    return same.tril() if causal else same


def document_bounds(documents: Tensor) -> DocumentBounds:
    """Bounds of the parts of a batch that belong to one document each, for attention over ``[batch * seq]`` tokens.

    Args:
        documents: ``[batch, seq]`` the document of each token, as in a packed block. A document ends with its row; padding is a
            part of its own.

    Host sync: one, to count the parts and find the longest.

    Raises:
        ConfigError: documents of another shape.

    Example:
        >>> offsets, longest = document_bounds(torch.tensor([[4, 4, 5], [5, 6, 6]]))
        >>> offsets.tolist(), longest
        ([0, 2, 3, 4, 6], 2)
    """
    _check_documents(documents, "document_bounds")
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    starts = begins.flatten().nonzero().squeeze(1)
    offsets = torch.cat([starts, starts.new_full((1,), documents.numel())]).int()
    return DocumentBounds(offsets, int(offsets.diff().max()) if len(starts) else 0)


def _check_documents(documents: Tensor, prefix: str) -> None:
    if documents.ndim != 2:
        raise ConfigError(f"{prefix}: documents must be [batch, seq], got shape {tuple(documents.shape)}")
