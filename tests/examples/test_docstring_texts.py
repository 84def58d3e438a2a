"""The texts of the BERT example: real, labelled, each once, and tokens that are the same in every process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from docstrings import HELD_OUT_EVERY, PACKAGES, SHORTEST, build_tokenizer, read_docstrings, train_and_held_out

EXAMPLES = Path(__file__).parents[2] / "examples"
VOCABULARY = """
import hashlib, json, docstrings
tokenizer = docstrings.build_tokenizer(docstrings.read_docstrings()[0])
print(hashlib.sha256(json.dumps(tokenizer.get_vocab(), sort_keys=True).encode()).hexdigest())
"""


@pytest.fixture(scope="module")
def found() -> tuple[list[str], list[int]]:
    return read_docstrings()


def test_every_package_has_texts_and_no_text_comes_twice(found):
    texts, labels = found
    assert set(labels) == set(range(len(PACKAGES)))
    assert len(set(texts)) == len(texts) == len(labels) > 1000
    assert min(map(len, texts)) >= SHORTEST
    largest = max(labels.count(label) for label in set(labels))
    assert largest < 0.3 * len(labels), "naming the most frequent package is no answer"


def test_the_vocabulary_is_the_same_in_every_process(found):
    """With another order of hashes in each."""
    running = []
    for seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(EXAMPLES)}
        command = [sys.executable, "-c", VOCABULARY]
        running.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env))
    try:
        ends = [process.communicate(timeout=300) for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, 0], ends
    assert len({out for out, _ in ends}) == 1


def test_frequent_words_are_whole_and_others_are_spelt():
    tokenizer = build_tokenizer(["the cat sat", "the cat", "The dog"], words=2)
    assert tokenizer.encode("the dog CAT!").tokens == ["[CLS]", "the", "d", "##o", "##g", "cat", "[UNK]", "[SEP]"]
    assert [tokenizer.token_to_id(name) for name in ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")] == [0, 1, 2, 3, 4]
    ids = sorted(tokenizer.get_vocab().values())
    assert ids == list(range(len(ids)))


def test_samples_are_cut_and_padded_and_every_fifth_is_held_out():
    texts, labels = [f"word {'more ' * at}" for at in range(10)], list(range(10))
    train, held_out = train_and_held_out(texts, labels, build_tokenizer(texts), 6)
    assert [int(sample["labels"]) for sample in held_out] == [4, 9]
    assert sorted(int(sample["labels"]) for sample in [*train, *held_out]) == labels
    assert HELD_OUT_EVERY == 5
    for sample in [*train, *held_out]:
        assert {name: (tuple(t.shape), t.dtype) for name, t in sample.items()} == {
            "input_ids": ((6,), torch.int64),
            "attention_mask": ((6,), torch.int64),
            "labels": ((), torch.int64),
        }
        assert torch.equal(sample["attention_mask"], (sample["input_ids"] != 0).long())
        assert int(sample["attention_mask"].sum()) == min(6, 3 + int(sample["labels"]))
