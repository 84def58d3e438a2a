"""``PackedTokens``: pack documents of known lengths into blocks of ``seq`` tokens, as an indexed dataset.

``TokenBlock`` fills a block, for ``PackedTokens`` and for ``TokenStream``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
import xxhash
from torch import Tensor

from dtrain.arguments import check_choice, check_int, format_count
from dtrain.data.dataset import fingerprint_dataset, read_samples
from dtrain.data.sample_lengths import LengthTable
from dtrain.data.sample_order import BlockShuffle, ElasticSampler, SampleOrder, shard_order
from dtrain.errors import ConfigError, DataError
from dtrain.typing import Plain

IGNORE_INDEX = -100
"""Label that losses ignore: the default of torch and of ``cross_entropy``."""

PADDING_DOCUMENT = -1
"""Document number of padding."""

LAST_BLOCK_MODES = ("pad", "drop")


class TokenDocument(NamedTuple):
    """Tokens and targets of a document. A target is its token, or ``IGNORE_INDEX`` if the token is not to be predicted."""

    tokens: Any
    targets: Any

    def __len__(self) -> int:
        return len(self.tokens)


def as_document(sample: Any, number: int) -> TokenDocument:
    """Convert ``sample`` to a document: tokens, or a mapping with ``"input_ids"`` and optionally ``"labels"``.

    Raises:
        DataError: ``sample`` is neither, or the numbers of tokens and labels differ.
    """
    if hasattr(sample, "keys"):
        # A TensorDict has no ``in`` of its own.
        if "input_ids" not in sample.keys():  # noqa: SIM118
            raise DataError(
                f"packing: document {number} must have 'input_ids', got {sorted(map(str, sample.keys()))[:8]}. "
                f"Return {{'input_ids': tokens}} from the dataset."
            )
        tokens = sample["input_ids"]
        targets = sample["labels"] if "labels" in sample.keys() else tokens  # noqa: SIM118
    else:
        tokens = targets = sample
    for values in (tokens, targets):
        if isinstance(values, str | bytes) or not hasattr(values, "__len__") or getattr(values, "ndim", 1) != 1:
            shape = getattr(values, "shape", None)
            description = f"a {type(values).__name__}" + ("" if shape is None else f" of shape {tuple(shape)}")
            raise DataError(
                f"packing: document {number} must be tokens, [length] integers, got {description}. Tokenize the document."
            )
    if len(targets) != len(tokens):
        raise DataError(
            f"packing: document {number} has {len(tokens)} tokens and {len(targets)} labels. Give a label per token."
        )
    return TokenDocument(tokens, targets)


class TokenBlock:
    """Block of ``seq`` tokens, filled from the left. The rest is padding."""

    __slots__ = ("_documents", "_labels", "_positions", "_tokens", "filled", "seq")

    def __init__(self, seq: int, pad_token: int) -> None:
        self.seq, self.filled = seq, 0
        self._tokens = np.full(seq, pad_token, dtype=np.int64)
        self._labels = np.full(seq, IGNORE_INDEX, dtype=np.int64)
        self._positions = np.arange(seq, dtype=np.int64)
        self._documents = np.full(seq, PADDING_DOCUMENT, dtype=np.int64)

    def add(self, number: int, document: TokenDocument, begin: int) -> int:
        """Add the tokens of ``document`` that fit, from token ``begin`` on. Return the end, exclusively."""
        end = min(len(document), begin + self.seq - self.filled)
        if end <= begin:
            return end
        start, stop = self.filled, self.filled + end - begin
        self._tokens[start:stop] = _token_slice(document.tokens, begin, end, number)
        # The last token of a document has no next token.
        label_end = min(end + 1, len(document))
        self._labels[start : start + label_end - begin - 1] = _token_slice(document.targets, begin + 1, label_end, number)
        self._positions[start:stop] -= start
        self._documents[start:stop] = number
        self.filled = stop
        return end

    @property
    def is_full(self) -> bool:
        return self.filled == self.seq

    def tensors(self) -> dict[str, Tensor]:
        """Return the block as a sample: four int64 tensors ``[seq]``, which share memory with the block."""
        self._positions[self.filled :] -= self.filled
        arrays = {"input_ids": self._tokens, "labels": self._labels, "positions": self._positions, "documents": self._documents}
        return {name: torch.from_numpy(values) for name, values in arrays.items()}


def _token_slice(values: Any, begin: int, end: int, number: int) -> Any:
    """Convert a range of ``values`` to an array. The slice comes first, since a document may be a memory-mapped file."""
    # An empty list has no dtype to check.
    if begin >= end:
        return np.empty(0, dtype=np.int64)
    tokens = values[begin:end]
    array = tokens.detach().cpu().numpy() if isinstance(tokens, Tensor) else np.asarray(tokens)
    if array.dtype.kind not in "iu" or array.ndim != 1:
        description = f"{array.dtype} of shape {array.shape}"
        raise DataError(
            f"packing: document {number} must be tokens, [length] integers, got {description}. Tokenize the document."
        )
    return array


DocumentLengths: TypeAlias = "Sequence[int] | Tensor | np.ndarray[Any, Any] | Callable[[int], int]"
"""Tokens of each document: ``[documents]`` integers, or a function of a document's number that does not read the document."""

_PREFIX = "PackedTokens"


class PackedTokens:
    """Dataset of blocks of ``seq`` tokens, cut from the concatenated tokens of all documents.

    Block ``i`` holds the tokens ``i * seq`` to ``(i + 1) * seq`` of the documents in order. A search among the documents' ends
    finds any block, so a loader can shuffle the blocks, split them over any number of ranks, and resume. No token is lost or
    repeated.

    A sample is a mapping of int64 tensors ``[seq]``:

    - ``input_ids``: the tokens; ``pad_token`` in padding.
    - ``labels``: the next token of the same document, also if that token is in the next block; -100 for the last token of each
      document and for padding. So no token is predicted from another document, and the number of labels that count does not
      depend on ``seq``. The labels are already shifted: a loss compares ``labels[t]`` with ``logits[t]``.
    - ``positions``: counted from 0 in each document's part of the block, so below ``seq``.
    - ``documents``: the number of the document, -1 for padding; see ``document_mask`` and ``document_bounds``.

    Args:
        dataset: indexed documents: tokens ``[length]`` as a tensor, array or list, or mappings with ``"input_ids"``, and
            ``"labels"`` if some tokens are not to be predicted (``labels[t]`` is token ``t``, or -100). Nothing is inserted
            between documents, so the tokens should end with an end-of-text token.
        seq: tokens in a block.
        lengths: tokens of every document, by number; 8 bytes of memory per document. A function is called once per document.
        last_block: treatment of a last block that is not full: ``"pad"`` fills it up, ``"drop"`` leaves it out.
        pad_token: token in the padding of ``input_ids``; no loss counts it.

    Example:
        >>> import dtrain as dt
        >>> packed = dt.data.PackedTokens([[1, 2, 3], [], [4, 5]], seq=4, lengths=[3, 0, 2])
        >>> [block["input_ids"].tolist() for block in packed], packed[0]["labels"].tolist()
        ([[1, 2, 3, 4], [5, 0, 0, 0]], [2, 3, -100, 5])

    Raises:
        ConfigError: there is no block, or ``lengths`` has a wrong number of documents or a negative length.
        DataError: a document that is read has another length than ``lengths`` says.
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
        check_choice(_PREFIX, "last_block", last_block, LAST_BLOCK_MODES)
        self.dataset, self.seq = dataset, check_int(_PREFIX, "seq", seq)
        self.last_block, self.pad_token = last_block, pad_token
        self._ends = _document_ends(len(dataset), lengths)
        self.tokens = int(self._ends[-1]) if len(self._ends) else 0
        if len(self) == 0:
            documents = format_count(len(dataset), "document")
            raise ConfigError(
                f"{_PREFIX}: {format_count(self.tokens, 'token')} in {documents} make no block of {seq}. "
                + ("Use last_block='pad'." if self.tokens else "Give more documents.")
            )

    def __len__(self) -> int:
        return self.tokens // self.seq if self.last_block == "drop" else -(-self.tokens // self.seq)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"{_PREFIX}: index must be in 0 to {len(self) - 1}, got {index}")
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Tensor]]:
        """Read blocks. A document that several of the blocks need is read once."""
        spans = [self._documents_of(index) for index in indices]
        documents = self._read_documents(sorted({number for span in spans for number in span}))
        return [self._build_block(index, span, documents) for index, span in zip(indices, spans, strict=True)]

    def order(self, seed: int, shuffle: bool | BlockShuffle) -> SampleOrder:
        """Return the order of an epoch of blocks. If documents are in shards, blocks have a block shuffle by default.

        Raises:
            ConfigError: ``shuffle`` is a ``BlockShuffle``, and the documents are not in shards.
        """
        documents_per_shard = getattr(self.dataset, "shard_sizes", None)
        if documents_per_shard is not None and hasattr(self.dataset, "order"):
            documents = np.concatenate([[0], np.cumsum(documents_per_shard)])
            tokens = np.concatenate([[0], self._ends])[documents]
            # The first block that begins in the shard, or after it.
            first = np.minimum(-(-tokens // self.seq), len(self))
            return shard_order(np.diff(first), seed=seed, shuffle=shuffle)
        if isinstance(shuffle, BlockShuffle):
            raise ConfigError(f"{_PREFIX}: the documents have no shards to shuffle within. Use shuffle=True.")
        return ElasticSampler(size=len(self), seed=seed, shuffle=shuffle)

    def sample_lengths(self, column: str | None = None) -> LengthTable:
        """Return the tokens of each document's part of each block, without padding; ``column`` must be None.

        Raises:
            ConfigError: ``column`` is not None.
        """
        if column is not None:
            raise ConfigError(
                f"{_PREFIX}: lengths must be None, got {column!r}. Leave lengths out; blocks know their documents."
            )
        blocks = np.minimum(np.arange(1, len(self) + 1) * self.seq, self.tokens)
        # A part ends with its document or with its block.
        ends = np.union1d(self._ends[self._ends < blocks[-1]], blocks)
        ends = ends[ends > 0]
        return LengthTable(np.diff(ends, prepend=0), np.searchsorted(ends, blocks, side="right"))

    def prefetch(self, indices: Tensor) -> None:
        """Pass the documents of the blocks to the method ``prefetch`` of the dataset, if the dataset has one."""
        if hasattr(self.dataset, "prefetch"):
            numbers = dict.fromkeys(number for index in indices.tolist() for number in self._documents_of(index))
            self.dataset.prefetch(torch.tensor(list(numbers), dtype=torch.int64, device="cpu"))

    def fingerprint(self) -> dict[str, Plain]:
        """Return the documents' fingerprint, a hash of the lengths, and the options of the blocks."""
        ends = xxhash.xxh3_64_hexdigest(self._ends.data.cast("B")) if len(self._ends) else ""
        return {
            "documents": fingerprint_dataset(self.dataset),
            "lengths": ends,
            "tokens": self.tokens,
            "seq": self.seq,
            "last_block": self.last_block,
        }

    def close(self) -> None:
        """Close the documents, if they have a method ``close``."""
        if hasattr(self.dataset, "close"):
            self.dataset.close()

    def _documents_of(self, index: int) -> range:
        """Return the numbers of the documents with a token in block ``index``, and of empty documents between them."""
        first = np.searchsorted(self._ends, index * self.seq, side="right")
        last = np.searchsorted(self._ends, min((index + 1) * self.seq, self.tokens), side="left")
        return range(int(first), int(last) + 1)

    def _read_documents(self, numbers: list[int]) -> dict[int, TokenDocument]:
        samples = read_samples(self.dataset, numbers)
        documents = {number: as_document(sample, number) for number, sample in zip(numbers, samples, strict=True)}
        for number, document in documents.items():
            expected = int(self._ends[number]) - self._document_start(number)
            if len(document) != expected:
                raise DataError(
                    f"{_PREFIX}: document {number} has {len(document)} tokens, but lengths has {expected}. "
                    "Compute lengths from these documents."
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
    """Compute the end of each document among all tokens: ``[documents]`` int64."""
    if callable(lengths):
        sizes = np.fromiter((lengths(number) for number in range(documents)), dtype=np.int64, count=documents)
    else:
        sizes = lengths.numpy() if isinstance(lengths, Tensor) else np.asarray(lengths)
    if sizes.shape != (documents,):
        raise ConfigError(
            f"{_PREFIX}: lengths must have one number per document ({documents}), got shape {sizes.shape}. "
            "Pass lengths=[len(document) for document in dataset], or omit it."
        )
    if documents and (sizes.dtype.kind not in "iu" or sizes.min() < 0):
        raise ConfigError(
            f"{_PREFIX}: lengths must be integers of at least 0, got {sizes.dtype}, least {sizes.min()}. "
            "Pass the number of tokens per document as int64."
        )
    return np.cumsum(sizes, dtype=np.int64)


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
        raise ConfigError(
            f"{caller}: documents must be [batch, seq], got shape {tuple(documents.shape)}. "
            "Pass the 'documents' tensor of a packed batch."
        )
