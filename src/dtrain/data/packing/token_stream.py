"""``pack_tokens``: pack a stream of documents into blocks of ``seq`` tokens, with a position that a checkpoint can save."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal

from torch import Tensor
from torchdata.nodes import BaseNode, IterableWrapper

from dtrain.arguments import check_choice, check_int
from dtrain.data.packing.packed_tokens import LAST_BLOCK_MODES, TokenBlock, TokenDocument, as_document
from dtrain.errors import CheckpointMismatchError, ConfigError

_PREFIX = "pack_tokens"
# Number of documents between two saves of the source's state, because some sources copy much data to save.
_STATE_INTERVAL = 64
_EXHAUSTED = object()
_INITIAL_STATE: dict[str, Any] = {"documents": 0, "offset": 0, "skip": 0, "source": None}


def pack_tokens(
    documents: Iterable[Any], *, seq: int, last_block: Literal["pad", "drop"] = "pad", pad_token: int = 0
) -> TokenStream:
    """Pack a stream of ``documents`` into blocks of ``seq`` tokens, the same blocks as ``PackedTokens``.

    Use it for documents of unknown lengths, or without indices. Otherwise use ``PackedTokens``, because a loader can shuffle
    its blocks and split them over any number of ranks.

    Args:
        documents: tokens or mappings, as for ``PackedTokens``; document numbers count from 0. A sequence resumes by index. A
            node of ``torchdata.nodes``, or an object with ``state_dict`` and ``load_state_dict``, resumes with its own state.
            For any other iterable, a resume reads the consumed documents again.
        seq: tokens in a block.
        last_block: treatment of a last block that is not full: ``"pad"`` fills it up, ``"drop"`` leaves it out.
        pad_token: token in the padding of ``input_ids``; no loss counts it.

    Returns:
        An iterable of blocks, with ``state_dict`` and ``load_state_dict``.

    Example:
        >>> import dtrain as dt
        >>> stream = dt.data.pack_tokens([[1, 2, 3], [], [4, 5]], seq=4)
        >>> (
        ...     next(stream)["input_ids"].tolist(),
        ...     stream.state_dict()["documents"],
        ...     stream.state_dict()["offset"],
        ... )
        ([1, 2, 3, 4], 2, 1)

    Raises:
        ConfigError: ``seq`` or ``last_block`` is invalid, or ``documents`` is not iterable.
        DataError: a document that is read is invalid.
    """
    check_int(_PREFIX, "seq", seq)
    check_choice(_PREFIX, "last_block", last_block, LAST_BLOCK_MODES)
    return TokenStream(_as_node(documents), seq=seq, last_block=last_block, pad_token=pad_token)


class TokenStream(BaseNode):  # type: ignore[misc]  # torchdata has no types
    """Stream of blocks that can stop and resume in the middle of a document. ``pack_tokens`` builds it.

    A token stream is a node of ``torchdata.nodes`` and a dataset for ``build_loader``. ``state_dict`` is the position after the
    last block. A loop begins at the start, or at a position that was just loaded; ``next`` continues. If a document cannot be
    read, the position stays, and the next attempt begins at that position.
    """

    def __init__(self, source: Any, *, seq: int, last_block: str, pad_token: int) -> None:
        super().__init__()
        self._source, self._seq, self._last_block, self._pad_token = source, seq, last_block, pad_token
        # True after a position was loaded, until the first read.
        self._is_reset = False

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        if not self._is_reset:
            self.reset(None)
        return self

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        """Go to the position ``initial_state``, or to the start.

        Raises:
            CheckpointMismatchError: ``initial_state`` is invalid, has another ``seq``, or is beyond the end of the source.
        """
        super().reset(initial_state)
        state = initial_state or {"seq": self._seq, **_INITIAL_STATE}
        if state.keys() != {"seq", *_INITIAL_STATE} or state["seq"] != self._seq:
            raise CheckpointMismatchError(
                f"{_PREFIX}: the saved position must have seq={self._seq}, got {state}. Resume with the same seq."
            )
        # State at the start of the next block.
        self._block_state = state
        self._number, self._offset, self._skip, self._source_state = (state[name] for name in _INITIAL_STATE)
        self._document: TokenDocument | None = None
        self._is_reset, self._is_interrupted = True, False
        try:
            self._source.reset(self._source_state)
            for _ in range(self._skip):
                next(self._source)
        except (ValueError, StopIteration) as error:
            raise CheckpointMismatchError(
                f"{_PREFIX}: the source ends before document {self._number} of the saved position. Resume with "
                f"the same documents {error}"
            ) from error

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at ``state`` with the next block; see ``reset``."""
        self.reset(state)

    def get_state(self) -> dict[str, Any]:
        """Return the number of complete documents, the offset in the next document, and a recent state of the source."""
        return dict(self._block_state)

    def next(self) -> dict[str, Tensor]:
        """Return the next block.

        Raises:
            StopIteration: the stream has ended.
            DataError: a document is invalid.
        """
        if self._is_interrupted:
            self.reset(self._block_state)
        # The stream counts as interrupted until the block is complete.
        self._is_reset, self._is_interrupted = False, True
        block = self._fill_block()
        self._block_state = {"seq": self._seq, **dict(zip(_INITIAL_STATE, self._position(), strict=True))}
        self._is_interrupted = False
        if block.filled == 0 or (self._last_block == "drop" and not block.is_full):
            raise StopIteration
        return block.tensors()

    def _fill_block(self) -> TokenBlock:
        block = TokenBlock(self._seq, self._pad_token)
        while not block.is_full and (document := self._current_document()) is not None:
            self._offset = block.add(self._number, document, self._offset)
            if self._offset == len(document):
                self._number, self._offset, self._document = self._number + 1, 0, None
                self._skip += 1
        return block

    def _current_document(self) -> TokenDocument | None:
        """Return the current document; None at the end of the stream."""
        if self._document is None:
            if self._skip >= _STATE_INTERVAL:
                self._source_state, self._skip = self._source.state_dict(), 0
            document = next(self._source, _EXHAUSTED)
            self._document = None if document is _EXHAUSTED else as_document(document, self._number)
            length = 0 if self._document is None else len(self._document)
            if self._offset > length:
                raise CheckpointMismatchError(
                    f"{_PREFIX}: the position is after token {self._offset} of document {self._number}, which has {length}. "
                    "Resume with the same documents."
                )
        return self._document

    def _position(self) -> tuple[int, int, int, Any]:
        return self._number, self._offset, self._skip, self._source_state


class _SequenceNode(BaseNode):  # type: ignore[misc]
    """Node of a sequence that resumes by index. torchdata's wrapper would iterate up to the position."""

    def __init__(self, documents: Any) -> None:
        super().__init__()
        self._documents, self._at = documents, 0

    def reset(self, initial_state: dict[str, int] | None = None) -> None:
        super().reset(initial_state)
        self._at = initial_state["at"] if initial_state else 0

    def next(self) -> Any:
        if self._at >= len(self._documents):
            raise StopIteration
        document = self._documents[self._at]
        self._at += 1
        return document

    def get_state(self) -> dict[str, int]:
        return {"at": self._at}


def _as_node(documents: Any) -> Any:
    """Convert ``documents`` to a node of ``torchdata.nodes``."""
    if isinstance(documents, BaseNode):
        return documents
    stateful = hasattr(documents, "state_dict") and hasattr(documents, "load_state_dict")
    if not stateful and hasattr(documents, "__getitem__") and hasattr(documents, "__len__"):
        return _SequenceNode(documents)
    if not hasattr(documents, "__iter__"):
        raise ConfigError(
            f"{_PREFIX}: documents must be an iterable of tokens, got a {type(documents).__name__}. "
            "Pass a dataset or an iterable of lists of token numbers."
        )
    return IterableWrapper(documents)
