"""``pack_tokens``: pack a stream of documents into blocks of ``seq`` tokens, with a position that a checkpoint can save."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torchdata.nodes import BaseNode, IterableWrapper

from dtrain import storage
from dtrain.arguments import check_choice, check_int, single_line
from dtrain.data.packed_tokens import LAST_BLOCK_MODES, TokenBlock, TokenDocument, as_document
from dtrain.errors import CheckpointMismatchError, ConfigError, DataError
from dtrain.packages import missing_extra_error
from dtrain.storage import AnyPath

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
        position = (self._number, self._offset, self._skip, self._source_state)
        self._block_state = {"seq": self._seq, **dict(zip(_INITIAL_STATE, position, strict=True))}
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


RawDocument = str | bytes
TokenArray = NDArray[np.unsignedinteger[Any]]

# Number of documents per call of a tokenizer, which encodes them in threads.
_TOKENIZER_BATCH = 256
_MAX_CONFIG_BYTES = 2**28


class Tokenizer(Protocol):
    """Converter from documents to tokens."""

    name: str
    eos_token_id: int | None
    dtype: np.dtype[np.unsignedinteger[Any]]
    """Smallest dtype that can hold every token."""

    def encode(self, documents: Sequence[RawDocument]) -> list[TokenArray]:
        """Return the tokens of each document, without the end-of-text token."""


class ByteTokenizer:
    """Tokenizer with one token per byte."""

    def __init__(self, *, eos_token: str | None = None) -> None:
        self.name = "bytes"
        self.dtype = np.dtype(np.uint8)
        content = b"" if eos_token in (None, "none") else str(eos_token).encode()
        if len(content) > 1:
            raise ConfigError(
                f"tokenizer: eos_token must be one byte, got {eos_token!r}, which has {len(content)}. "
                "Name a character of ASCII, or 'none'."
            )
        self.eos_token_id = content[0] if content else None

    def encode(self, documents: Sequence[RawDocument]) -> list[TokenArray]:
        """Return the bytes of each document; text is encoded as UTF-8."""
        return [
            np.frombuffer(document.encode() if isinstance(document, str) else document, dtype=np.uint8)
            for document in documents
        ]


def _is_text(document: RawDocument) -> bool:
    try:
        document.encode() if isinstance(document, str) else document.decode()
    except UnicodeError:
        return False
    return True


class _FastTokenizer:
    """Tokenizer of the package ``tokenizers``."""

    def __init__(self, name: str, tokenizer: Any, *, eos_token_id: int | None) -> None:
        self.name, self._tokenizer, self.eos_token_id = name, tokenizer, eos_token_id
        self.dtype = np.dtype(np.min_scalar_type(max(tokenizer.get_vocab().values())))

    def encode(self, documents: Sequence[RawDocument]) -> list[TokenArray]:
        texts = [document if isinstance(document, str) else document.decode() for document in documents]
        loaded = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=self.dtype) for encoding in loaded]


def load_tokenizer(name: str, *, eos_token: str | None = None) -> Tokenizer:
    """Load a tokenizer.

    Args:
        name: ``bytes``; a ``tokenizer.json``, or a folder with that file; or a name that transformers knows.
        eos_token: token after each document; ``none`` for no token; None uses no token for ``bytes``, and the end-of-text token
            of the tokenizer's configuration otherwise.

    Raises:
        ConfigError: the tokenizer or the token does not exist, or the package of the tokenizer is not installed.
    """
    if name == "bytes":
        return ByteTokenizer(eos_token=eos_token)
    path = Path(name)
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        return _load_from_transformers(name, eos_token)
    tokenizers = _import_package("tokenizers")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:
        # The package raises exceptions of its own classes.
        raise ConfigError(
            f"tokenizer: {str(file)!r} is not a tokenizer.json: {single_line(error).rstrip('.')}. "
            "Save the tokenizer again with save_pretrained."
        ) from error
    return _FastTokenizer(
        name,
        tokenizer,
        eos_token_id=_eos_token_id(tokenizer, name, eos_token or _configured_eos_token(storage.resolve_path(file.parent))),
    )


def _load_from_transformers(name: str, eos_token: str | None) -> Tokenizer:
    transformers = _import_package("transformers")
    try:
        loaded = transformers.AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"tokenizer: {name!r} does not exist as a file or folder: {single_line(error).rstrip('.')}. "
            "Name a folder, a tokenizer.json, or a name on the hub."
        ) from error
    tokenizer = getattr(loaded, "backend_tokenizer", None)
    if tokenizer is None:
        raise ConfigError(f"tokenizer: {name!r} has no tokenizer.json. Save it with save_pretrained and pass the folder.")
    return _FastTokenizer(name, tokenizer, eos_token_id=_eos_token_id(tokenizer, name, eos_token or loaded.eos_token))


def _import_package(name: str) -> Any:
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError:
        raise missing_extra_error(f"tokenizers need the package {name}", "hf") from None


def _configured_eos_token(folder: AnyPath) -> str | None:
    file = folder / "tokenizer_config.json"
    if storage.file_size(file) is None:
        return None
    try:
        token = json.loads(storage.read_file(file, limit=_MAX_CONFIG_BYTES))["eos_token"]
    except (KeyError, TypeError, ValueError):
        return None
    return token.get("content") if isinstance(token, dict) else token


def _eos_token_id(tokenizer: Any, name: str, eos_token: str | None) -> int | None:
    if eos_token == "none":
        return None
    if eos_token is None:
        raise ConfigError(f"tokenizer: {name!r} has no end-of-text token in its configuration. Name that token, or none.")
    if (token := tokenizer.token_to_id(eos_token)) is None:
        raise ConfigError(f"tokenizer: {name!r} has no token {eos_token!r} to end documents with. Name another token, or none.")
    return int(token)


class TokenWindows:
    """Windows of ``window_size`` tokens, cut from concatenated documents. An incomplete last window is left out.

    Iterate once: the samples are ``{"tokens": [size]}``, numpy arrays of ``tokenizer.dtype``. ``documents`` and ``tokens``
    count the documents and tokens read so far; ``leftover_tokens`` counts the tokens outside of windows.
    """

    def __init__(self, documents: Iterable[RawDocument], tokenizer: Tokenizer, window_size: int) -> None:
        self.documents = self.tokens = self.windows = 0
        self._source, self._tokenizer, self._size = iter(documents), tokenizer, window_size

    @property
    def leftover_tokens(self) -> int:
        """Tokens that were read and are not in a window yet."""
        return self.tokens - self.windows * self._size

    def __iter__(self) -> Iterator[dict[str, TokenArray]]:

        for block in pack_tokens(self._encode_all(), seq=self._size, last_block="drop"):
            self.windows += 1
            yield {"tokens": block["input_ids"].numpy().astype(self._tokenizer.dtype)}

    def _encode_batch(self, batch: list[RawDocument]) -> list[TokenArray]:
        try:
            return self._tokenizer.encode(batch)
        # JSON can contain lone surrogates, which UTF-8 cannot encode.
        except (UnicodeError, TypeError) as error:
            for number, document in enumerate(batch, self.documents):
                if not _is_text(document):
                    raise DataError(f"document {number}: text must be valid UTF-8. Convert the file to UTF-8.") from error
            raise

    def _encode_all(self) -> Iterator[TokenArray]:
        end = self._tokenizer.eos_token_id
        while batch := list(islice(self._source, _TOKENIZER_BATCH)):
            for tokens in self._encode_batch(batch):
                complete = tokens if end is None else np.append(tokens, np.array(end, dtype=tokens.dtype))
                self.documents += 1
                self.tokens += len(complete)
                yield complete
