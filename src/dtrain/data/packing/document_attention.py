"""Attention within documents, for packed blocks: ``document_mask``, and ``document_bounds`` for variable-length attention."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dtrain.errors import ConfigError


class DocumentBounds(NamedTuple):
    """Bounds of the documents in the concatenated rows of a batch, for variable-length attention.

    ``cu_seqlens`` is int32 ``[parts + 1]`` on the documents' device, from 0 to the number of tokens. ``max_seqlen`` is the
    largest number of tokens of a part.
    """

    cu_seqlens: Tensor
    max_seqlen: int


def document_mask(documents: Tensor, *, causal: bool = True) -> Tensor:
    """Build an attention mask in which a token attends to tokens of its own document only.

    Args:
        documents: ``[batch, seq]`` document number of each token, as in a packed block. Padding is a document of its own, so no
            row of the mask is empty.
        causal: if True, a token attends to earlier tokens only.

    Returns:
        bool ``[batch, 1, seq, seq]``, True at ``[.., .., query, key]`` if token ``query`` attends to token ``key``: the
        ``attn_mask`` of ``scaled_dot_product_attention``. The mask takes a byte per pair of tokens; ``document_bounds`` needs
        no mask.

    Example:
        >>> import dtrain as dt
        >>> dt.data.document_mask(torch.tensor([[4, 4, 5]])).int().squeeze().tolist()
        [[1, 0, 0], [1, 1, 0], [0, 0, 1]]

    Raises:
        ConfigError: the shape of ``documents`` is wrong.
    """
    _check_documents(documents, "document_mask")
    same = documents[:, None, :, None] == documents[:, None, None, :]
    return same.tril() if causal else same


def document_bounds(documents: Tensor) -> DocumentBounds:
    """Compute the bounds of the documents of a batch, for attention over ``[batch * seq]`` tokens.

    Args:
        documents: ``[batch, seq]`` document number of each token, as in a packed block. A document ends at the end of its row,
            and padding is a document of its own.

    Host sync: one, to count the parts and find the longest part.

    Example:
        >>> import dtrain as dt
        >>> bounds = dt.data.document_bounds(torch.tensor([[4, 4, 5], [5, 6, 6]]))
        >>> bounds.cu_seqlens.tolist(), bounds.max_seqlen
        ([0, 2, 3, 4, 6], 2)

    Raises:
        ConfigError: the shape of ``documents`` is wrong.
    """
    _check_documents(documents, "document_bounds")
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    starts = begins.flatten().nonzero().squeeze(1)
    cu_seqlens = torch.cat([starts, starts.new_full((1,), documents.numel())]).int()
    return DocumentBounds(cu_seqlens, int(cu_seqlens.diff().max()) if len(starts) else 0)


def _check_documents(documents: Tensor, caller: str) -> None:
    if documents.ndim != 2:
        raise ConfigError(f"{caller}: documents must be [batch, seq], got shape {tuple(documents.shape)}")
