"""``pack_tokens``: blocks of documents that come one after the other, with a position that is a few integers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal

from torch import Tensor
from torchdata.nodes import BaseNode, IterableWrapper

from dtrain.data.packing.packed_tokens import TokenBlock, TokenDocument, as_document, check_block_options
from dtrain.errors import CheckpointMismatchError, ConfigError

_PREFIX = "pack_tokens"
_STATE_INTERVAL = 64  # documents between two questions where the source is: some sources copy much to answer
_EXHAUSTED = object()
_INITIAL_STATE: dict[str, Any] = {"documents": 0, "offset": 0, "skip": 0, "source": None}


def pack_tokens(
    documents: Iterable[Any], *, seq: int, last_block: Literal["pad", "drop"] = "pad", pad_token: int = 0
) -> TokenStream:
    """The tokens of ``documents`` one after the other, in blocks of ``seq``: the blocks of ``PackedTokens``, as a stream.

    For documents whose lengths are not known, or that have no number at all; where they have, ``PackedTokens`` can be
    shuffled and dealt to any number of ranks, and this cannot.

    Args:
        documents: tokens or mappings of them, as for ``PackedTokens``; their numbers in ``documents`` count from 0. A
            sequence is indexed, a node of ``torchdata.nodes`` and whatever has ``state_dict`` and ``load_state_dict`` is
            resumed with its own state, and of any other iterable what was read already is read again and dropped.
        seq: tokens in a block.
        last_block: what happens to the last block when it is not full: ``"pad"`` fills it up, ``"drop"`` leaves it out.
        pad_token: what stands in ``input_ids`` where there is no token; it counts in no loss.

    Returns:
        Blocks to iterate over, with ``state_dict`` and ``load_state_dict``; as often as ``documents`` can be.

    Raises:
        ConfigError: a size that cannot be, or documents that are not iterable; when it is read, ``DataError`` for a document
            that is none.

    Example:
        >>> stream = pack_tokens([[1, 2, 3], [], [4, 5]], seq=4)
        >>> next(stream)["input_ids"].tolist(), stream.state_dict()["documents"], stream.state_dict()["offset"]
        ([1, 2, 3, 4], 2, 1)
    """
    check_block_options(_PREFIX, seq, last_block)
    return TokenStream(_as_node(documents), seq=seq, last_block=last_block, pad_token=pad_token)


class TokenStream(BaseNode):  # type: ignore[misc]  # torchdata has no types
    """Blocks out of a stream of documents, which is stopped and resumed in the middle of a document.

    Made by ``pack_tokens``. It goes into ``build_loader``, and into a pipeline of ``torchdata.nodes``, as it is a node of them.
    ``state_dict`` is the position after the last block. A loop over it begins at the start, or at a position that was just
    loaded; ``next`` goes on. When a document cannot be read, the position stays, and the next try begins there.
    """

    def __init__(self, source: Any, *, seq: int, last_block: str, pad_token: int) -> None:
        super().__init__()
        self._source, self._seq, self._last_block, self._pad_token = source, seq, last_block, pad_token
        self._is_reset = False  # whether the position was loaded, and nothing read since

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        if not self._is_reset:
            self.reset(None)
        return self

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        """Go to where ``initial_state`` was taken, or to the start.

        Raises:
            CheckpointMismatchError: it is no state of this, it is of blocks of another length, or in documents that the source
                does not have.
        """
        super().reset(initial_state)
        state = initial_state or {"seq": self._seq, **_INITIAL_STATE}
        if state.keys() != {"seq", *_INITIAL_STATE} or state["seq"] != self._seq:
            raise CheckpointMismatchError(
                f"{_PREFIX}: the saved position must be one in blocks of {self._seq} tokens, got {state}; resume with that seq"
            )
        self._block_state = state  # where the next block begins
        self._number, self._offset, self._skip, self._source_state = (state[name] for name in _INITIAL_STATE)
        self._document: TokenDocument | None = None
        self._is_reset, self._is_interrupted = True, False
        try:
            self._source.reset(self._source_state)
            for _ in range(self._skip):
                next(self._source)
        except (ValueError, StopIteration) as error:
            raise CheckpointMismatchError(
                f"{_PREFIX}: the saved position is in document {self._number}, which the source does not come to; resume with "
                f"the same documents {error}"
            ) from error

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where ``state`` was taken, with the next block; see ``reset``."""
        self.reset(state)

    def get_state(self) -> dict[str, Any]:
        """The documents that are over, how many tokens of the next one are, and where the source was a few documents before."""
        return dict(self._block_state)

    def next(self) -> dict[str, Tensor]:
        """The next block.

        Raises:
            StopIteration: there is none.
            DataError: a document that is not one.
        """
        if self._is_interrupted:
            self.reset(self._block_state)
        self._is_reset, self._is_interrupted = False, True  # torn until it is known that nothing was lost
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
        """The document that is not over yet; None when there is none."""
        if self._document is None:
            if self._skip >= _STATE_INTERVAL:
                self._source_state, self._skip = self._source.state_dict(), 0
            found = next(self._source, _EXHAUSTED)
            self._document = None if found is _EXHAUSTED else as_document(found, self._number)
            has = 0 if self._document is None else len(self._document)
            if self._offset > has:
                raise CheckpointMismatchError(
                    f"{_PREFIX}: the saved position is behind token {self._offset} of document {self._number}, which has {has}; "
                    "resume with the same documents"
                )
        return self._document

    def _position(self) -> tuple[int, int, int, Any]:
        return self._number, self._offset, self._skip, self._source_state


class _SequenceNode(BaseNode):  # type: ignore[misc]
    """A sequence as a node. torchdata's own would count its way to a position."""

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
    """``documents`` as a node of ``torchdata.nodes``."""
    if isinstance(documents, BaseNode):
        return documents
    stateful = hasattr(documents, "state_dict") and hasattr(documents, "load_state_dict")
    if not stateful and hasattr(documents, "__getitem__") and hasattr(documents, "__len__"):
        return _SequenceNode(documents)
    if not hasattr(documents, "__iter__"):
        raise ConfigError(f"{_PREFIX}: documents must be an iterable of tokens, got a {type(documents).__name__}")
    return IterableWrapper(documents)
