"""A block of ``seq`` tokens while it is filled: the one arithmetic of packing, for indexed documents and for streams.

``PackedTokens``: blocks of documents whose lengths are known, as a dataset that is indexed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
import xxhash
from torch import Tensor

from dtrain.data.dataset import fingerprint_dataset
from dtrain.data.sampling.block_shuffle import BlockShuffle, shard_order
from dtrain.data.sampling.sample_order import ElasticSampler, SampleOrder
from dtrain.errors import ConfigError, DataError
from dtrain.typing import Plain

IGNORE_INDEX = -100
"""The label that no loss counts: torch's default, and ``token_cross_entropy``'s."""

PADDING_DOCUMENT = -1
"""The document number of what is not a token of any document."""


class TokenDocument(NamedTuple):
    """The tokens of a document, and which of them are to be predicted: the same, or ``IGNORED`` where they are not."""

    tokens: Any
    targets: Any

    def __len__(self) -> int:
        return len(self.tokens)


def as_document(sample: Any, number: int) -> TokenDocument:
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
                f"packing: document {number} must be tokens, [length] whole numbers, got {_describe(values)}; tokenize it first"
            )
    if len(targets) != len(tokens):
        raise DataError(f"packing: document {number} has {len(tokens)} tokens and {len(targets)} labels; give one for each")
    return TokenDocument(tokens, targets)


class TokenBlock:
    """``seq`` places for tokens, filled from the left; what is left over is padding."""

    __slots__ = ("_documents", "_labels", "_positions", "_tokens", "filled", "seq")

    def __init__(self, seq: int, pad_token: int) -> None:
        self.seq, self.filled = seq, 0
        self._tokens = np.full(seq, pad_token, dtype=np.int64)
        self._labels = np.full(seq, IGNORE_INDEX, dtype=np.int64)
        self._positions = np.arange(seq, dtype=np.int64)
        self._documents = np.full(seq, PADDING_DOCUMENT, dtype=np.int64)

    def add(self, number: int, document: TokenDocument, begin: int) -> int:
        """Take what fits of ``document`` from token ``begin`` on; returns where it ends, exclusively."""
        end = min(len(document), begin + self.seq - self.filled)
        if end <= begin:
            return end
        at, until = self.filled, self.filled + end - begin
        self._tokens[at:until] = _token_slice(document.tokens, begin, end, number)
        known = min(end + 1, len(document))  # the last token of a document has no next one
        self._labels[at : at + known - begin - 1] = _token_slice(document.targets, begin + 1, known, number)
        self._positions[at:until] -= at
        self._documents[at:until] = number
        self.filled = until
        return end

    @property
    def is_full(self) -> bool:
        return self.filled == self.seq

    def tensors(self) -> dict[str, Tensor]:
        """The block as a sample: four int64 tensors ``[seq]``, which share memory with it."""
        self._positions[self.filled :] -= self.filled
        named = {"input_ids": self._tokens, "labels": self._labels, "positions": self._positions, "documents": self._documents}
        return {name: torch.from_numpy(values) for name, values in named.items()}


def check_block_options(prefix: str, seq: int, last_block: str) -> None:
    """Raise ``ConfigError`` unless both can be."""
    if isinstance(seq, bool) or not isinstance(seq, int) or seq < 1:
        raise ConfigError(f"{prefix}: seq must be a whole number of at least 1, got {seq!r}")
    if last_block not in ("pad", "drop"):
        raise ConfigError(f"{prefix}: tail must be 'pad' or 'drop', got {last_block!r}")


def _token_slice(values: Any, begin: int, end: int, number: int) -> Any:
    """A stretch of ``values`` as an array. It is cut first: a document may be a memory map of a file."""
    if begin >= end:  # an empty list has no dtype to check
        return np.empty(0, dtype=np.int64)
    stretch = values[begin:end]
    array = stretch.detach().cpu().numpy() if isinstance(stretch, Tensor) else np.asarray(stretch)
    if array.dtype.kind not in "iu" or array.ndim != 1:
        shown = f"{array.dtype} of shape {array.shape}"
        raise DataError(f"packing: document {number} must be tokens, [length] whole numbers, got {shown}; tokenize it first")
    return array


def _describe(values: Any) -> str:
    shape = getattr(values, "shape", None)
    return f"a {type(values).__name__}" + ("" if shape is None else f" of shape {tuple(shape)}")


DocumentLengths: TypeAlias = "Sequence[int] | Tensor | np.ndarray[Any, Any] | Callable[[int], int]"
"""Tokens of each document: ``[documents]`` whole numbers, or a function of a document's number that does not read it."""

_PREFIX = "PackedTokens"


class PackedTokens:
    """The tokens of all documents one after the other, in blocks of ``seq``: a dataset of blocks.

    Block ``i`` holds the tokens ``i * seq`` to ``(i + 1) * seq`` of the documents in their order, so any block is found
    by a search among the documents' ends. All that a loader promises holds for blocks: they can be shuffled, dealt to any
    number of ranks, and resumed. Tokens are neither lost nor repeated.

    A sample is a mapping of int64 tensors ``[seq]``:

    - ``input_ids``: the tokens; ``pad_token`` where there is none.
    - ``labels``: the next token of the same document, also where that is in the next block; -100 for the last one of each
      document and for padding. So no token is predicted from another document, and as many labels count as there are tokens
      that have one before them, whatever ``seq`` is. They are already shifted: for a loss of ``labels[t]`` on ``logits[t]``.
    - ``positions``: from 0 on in each document's part of the block, so they are below ``seq``.
    - ``documents``: the number of the document, -1 for padding; see ``document_mask`` and ``document_bounds``.

    Args:
        dataset: indexed documents: tokens ``[length]`` as a tensor, array or list, or mappings of them with ``"input_ids"``,
            and ``"labels"`` if not all tokens are to be predicted (``labels[t]`` is token ``t``, or -100 where it is not).
            Nothing is put between documents: their tokens should end with one that says so.
        seq: tokens in a block.
        lengths: tokens of every document, by number. Eight bytes a document are kept. A function is called once for each.
        last_block: what happens to the last block when it is not full: ``"pad"`` fills it up, ``"drop"`` leaves it out.
        pad_token: what stands in ``input_ids`` where there is no token; it counts in no loss.

    Raises:
        ConfigError: no block; lengths of another number than documents, or below 0; when a block is read, ``DataError`` for a
            document that is not as long as was said.

    Example:
        >>> packed = PackedTokens([[1, 2, 3], [], [4, 5]], seq=4, lengths=[3, 0, 2])
        >>> [block["input_ids"].tolist() for block in packed], packed[0]["labels"].tolist()
        ([[1, 2, 3, 4], [5, 0, 0, 0]], [2, 3, -100, 5])
    """

    def __init__(
        self,
        dataset: Any,
        *,
        seq: int,
        lengths: DocumentLengths,
        last_block: Literal["pad", "drop"] = "pad",
        pad_token: int = 0,
    ) -> None:
        check_block_options(_PREFIX, seq, last_block)
        self.dataset, self.seq, self.last_block, self.pad_token = dataset, seq, last_block, pad_token
        self._ends = _document_ends(len(dataset), lengths)
        self.tokens = int(self._ends[-1]) if len(self._ends) else 0
        if len(self) == 0:
            raise ConfigError(
                f"{_PREFIX}: {self.tokens} tokens in {len(dataset)} documents make no block of {seq}"
                + ("; use last_block='pad'" if self.tokens else "")
            )

    def __len__(self) -> int:
        return self.tokens // self.seq if self.last_block == "drop" else -(-self.tokens // self.seq)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"{_PREFIX}: there are blocks 0 to {len(self) - 1}, got {index}")
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Tensor]]:
        """The blocks ``indices``; a document that several of them need is read once."""
        spans = [self._documents_of(index) for index in indices]
        documents = self._read_documents(sorted({number for span in spans for number in span}))
        return [self._build_block(index, span, documents) for index, span in zip(indices, spans, strict=True)]

    def order(self, seed: int, shuffle: bool | BlockShuffle) -> SampleOrder:
        """The order of an epoch of blocks. Where documents lie in shards, blocks are shuffled near by, as documents would be.

        Raises:
            ConfigError: a ``BlockShuffle`` of documents without shards.
        """
        shards = getattr(self.dataset, "shard_sizes", None)  # documents of each
        if shards is not None and hasattr(self.dataset, "order"):
            documents = np.concatenate([[0], np.cumsum(shards)])
            tokens = np.concatenate([[0], self._ends])[documents]
            first = np.minimum(-(-tokens // self.seq), len(self))  # the block that begins there or next
            return shard_order(np.diff(first), seed=seed, shuffle=shuffle)
        if isinstance(shuffle, BlockShuffle):
            raise ConfigError(f"{_PREFIX}: the documents have no shards to shuffle within; give shuffle=True")
        return ElasticSampler(size=len(self), seed=seed, shuffle=shuffle)

    def prefetch(self, indices: Tensor) -> None:
        """Say which blocks are read soon: a dataset that can fetch ahead is told of their documents."""
        if hasattr(self.dataset, "prefetch"):
            numbers = dict.fromkeys(number for index in indices.tolist() for number in self._documents_of(index))
            self.dataset.prefetch(torch.tensor(list(numbers), dtype=torch.int64))

    def fingerprint(self) -> dict[str, Plain]:
        """What the blocks depend on: the documents' own fingerprint, their lengths, and how they are cut."""
        ends = xxhash.xxh3_64_hexdigest(self._ends.data.cast("B")) if len(self._ends) else ""
        return {
            "documents": fingerprint_dataset(self.dataset),
            "lengths": ends,
            "tokens": self.tokens,
            "seq": self.seq,
            "last_block": self.last_block,
        }

    def close(self) -> None:
        """Close the documents, if they can be."""
        if hasattr(self.dataset, "close"):
            self.dataset.close()

    def _documents_of(self, index: int) -> range:
        """The documents with a token in block ``index``, and empty ones between them."""
        first = np.searchsorted(self._ends, index * self.seq, side="right")
        last = np.searchsorted(self._ends, min((index + 1) * self.seq, self.tokens), side="left")
        return range(int(first), int(last) + 1)

    def _read_documents(self, numbers: list[int]) -> dict[int, TokenDocument]:
        many = getattr(self.dataset, "__getitems__", None)
        samples = many(numbers) if many is not None else [self.dataset[number] for number in numbers]
        documents = {number: as_document(sample, number) for number, sample in zip(numbers, samples, strict=True)}
        for number, document in documents.items():
            said = int(self._ends[number]) - self._document_start(number)
            if len(document) != said:
                raise DataError(
                    f"{_PREFIX}: document {number} has {len(document)} tokens, lengths says {said}; take lengths of these"
                )
        return documents

    def _build_block(self, index: int, span: range, documents: dict[int, TokenDocument]) -> dict[str, Tensor]:
        block = TokenBlock(self.seq, self.pad_token)
        for number in span:
            block.add(number, documents[number], max(0, index * self.seq - self._document_start(number)))
        return block.tensors()

    def _document_start(self, number: int) -> int:
        return int(self._ends[number - 1]) if number else 0

    def __repr__(self) -> str:
        return f"PackedTokens({len(self)} blocks of {self.seq}, {self.tokens} tokens of {len(self._ends)} documents)"


def _document_ends(documents: int, lengths: DocumentLengths) -> np.ndarray[Any, Any]:
    """Where each document ends among all tokens: ``[documents]`` int64."""
    if callable(lengths):
        sizes = np.fromiter((lengths(number) for number in range(documents)), dtype=np.int64, count=documents)
    else:
        sizes = lengths.numpy() if isinstance(lengths, Tensor) else np.asarray(lengths)
    if sizes.shape != (documents,):
        raise ConfigError(f"{_PREFIX}: lengths must be one number for each of {documents} documents, got shape {sizes.shape}")
    if documents and (sizes.dtype.kind not in "iu" or sizes.min() < 0):
        raise ConfigError(f"{_PREFIX}: lengths must be whole numbers of at least 0, got {sizes.dtype}, least {sizes.min()}")
    return np.cumsum(sizes, dtype=np.int64)
