"""Documents as windows of tokens: the tokens, their order, left-out remainders, and the choice of tokenizers."""

import json
import sys
from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtrain.data.token_stream import ByteTokenizer, TokenWindows, load_tokenizer
from dtrain.errors import ConfigError, DataError

VOCABULARY = {"<unk>": 0, "ab": 1, "c": 2, "<end>": 3, "rare": 70_000}


def tokens_of(windows):
    return [window["tokens"].tolist() for window in windows]


def test_windows_concatenate_the_documents_in_order():
    windows = TokenWindows(["abc", b"", "de\u00e9", b"\xff"], ByteTokenizer(eos_token="\n"), 4)
    assert tokens_of(windows) == [list(b"abc\n"), list(b"\nde\xc3"), list(b"\xa9\n\xff\n")]
    assert (windows.documents, windows.tokens, windows.leftover_tokens) == (4, 12, 0)


def test_tokens_after_the_last_window_are_dropped_and_counted():
    windows = TokenWindows([b"abcde", b"fg"], ByteTokenizer(), 4)
    assert tokens_of(windows) == [list(b"abcd")]
    assert (windows.documents, windows.tokens, windows.leftover_tokens) == (2, 7, 3)
    assert tokens_of(TokenWindows([], ByteTokenizer(), 4)) == []


@given(st.lists(st.binary(max_size=40), max_size=8), st.integers(1, 9), st.sampled_from([None, "\0"]))
def test_windows_contain_each_token_once_before_the_remainder(documents, size, end):
    windows = TokenWindows(documents, ByteTokenizer(eos_token=end), size)
    line = b"".join(document + (end or "").encode() for document in documents)
    tokens = tokens_of(windows)
    assert all(len(window) == size for window in tokens)
    assert bytes(chain.from_iterable(tokens)) == line[: len(line) // size * size]
    assert windows.leftover_tokens == len(line) % size


@pytest.fixture
def folder(tmp_path):
    """A tokenizer of whole words, as ``save_pretrained`` leaves it."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(VOCABULARY, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<end>"}}))
    return tmp_path


def test_folder_tokenizer_appends_its_configured_end_token(folder):
    tokenizer = load_tokenizer(str(folder))
    assert (tokenizer.eos_token_id, tokenizer.dtype) == (3, np.dtype(np.uint32))  # 70,000 does not fit into 16 bits
    assert tokens_of(TokenWindows(["ab c", "rare"], tokenizer, 5)) == [[1, 2, 3, 70_000, 3]]
    assert load_tokenizer(str(folder / "tokenizer.json"), eos_token="none").eos_token_id is None
    assert load_tokenizer(str(folder), eos_token="c").eos_token_id == 2


def test_tokenizer_without_an_end_token_requires_eos_token(folder):
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(ConfigError, match=r"has no end-of-text token in its configuration\. Name that token, or none"):
        load_tokenizer(str(folder))
    assert load_tokenizer(str(folder), eos_token="<end>").eos_token_id == 3


def test_invalid_tokenizers_are_refused_in_one_line(folder):
    with pytest.raises(ConfigError, match=r"has no token 'x' to end documents with\. Name another token, or none"):
        load_tokenizer(str(folder), eos_token="x")
    (folder / "broken.json").write_text("{")
    with pytest.raises(ConfigError, match=r"broken\.json' is not a tokenizer\.json: "):
        load_tokenizer(str(folder / "broken.json"))
    with pytest.raises(ConfigError, match=r"eos_token must be one byte, got 'ab', which has 2"):
        load_tokenizer("bytes", eos_token="ab")


def test_nonlocal_tokenizer_name_is_loaded_by_transformers(monkeypatch):
    def refuse(name):
        raise OSError(f"{name} is not a local folder\nand not a model identifier")

    package = SimpleNamespace(AutoTokenizer=SimpleNamespace(from_pretrained=refuse))  # the real one takes 10 s to import
    monkeypatch.setitem(sys.modules, "transformers", package)
    with pytest.raises(ConfigError, match=r"^tokenizer: 'nobody/nothing' does not exist as a file or folder: nobody/nothing"):
        load_tokenizer("nobody/nothing")


def test_smallest_dtype_that_holds_the_vocabulary_is_chosen():
    assert ByteTokenizer().dtype == np.uint8
    assert next(iter(TokenWindows([b"ab"], ByteTokenizer(), 2)))["tokens"].dtype == np.uint8


@pytest.mark.parametrize("name", ["bytes", "tokenizer.json"])
def test_non_text_document_error_names_the_document(name, folder):
    tokenizer = load_tokenizer("bytes" if name == "bytes" else str(folder))
    with pytest.raises(DataError, match=r"^document 2: text must be valid UTF-8\. Convert"):
        list(TokenWindows(["ab", "c", "\ud800"], tokenizer, 2))
