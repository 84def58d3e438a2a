"""Provide pairs of descriptions and code: summaries of docstrings of the standard library, and the functions.

Every machine that can run the examples has them. A pair is the first paragraph of a docstring, and the source of the function
without its docstring.
"""

import ast
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from helpers.docstrings import build_tokenizer

Sample = dict[str, Tensor]

LEFT_OUT = {"ensurepip", "idlelib", "lib2to3", "pydoc_data", "site-packages", "test", "tests", "tkinter", "turtledemo"}
MIN_CHARACTERS = 20  # of a summary
LINES = 12  # of code per function
HELD_OUT_EVERY = 10  # the tenth of every ten pairs is held out


def read_pairs() -> list[tuple[str, str]]:
    """Read all ``(summary, code)`` of the standard library in a fixed order, each summary and each code once."""
    root = Path(sysconfig.get_path("stdlib"))
    codes: dict[str, str] = {}
    for path in sorted(root.rglob("*.py")):
        if not LEFT_OUT & set(path.relative_to(root).parts):
            for summary, code in _pairs_in(path.read_text(errors="replace")):
                codes.setdefault(summary, code)
    summaries = {code: summary for summary, code in codes.items()}
    return [(summary, code) for code, summary in summaries.items()]


def _pairs_in(source: str) -> Iterator[tuple[str, str]]:
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or len(node.body) < 2:
            continue
        summary = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
        if len(summary) >= MIN_CHARACTERS:
            written = node.body[0]
            code = lines[node.lineno - 1 : written.lineno - 1] + lines[written.end_lineno : node.end_lineno]
            yield summary, "\n".join(code[:LINES])


def token_pairs(
    pairs: Sequence[tuple[str, str]], *, words: int = 4000, summary: int = 32, code: int = 64
) -> tuple[list[Sample], list[Sample], int]:
    """Return training samples, held-out samples, and the size of the vocabulary.

    A sample is ``{"summary": int64 [summary], "code": int64 [code], "id": int64 []}``: tokens, cut or padded with 0. The
    vocabulary comes from the training texts.
    """
    training = [text for number, pair in enumerate(pairs, 1) if number % HELD_OUT_EVERY for text in pair]
    tokenizer = build_tokenizer(training, words=words)
    tokens = [_encoded(tokenizer, [pair[side] for pair in pairs], length) for side, length in ((0, summary), (1, code))]
    samples = [
        {"summary": short, "code": long, "id": torch.tensor(index)}
        for index, (short, long) in enumerate(zip(*tokens, strict=True))
    ]
    held_out = samples[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    return [sample for number, sample in enumerate(samples, 1) if number % HELD_OUT_EVERY], held_out, tokenizer.get_vocab_size()


def _encoded(tokenizer: Tokenizer, texts: Sequence[str], length: int) -> Sequence[Tensor]:
    tokenizer.enable_truncation(length)
    tokenizer.enable_padding(length=length)
    return torch.tensor([encoding.ids for encoding in tokenizer.encode_batch(list(texts))]).unbind()


def word_overlap(training: Sequence[Sample], held_out: Sequence[Sample], vocab: int) -> float:
    """Return the share of held-out summaries whose own code is the nearest by the cosine of TF-IDF vectors: the baseline."""
    seen: Counter[int] = Counter()
    for sample in training:
        for side in ("summary", "code"):
            seen.update(set(sample[side].tolist()))
    rarity = torch.tensor([1.0 + 2 * len(training) for _ in range(vocab)]).log()
    rarity -= torch.tensor([1.0 + seen[token] for token in range(vocab)]).log()
    rarity[0] = 0.0  # padding

    def tf_idf(side: str) -> Tensor:
        counts = torch.stack([torch.bincount(sample[side], minlength=vocab) for sample in held_out])
        return torch.nn.functional.normalize(counts * rarity, dim=1)

    nearest = (tf_idf("summary") @ tf_idf("code").t()).argmax(1)
    return (nearest == torch.arange(len(held_out))).float().mean().item()
