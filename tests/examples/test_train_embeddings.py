"""The embedding example: on two processes it finds more than shared words do, and it resumes bit for bit."""

from __future__ import annotations

import shutil

import pytest
import torch

from dtrain.loggers.records import read_jsonl
from example_runs import Ending, ended, launched
from helpers import pairs


@pytest.mark.slow
@pytest.mark.parametrize(("until", "above"), [("48ba", 0.0), ("4ep", 0.05)], ids=["short", "longer"])
def test_training_on_two_processes_exceeds_the_word_overlap_baseline(tmp_path, until, above):
    ending = ended(launched("train_embeddings.py", "--until", until, "--microbatch", "32", out=tmp_path / "run"))
    assert ending.what == "right code first"
    assert 0.3 < ending.baseline < 0.6
    assert ending.value > ending.baseline + above


@pytest.mark.slow
def test_complete_run_ends_far_above_the_baseline(tmp_path):
    ending = ended(launched("train_embeddings.py", out=tmp_path / "run"))
    assert ending.value > ending.baseline + 0.1


@pytest.mark.slow
def test_resumed_run_has_the_same_numbers(tmp_path):
    def end() -> tuple[Ending, dict[int, float]]:
        printed = launched("train_embeddings.py", "--until", "40ba", out=tmp_path / "run")
        return ended(printed), {step: row["loss"] for step, row in read_jsonl(tmp_path / "run" / "metrics.jsonl").items()}

    whole = end()
    shutil.rmtree(max((tmp_path / "run" / "checkpoints").glob("step-*")))  # as if it had been killed after step 30
    assert list(whole[1]) == list(range(1, 41))
    assert end() == whole


@pytest.mark.slow
def test_microbatch_negatives_alone_lower_retrieval_accuracy(tmp_path):
    values = [
        ended(launched("train_embeddings.py", "--until", "4ep", *options, out=tmp_path / f"run{len(options)}")).value
        for options in ((), ("--without", "gather", "cache"))
    ]
    assert values[1] < values[0] - 0.02


SOURCE = '''
def short():
    """Too short."""
    return 1

class Thing:
    def undocumented(self):
        return 2

    def documented(self, x,
                   y):
        """Add two numbers and
        return the sum.

        Further words.
        """
        # why
        return x + y

    def empty(self):
        """Documented, but without any code of its own."""
'''


def test_pair_is_a_summary_and_its_code_without_docstring():
    assert list(pairs._pairs_in(SOURCE)) == [
        (
            "Add two numbers and return the sum.",
            "    def documented(self, x,\n                   y):\n        # why\n        return x + y",
        )
    ]


MADE = [(f"Return the {word} of a list", f"def {word}(x):\n    return {word}") for word in "abcdefghijklmnopqrst"]


def test_tokens_are_padded_and_every_tenth_pair_is_held_out():
    training, held_out, vocab = pairs.token_pairs(MADE, words=50, summary=9, code=12)
    assert [int(sample["id"]) for sample in held_out] == [9, 19]
    assert len(training) == 18
    assert {(len(sample["summary"]), len(sample["code"])) for sample in training + held_out} == {(9, 12)}
    assert training[0]["summary"][-1] == 0 != training[0]["summary"][0]
    assert max(int(sample["code"].max()) for sample in training + held_out) < vocab


def test_word_overlap_ranks_the_text_with_the_rare_word_first():
    def sample(summary: list[int], code: list[int]) -> dict:
        return {"summary": torch.tensor(summary), "code": torch.tensor(code)}

    training = [sample([1, 2, 0], [1, 2, 0])] * 9 + [sample([1, 3, 0], [1, 4, 0])]
    held_out = [sample([1, 2, 3], [1, 3, 0]), sample([1, 2, 4], [1, 2, 4]), sample([2, 2, 0], [4, 0, 0])]
    assert pairs.word_overlap(training, held_out, 5) == pytest.approx(2 / 3)
