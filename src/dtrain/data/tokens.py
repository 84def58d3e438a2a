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
from dtrain.extras import missing
from dtrain.storage import Place

Document = str | bytes
Tokens = NDArray[np.unsignedinteger[Any]]

_BATCH = 256  # documents that a tokenizer gets at once, for its threads
_LARGEST_FILE = 2**28


class Tokenizer(Protocol):
    """What makes tokens of documents."""

    name: str
    end: int | None
    dtype: np.dtype[np.unsignedinteger[Any]]
    """The smallest one that has room for every token."""

    def encode(self, documents: Sequence[Document]) -> list[Tokens]:
        """The tokens of each document, without ``end``."""


class ByteTokenizer:
    """Every byte is a token."""

    def __init__(self, *, end: str | None = None) -> None:
        self.name = "bytes"
        self.dtype = np.dtype(np.uint8)
        content = b"" if end in (None, "none") else str(end).encode()
        if len(content) > 1:
            raise ConfigError(f"the end of a document must be one byte, got {end!r}, which is {len(content)}")
        self.end = content[0] if content else None

    def encode(self, documents: Sequence[Document]) -> list[Tokens]:
        """The bytes of each document; of text, in UTF-8."""
        return [np.frombuffer(_bytes(document), dtype=np.uint8) for document in documents]


def _bytes(document: Document) -> bytes:
    return document.encode() if isinstance(document, str) else document


def _is_text(document: Document) -> bool:
    try:
        document.encode() if isinstance(document, str) else document.decode()
    except UnicodeError:
        return False
    return True


class _Fast:
    """A tokenizer of the package tokenizers."""

    def __init__(self, name: str, tokenizer: Any, *, end: int | None) -> None:
        self.name, self._tokenizer, self.end = name, tokenizer, end
        self.dtype = np.dtype(np.min_scalar_type(max(tokenizer.get_vocab().values())))

    def encode(self, documents: Sequence[Document]) -> list[Tokens]:
        texts = [document if isinstance(document, str) else document.decode() for document in documents]
        found = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(each.ids, dtype=self.dtype) for each in found]


def tokenizer_named(name: str, *, end: str | None = None) -> Tokenizer:
    """A tokenizer.

    Args:
        name: ``bytes``; a ``tokenizer.json``, or a folder that has one; or a name that transformers knows.
        end: the token after each document; ``none`` for none; None: none of bytes, and otherwise what the tokenizer's own
            configuration has for the end of a text.

    Raises:
        ConfigError: there is no such tokenizer or token, or the package for it is not installed.
    """
    if name == "bytes":
        return ByteTokenizer(end=end)
    path = Path(name)
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        return _from_transformers(name, end)
    tokenizers = _package("tokenizers")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # of the package's own classes
        raise ConfigError(f"{str(file)!r} is no tokenizer.json: {' '.join(str(error).split())}") from error
    return _Fast(name, tokenizer, end=_end(tokenizer, name, end or _configured_end(storage.place(file.parent))))


def _from_transformers(name: str, end: str | None) -> Tokenizer:
    transformers = _package("transformers")
    try:
        found = transformers.AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ConfigError(f"no tokenizer {name!r}: no such file or folder here, and {' '.join(str(error).split())}") from error
    tokenizer = getattr(found, "backend_tokenizer", None)
    if tokenizer is None:
        raise ConfigError(f"the tokenizer {name!r} has no tokenizer.json; save one with save_pretrained and name its folder")
    return _Fast(name, tokenizer, end=_end(tokenizer, name, end or found.eos_token))


def _package(name: str) -> Any:
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError:
        raise missing(f"tokenizers need the package {name}", "hf") from None


def _configured_end(folder: Place) -> str | None:
    file = folder / "tokenizer_config.json"
    if storage.file_size(file) is None:
        return None
    try:
        token = json.loads(storage.read_file(file, limit=_LARGEST_FILE))["eos_token"]
    except (KeyError, TypeError, ValueError):
        return None
    return token.get("content") if isinstance(token, dict) else token


def _end(tokenizer: Any, name: str, end: str | None) -> int | None:
    if end == "none":
        return None
    if end is None:
        raise ConfigError(f"the tokenizer {name!r} does not say what ends a text; name that token, or none")
    if (token := tokenizer.token_to_id(end)) is None:
        raise ConfigError(f"the tokenizer {name!r} has no token {end!r} to end documents with; name another one, or none")
    return int(token)


class Windows:
    """Windows of ``size`` tokens, cut from documents that follow each other; what does not fill the last one is left out.

    Iterate over it once: ``{"tokens": [size]}``, numpy arrays of ``tokenizer.dtype``. ``documents``, ``tokens`` and ``rest``
    count what has been read, and after the end what was left out.
    """

    def __init__(self, documents: Iterable[Document], tokenizer: Tokenizer, size: int) -> None:
        self.documents = self.tokens = self.windows = 0
        self._source, self._tokenizer, self._size = iter(documents), tokenizer, size

    @property
    def rest(self) -> int:
        """Tokens that have been read and are in no window yet."""
        return self.tokens - self.windows * self._size

    def __iter__(self) -> Iterator[dict[str, Tokens]]:
        from dtrain.data.packing.stream import pack_tokens

        for block in pack_tokens(self._encoded(), seq=self._size, tail="drop"):
            self.windows += 1
            yield {"tokens": block["input_ids"].numpy().astype(self._tokenizer.dtype)}

    def _encode(self, batch: list[Document]) -> list[Tokens]:
        try:
            return self._tokenizer.encode(batch)
        except (UnicodeError, TypeError) as error:  # halves of characters, which JSON can write
            for number, document in enumerate(batch, self.documents):
                if not _is_text(document):
                    raise DataError(f"document {number}: is no text that UTF-8 can hold") from error
            raise

    def _encoded(self) -> Iterator[Tokens]:
        end = self._tokenizer.end
        while batch := list(islice(self._source, _BATCH)):
            for tokens in self._encode(batch):
                whole = tokens if end is None else np.append(tokens, np.array(end, dtype=tokens.dtype))
                self.documents += 1
                self.tokens += len(whole)
                yield whole
