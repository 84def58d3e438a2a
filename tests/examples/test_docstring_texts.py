"""The texts of the BERT example: real, labelled, each once, and tokens that are the same in every process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.docstrings import MIN_CHARACTERS, PACKAGES, build_tokenizer, read_docstrings
from helpers.labelled_text import Labelled

EXAMPLES = Path(__file__).parents[2] / "examples"
VOCABULARY = """
import json
from helpers import docstrings
print(json.dumps(docstrings.build_tokenizer(docstrings.read_docstrings().texts).get_vocab()))
"""


@pytest.fixture(scope="module")
def rows() -> Labelled:
    return read_docstrings()


def test_every_package_has_texts_without_duplicates(rows):
    texts, labels = rows.texts, rows.labels
    assert tuple(rows.names) == PACKAGES
    assert set(labels) == set(range(len(PACKAGES)))
    assert len(set(texts)) == len(texts) == len(labels) > 1000
    assert min(map(len, texts)) >= MIN_CHARACTERS
    largest = max(labels.count(label) for label in set(labels))
    assert largest < 0.3 * len(labels), "naming the most frequent package is no answer"


def test_the_vocabulary_is_the_same_in_every_process(rows):
    """This process and the other process have different orders of hashes."""
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(EXAMPLES)}
    other = subprocess.run([sys.executable, "-c", VOCABULARY], capture_output=True, text=True, env=env, timeout=300)
    assert other.returncode == 0, other.stderr
    assert json.loads(other.stdout) == build_tokenizer(rows.texts).get_vocab()


def test_frequent_words_are_single_tokens_and_rare_words_are_split():
    tokenizer = build_tokenizer(["the cat sat", "the cat", "The dog"], words=2)
    assert tokenizer.encode("the dog CAT!").tokens == ["[CLS]", "the", "d", "##o", "##g", "cat", "[UNK]", "[SEP]"]
    assert [tokenizer.token_to_id(name) for name in ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")] == [0, 1, 2, 3, 4]
    ids = sorted(tokenizer.get_vocab().values())
    assert ids == list(range(len(ids)))
