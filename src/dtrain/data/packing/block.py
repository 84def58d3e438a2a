"""A block of ``seq`` tokens while it is filled: the one arithmetic of packing, for indexed documents and for streams."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dtrain.errors import ConfigError, DataError

IGNORED = -100
"""The label that no loss counts: torch's default, and ``token_cross_entropy``'s."""

PADDING = -1
"""The document number of what is not a token of any document."""


class Document(NamedTuple):
    """The tokens of a document, and which of them are to be predicted: the same, or ``IGNORED`` where they are not."""

    tokens: Any
    targets: Any

    def __len__(self) -> int:
        return len(self.tokens)


def as_document(sample: Any, number: int) -> Document:
    """``sample`` as a document: its tokens, or a mapping with ``"input_ids"`` and perhaps ``"labels"``, one for each of them.

    Raises:
        DataError: neither; or labels of another number.
    """
    if hasattr(sample, "keys"):
        if "input_ids" not in sample.keys():  # noqa: SIM118  # a TensorDict has no ``in`` of its own
            raise DataError(f"packing: document {number} has no 'input_ids'; it has {sorted(map(str, sample.keys()))[:8]}")
        tokens = sample["input_ids"]
        targets = sample["labels"] if "labels" in sample.keys() else tokens  # noqa: SIM118
    else:
        tokens = targets = sample
    for values in (tokens, targets):
        if isinstance(values, str | bytes) or not hasattr(values, "__len__") or getattr(values, "ndim", 1) != 1:
            raise DataError(
                f"packing: document {number} must be tokens, [length] whole numbers, got {_shown(values)}; tokenize it first"
            )
    if len(targets) != len(tokens):
        raise DataError(f"packing: document {number} has {len(tokens)} tokens and {len(targets)} labels; give one for each")
    return Document(tokens, targets)


class Block:
    """``seq`` places for tokens, filled from the left; what is left over is padding."""

    __slots__ = ("_documents", "_labels", "_positions", "_tokens", "filled", "seq")

    def __init__(self, seq: int, pad_token: int) -> None:
        self.seq, self.filled = seq, 0
        self._tokens = np.full(seq, pad_token, dtype=np.int64)
        self._labels = np.full(seq, IGNORED, dtype=np.int64)
        self._positions = np.arange(seq, dtype=np.int64)
        self._documents = np.full(seq, PADDING, dtype=np.int64)

    def add(self, number: int, document: Document, begin: int) -> int:
        """Take what fits of ``document`` from token ``begin`` on; returns where it ends, exclusively."""
        end = min(len(document), begin + self.seq - self.filled)
        if end <= begin:
            return end
        at, until = self.filled, self.filled + end - begin
        self._tokens[at:until] = _numbers(document.tokens, begin, end, number)
        known = min(end + 1, len(document))  # the last token of a document has no next one
        self._labels[at : at + known - begin - 1] = _numbers(document.targets, begin + 1, known, number)
        self._positions[at:until] -= at
        self._documents[at:until] = number
        self.filled = until
        return end

    @property
    def full(self) -> bool:
        return self.filled == self.seq

    def tensors(self) -> dict[str, Tensor]:
        """The block as a sample: four int64 tensors ``[seq]``, which share memory with it."""
        self._positions[self.filled :] -= self.filled
        named = {"input_ids": self._tokens, "labels": self._labels, "positions": self._positions, "documents": self._documents}
        return {name: torch.from_numpy(values) for name, values in named.items()}


def checked_sizes(where: str, seq: int, tail: str) -> None:
    """Raise ``ConfigError`` unless both can be."""
    if isinstance(seq, bool) or not isinstance(seq, int) or seq < 1:
        raise ConfigError(f"{where}: seq must be a whole number of at least 1, got {seq!r}")
    if tail not in ("pad", "drop"):
        raise ConfigError(f"{where}: tail must be 'pad' or 'drop', got {tail!r}")


def _numbers(values: Any, begin: int, end: int, number: int) -> Any:
    """A stretch of ``values`` as an array. It is cut first: a document may be a memory map of a file."""
    if begin >= end:  # an empty list has no dtype to check
        return np.empty(0, dtype=np.int64)
    stretch = values[begin:end]
    array = stretch.detach().cpu().numpy() if isinstance(stretch, Tensor) else np.asarray(stretch)
    if array.dtype.kind not in "iu" or array.ndim != 1:
        shown = f"{array.dtype} of shape {array.shape}"
        raise DataError(f"packing: document {number} must be tokens, [length] whole numbers, got {shown}; tokenize it first")
    return array


def _shown(values: Any) -> str:
    shape = getattr(values, "shape", None)
    return f"a {type(values).__name__}" + ("" if shape is None else f" of shape {tuple(shape)}")
