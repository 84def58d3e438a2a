"""``load_tokenizer``: load a tokenizer by name; ``TokenWindows``: cut tokenized documents into windows of equal length."""

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
from dtrain.packages import missing_extra_error
from dtrain.storage import AnyPath

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
            f"tokenizer: {str(file)!r} is not a tokenizer.json: {' '.join(str(error).split()).rstrip('.')}. "
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
            f"tokenizer: {name!r} does not exist as a file or folder: {' '.join(str(error).split()).rstrip('.')}. "
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
        from dtrain.data.packing.token_stream import pack_tokens

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
