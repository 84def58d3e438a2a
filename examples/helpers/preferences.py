"""Provide preference pairs: functions of the standard library with their docstring (chosen) and without it (rejected).

A prompt is the bytes of a file up to the end of a function's first line. The chosen continuation is the text
of the file: a docstring and a part of the body. The rejected continuation is the same text without the docstring. All texts
have one length, so there is no padding, and no continuation is more probable because it is shorter.

Whole files are held out, so training text does not contain held-out functions, except for six of 784 docstrings that the
standard library has twice.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from tensordict import TensorDict
from torch import Tensor, nn

from helpers.text import stdlib_files

HELD_OUT_EVERY = 10  # the tenth of every ten files is held out

# The first line of a function, a docstring, and a line of the same indentation that begins the body.
_DOCUMENTED = re.compile(rb'^[ ]*(?:async )?def \w+\([^\n]*:\n(?P<doc>([ ]+)"""[^"\\]*"""\n\n?)(?=\2[^\s"])', re.M)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """Text for pre-training, and pairs of continuations of a prompt: ``{"chosen", "rejected"}``, int64 ``[count, length]``.

    Both rows of a pair begin with the same prompt.
    """

    text: Tensor  # uint8 [bytes]: all files that are not held out
    train: TensorDict
    held_out: TensorDict


def read_pairs(prompt: int, length: int, files: Iterable[Path] | None = None) -> Pairs:
    """Read the pairs in ``files`` (None: the standard library): ``prompt`` common bytes, ``length`` bytes in all."""
    paths = stdlib_files() if files is None else list(files)
    train: dict[bytes, None] = {}  # an ordered set
    held_out: dict[bytes, None] = {}
    text = bytearray()
    for number, path in enumerate(paths, 1):
        source = path.read_bytes()
        is_held_out = number % HELD_OUT_EVERY == 0
        text += b"" if is_held_out else source
        (held_out if is_held_out else train).update(dict.fromkeys(pairs_in(source, prompt, length)))
    held_out = {pair: None for pair in held_out if pair not in train}
    if not (train and held_out):
        raise ValueError(
            f"{len(paths)} files have {len(train)} pairs to train on and {len(held_out)} to test with; give more files"
        )
    return Pairs(text=torch.frombuffer(text, dtype=torch.uint8), train=_rows(train, length), held_out=_rows(held_out, length))


def pairs_in(source: bytes, prompt: int, length: int) -> list[bytes]:
    """Return the chosen and the rejected text of each documented function of a file, concatenated: ``2 * length`` bytes."""
    pairs = []
    for function in _DOCUMENTED.finditer(source):
        start = function.start("doc")
        shared = source[max(start - prompt, 0) : start]
        chosen, rejected = (shared + source[begin : begin + length - prompt] for begin in function.span("doc"))
        if len(chosen) == len(rejected) == length:
            pairs.append(chosen + rejected)
    return pairs


def log_probability(model: nn.Module, texts: Tensor, prompt: int) -> Tensor:
    """Return the log probability of texts after the first ``prompt`` bytes, in nats: int64 ``[texts, length] -> [texts]``."""
    logits = model(texts[:, :-1])[:, prompt - 1 :]
    return -F.cross_entropy(logits.transpose(1, 2), texts[:, prompt:], reduction="none").sum(1)


def _rows(pairs: Iterable[bytes], length: int) -> TensorDict:
    rows = torch.frombuffer(bytearray().join(pairs), dtype=torch.uint8).view(-1, 2, length).long()
    return TensorDict({"chosen": rows[:, 0], "rejected": rows[:, 1]}, batch_size=[len(rows)])
