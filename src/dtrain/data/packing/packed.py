"""``PackedTokens``: blocks of documents whose lengths are known, as a dataset that is indexed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
import xxhash
from torch import Tensor

from dtrain.data.dataset import fingerprint_of
from dtrain.data.order.base import Order
from dtrain.data.order.blocks import BlockShuffle, order_of_shards
from dtrain.data.order.sampler import ElasticSampler
from dtrain.data.packing.block import Block, Document, as_document, checked_sizes
from dtrain.errors import ConfigError, DataError
from dtrain.types import Plain

Lengths: TypeAlias = "Sequence[int] | Tensor | np.ndarray[Any, Any] | Callable[[int], int]"
"""Tokens of each document: ``[documents]`` whole numbers, or a function of a document's number that does not read it."""

_WHERE = "PackedTokens"


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
        tail: what happens to the last block when it is not full: ``"pad"`` fills it up, ``"drop"`` leaves it out.
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
        self, dataset: Any, *, seq: int, lengths: Lengths, tail: Literal["pad", "drop"] = "pad", pad_token: int = 0
    ) -> None:
        checked_sizes(_WHERE, seq, tail)
        self.dataset, self.seq, self.tail, self.pad_token = dataset, seq, tail, pad_token
        self._ends = _ends(len(dataset), lengths)
        self.tokens = int(self._ends[-1]) if len(self._ends) else 0
        if len(self) == 0:
            raise ConfigError(
                f"{_WHERE}: {self.tokens} tokens in {len(dataset)} documents make no block of {seq}"
                + ("; use tail='pad'" if self.tokens else "")
            )

    def __len__(self) -> int:
        return self.tokens // self.seq if self.tail == "drop" else -(-self.tokens // self.seq)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"{_WHERE}: there are blocks 0 to {len(self) - 1}, got {index}")
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Tensor]]:
        """The blocks ``indices``; a document that several of them need is read once."""
        spans = [self._documents(index) for index in indices]
        documents = self._read(sorted({number for span in spans for number in span}))
        return [self._block(index, span, documents) for index, span in zip(indices, spans, strict=True)]

    def order(self, seed: int, shuffle: bool | BlockShuffle) -> Order:
        """The order of an epoch of blocks. Where documents lie in shards, blocks are shuffled near by, as documents would be.

        Raises:
            ConfigError: a ``BlockShuffle`` of documents without shards.
        """
        shards = getattr(self.dataset, "blocks", None)  # documents of each
        if shards is not None and hasattr(self.dataset, "order"):
            documents = np.concatenate([[0], np.cumsum(shards)])
            tokens = np.concatenate([[0], self._ends])[documents]
            first = np.minimum(-(-tokens // self.seq), len(self))  # the block that begins there or next
            return order_of_shards(np.diff(first), seed=seed, shuffle=shuffle)
        if isinstance(shuffle, BlockShuffle):
            raise ConfigError(f"{_WHERE}: the documents have no shards to shuffle within; give shuffle=True")
        return ElasticSampler(size=len(self), seed=seed, shuffle=shuffle)

    def prefetch(self, indices: Tensor) -> None:
        """Say which blocks are read soon: a dataset that can fetch ahead is told of their documents."""
        if hasattr(self.dataset, "prefetch"):
            numbers = dict.fromkeys(number for index in indices.tolist() for number in self._documents(index))
            self.dataset.prefetch(torch.tensor(list(numbers), dtype=torch.int64))

    def fingerprint(self) -> dict[str, Plain]:
        """What the blocks depend on: the documents' own fingerprint, their lengths, and how they are cut."""
        ends = xxhash.xxh3_64_hexdigest(self._ends.data.cast("B")) if len(self._ends) else ""
        return {
            "documents": fingerprint_of(self.dataset),
            "lengths": ends,
            "tokens": self.tokens,
            "seq": self.seq,
            "tail": self.tail,
        }

    def close(self) -> None:
        """Close the documents, if they can be."""
        if hasattr(self.dataset, "close"):
            self.dataset.close()

    def _documents(self, index: int) -> range:
        """The documents with a token in block ``index``, and empty ones between them."""
        first = np.searchsorted(self._ends, index * self.seq, side="right")
        last = np.searchsorted(self._ends, min((index + 1) * self.seq, self.tokens), side="left")
        return range(int(first), int(last) + 1)

    def _read(self, numbers: list[int]) -> dict[int, Document]:
        many = getattr(self.dataset, "__getitems__", None)
        samples = many(numbers) if many is not None else [self.dataset[number] for number in numbers]
        documents = {number: as_document(sample, number) for number, sample in zip(numbers, samples, strict=True)}
        for number, document in documents.items():
            said = int(self._ends[number]) - self._begin(number)
            if len(document) != said:
                raise DataError(
                    f"{_WHERE}: document {number} has {len(document)} tokens, lengths says {said}; take lengths of these"
                )
        return documents

    def _block(self, index: int, span: range, documents: dict[int, Document]) -> dict[str, Tensor]:
        block = Block(self.seq, self.pad_token)
        for number in span:
            block.add(number, documents[number], max(0, index * self.seq - self._begin(number)))
        return block.tensors()

    def _begin(self, number: int) -> int:
        return int(self._ends[number - 1]) if number else 0

    def __repr__(self) -> str:
        return f"PackedTokens({len(self)} blocks of {self.seq}, {self.tokens} tokens of {len(self._ends)} documents)"


def _ends(documents: int, lengths: Lengths) -> np.ndarray[Any, Any]:
    """Where each document ends among all tokens: ``[documents]`` int64."""
    if callable(lengths):
        sizes = np.fromiter((lengths(number) for number in range(documents)), dtype=np.int64, count=documents)
    else:
        sizes = lengths.numpy() if isinstance(lengths, Tensor) else np.asarray(lengths)
    if sizes.shape != (documents,):
        raise ConfigError(f"{_WHERE}: lengths must be one number for each of {documents} documents, got shape {sizes.shape}")
    if documents and (sizes.dtype.kind not in "iu" or sizes.min() < 0):
        raise ConfigError(f"{_WHERE}: lengths must be whole numbers of at least 0, got {sizes.dtype}, least {sizes.min()}")
    return np.cumsum(sizes, dtype=np.int64)
