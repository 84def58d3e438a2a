"""Documents as windows of tokens: tokenizers by name, and the tokens of one document after the other, cut every so many."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dtrain import storage
from dtrain.errors import ConfigError, DataError
from dtrain.optional_dependencies import missing_extra_error
from dtrain.storage import AnyPath

RawDocument = str | bytes
TokenArray = NDArray[np.unsignedinteger[Any]]

_TOKENIZER_BATCH = 256  # documents that a tokenizer gets at once, for its threads
_MAX_CONFIG_BYTES = 2**28


class Tokenizer(Protocol):
    """What makes tokens of documents."""

    name: str
    eos_token_id: int | None
    dtype: np.dtype[np.unsignedinteger[Any]]
    """The smallest one that has room for every token."""

    def encode(self, documents: Sequence[RawDocument]) -> list[TokenArray]:
        """The tokens of each document, without ``end``."""


class ByteTokenizer:
    """Every byte is a token."""

    def __init__(self, *, eos_token: str | None = None) -> None:
        self.name = "bytes"
        self.dtype = np.dtype(np.uint8)
        content = b"" if eos_token in (None, "none") else str(eos_token).encode()
        if len(content) > 1:
            raise ConfigError(f"the end of a document must be one byte, got {eos_token!r}, which is {len(content)}")
        self.eos_token_id = content[0] if content else None

    def encode(self, documents: Sequence[RawDocument]) -> list[TokenArray]:
        """The bytes of each document; of text, in UTF-8."""
        return [np.frombuffer(_to_bytes(document), dtype=np.uint8) for document in documents]


def _to_bytes(document: RawDocument) -> bytes:
    return document.encode() if isinstance(document, str) else document


def _is_text(document: RawDocument) -> bool:
    try:
        document.encode() if isinstance(document, str) else document.decode()
    except UnicodeError:
        return False
    return True


class _FastTokenizer:
    """A tokenizer of the package tokenizers."""

    def __init__(self, name: str, tokenizer: Any, *, eos_token_id: int | None) -> None:
        self.name, self._tokenizer, self.eos_token_id = name, tokenizer, eos_token_id
        self.dtype = np.dtype(np.min_scalar_type(max(tokenizer.get_vocab().values())))

    def encode(self, documents: Sequence[RawDocument]) -> list[TokenArray]:
        texts = [document if isinstance(document, str) else document.decode() for document in documents]
        found = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(each.ids, dtype=self.dtype) for each in found]


def load_tokenizer(name: str, *, eos_token: str | None = None) -> Tokenizer:
    """A tokenizer.

    Args:
        name: ``bytes``; a ``tokenizer.json``, or a folder that has one; or a name that transformers knows.
        eos_token: the token after each document; ``none`` for none; None: none of bytes, and otherwise what the tokenizer's own
            configuration has for the end of a text.

    Raises:
        ConfigError: there is no such tokenizer or token, or the package for it is not installed.
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
    except Exception as error:  # of the package's own classes
        raise ConfigError(f"{str(file)!r} is no tokenizer.json: {' '.join(str(error).split())}") from error
    return _FastTokenizer(
        name,
        tokenizer,
        eos_token_id=_eos_token_id(tokenizer, name, eos_token or _configured_eos_token(storage.resolve_path(file.parent))),
    )


def _load_from_transformers(name: str, eos_token: str | None) -> Tokenizer:
    transformers = _import_package("transformers")
    try:
        found = transformers.AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ConfigError(f"no tokenizer {name!r}: no such file or folder here, and {' '.join(str(error).split())}") from error
    tokenizer = getattr(found, "backend_tokenizer", None)
    if tokenizer is None:
        raise ConfigError(f"the tokenizer {name!r} has no tokenizer.json; save one with save_pretrained and name its folder")
    return _FastTokenizer(name, tokenizer, eos_token_id=_eos_token_id(tokenizer, name, eos_token or found.eos_token))


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
        raise ConfigError(f"the tokenizer {name!r} does not say what ends a text; name that token, or none")
    if (token := tokenizer.token_to_id(eos_token)) is None:
        raise ConfigError(f"the tokenizer {name!r} has no token {eos_token!r} to end documents with; name another one, or none")
    return int(token)


class TokenWindows:
    """Windows of ``window_size`` tokens, cut from documents that follow each other; what does not fill the last one is left out.

    Iterate over it once: ``{"tokens": [size]}``, numpy arrays of ``tokenizer.dtype``. ``documents``, ``tokens`` and ``leftover_tokens``
    count what has been read, and after the end what was left out.
    """

    def __init__(self, documents: Iterable[RawDocument], tokenizer: Tokenizer, window_size: int) -> None:
        self.documents = self.tokens = self.windows = 0
        self._source, self._tokenizer, self._size = iter(documents), tokenizer, window_size

    @property
    def leftover_tokens(self) -> int:
        """Tokens that have been read and are in no window yet."""
        return self.tokens - self.windows * self._size

    def __iter__(self) -> Iterator[dict[str, TokenArray]]:
        from dtrain.data.packing.token_stream import pack_tokens

        for block in pack_tokens(self._encode_all(), seq=self._size, last_block="drop"):
            self.windows += 1
            yield {"tokens": block["input_ids"].numpy().astype(self._tokenizer.dtype)}

    def _encode_batch(self, batch: list[RawDocument]) -> list[TokenArray]:
        try:
            return self._tokenizer.encode(batch)
        except (UnicodeError, TypeError) as error:  # halves of characters, which JSON can write
            for number, document in enumerate(batch, self.documents):
                if not _is_text(document):
                    raise DataError(f"document {number}: is no text that UTF-8 can hold") from error
            raise

    def _encode_all(self) -> Iterator[TokenArray]:
        end = self._tokenizer.eos_token_id
        while batch := list(islice(self._source, _TOKENIZER_BATCH)):
            for tokens in self._encode_batch(batch):
                whole = tokens if end is None else np.append(tokens, np.array(end, dtype=tokens.dtype))
                self.documents += 1
                self.tokens += len(whole)
                yield whole
