"""Pairs of texts of which one is preferred: functions of the standard library with their docstring, and without it.

A prompt is the bytes of a file up to the end of a function's first line. The chosen continuation is what the file says next: a
docstring, and some of the body. The rejected one is what is left when the docstring is taken out: code as good, without a word.
All are cut at one length, so nothing is padded, and neither continuation is likelier because it is shorter.

Whole files are held out. So a held-out function is in no text that a model is trained on here, but for those that the standard
library has twice: of 784 held-out docstrings, six.
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
    """Text to read first, and pairs of what may follow a prompt: ``{"chosen", "rejected"}``, each int64 ``[count, length]``.

    A row begins with its prompt, which the rows of a pair share.
    """

    text: Tensor  # uint8 [bytes]: all files that are not held out
    train: TensorDict
    held_out: TensorDict


def read_pairs(prompt: int, length: int, files: Iterable[Path] | None = None) -> Pairs:
    """The pairs in ``files`` (None: the standard library): ``prompt`` bytes that they share, then up to ``length`` in all."""
    paths = stdlib_files() if files is None else list(files)
    seen: dict[bytes, None] = {}  # as a set that keeps its order
    unseen: dict[bytes, None] = {}
    text = bytearray()
    for at, path in enumerate(paths, 1):
        source = path.read_bytes()
        held = at % HELD_OUT_EVERY == 0
        text += b"" if held else source
        (unseen if held else seen).update(dict.fromkeys(pairs_in(source, prompt, length)))
    unseen = {pair: None for pair in unseen if pair not in seen}
    if not (seen and unseen):
        raise ValueError(
            f"{len(paths)} files have {len(seen)} pairs to train on and {len(unseen)} to test with; give more files"
        )
    return Pairs(text=torch.frombuffer(text, dtype=torch.uint8), train=_rows(seen, length), held_out=_rows(unseen, length))


def pairs_in(source: bytes, prompt: int, length: int) -> list[bytes]:
    """The chosen and the rejected text of each documented function of a file, one after the other: ``2 * length`` bytes."""
    found = []
    for function in _DOCUMENTED.finditer(source):
        start = function.start("doc")
        shared = source[max(start - prompt, 0) : start]
        chosen, rejected = (shared + source[at : at + length - prompt] for at in function.span("doc"))
        if len(chosen) == len(rejected) == length:
            found.append(chosen + rejected)
    return found


def log_probability(model: nn.Module, texts: Tensor, prompt: int) -> Tensor:
    """Return the log probability of texts after the first ``prompt`` bytes, in nats: int64 ``[texts, length] -> [texts]``."""
    logits = model(texts[:, :-1])[:, prompt - 1 :]
    return -F.cross_entropy(logits.transpose(1, 2), texts[:, prompt:], reduction="none").sum(1)


def _rows(pairs: Iterable[bytes], length: int) -> TensorDict:
    rows = torch.frombuffer(bytearray().join(pairs), dtype=torch.uint8).view(-1, 2, length).long()
    return TensorDict({"chosen": rows[:, 0], "rejected": rows[:, 1]}, batch_size=[len(rows)])
