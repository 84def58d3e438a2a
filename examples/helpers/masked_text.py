"""Text to fill gaps in: the documentation that comes with Python, cut into blocks of tokens, some of them masked.

The documents are the topics of ``help()`` (chapters of the language reference) and what the standard library's source code has
between triple quotes, mostly docstrings. They are on every machine that can run the examples.
"""

import re
from collections.abc import Sequence
from functools import partial
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import Dataset

import dtrain as dt
from helpers.docstrings import build_tokenizer
from helpers.text import stdlib_files

Sample = dict[str, Tensor]

SHORTEST = 40  # characters; what is shorter leaves nothing to guess a word from
WORDS = 2000  # that the tokenizer knows whole; the others are spelt
HELD_OUT_EVERY = 16  # the last of every 16 documents is held out
MASKED_SHARE = 0.15  # of all tokens, as in Devlin et al. 2018, arXiv:1810.04805, section 3.1
IGNORED = -100  # the label of what is not to be guessed; no loss counts it

_BETWEEN_TRIPLE_QUOTES = re.compile(r'"""(.+?)"""', re.DOTALL)


class Corpus(NamedTuple):
    """Documents as token ids, with the tokenizer that made them."""

    tokenizer: Tokenizer
    train: list[list[int]]
    held_out: list[list[int]]

    def log_frequency(self) -> Tensor:
        """Return the log frequency of each token among masked tokens, float32 ``[words]``: the first guess without context."""
        counts = torch.bincount(torch.tensor([token for ids in self.train for token in ids]), minlength=self.words)
        counts[: self.mask + 1] = 0
        return torch.log((counts + 0.1) / counts.sum())

    @property
    def words(self) -> int:
        return self.tokenizer.get_vocab_size()

    @property
    def mask(self) -> int:
        """``[MASK]``, the last of the special tokens, which are the first of all."""
        return self.tokenizer.token_to_id("[MASK]")


def read_documents() -> list[str]:
    """Every text once, the same on every machine with this Python. Tests are left out: not every installation has them."""
    found = dict.fromkeys(topics.values())
    for path in stdlib_files():
        if "test" in path.parts or "tests" in path.parts or "pydoc_data" in path.parts:
            continue
        for text in _BETWEEN_TRIPLE_QUOTES.findall(path.read_text(errors="replace")):
            if len(text.strip()) >= SHORTEST:
                found[text.strip()] = None
    return list(found)


def read_corpus() -> Corpus:
    """The documents, each as ``[CLS]``, its tokens, ``[SEP]``. What is held out is not in training, in other letters either."""
    texts = read_documents()
    tokenizer = build_tokenizer(texts, words=WORDS)
    documents = [encoded.ids for encoded in tokenizer.encode_batch_fast(texts)]
    held_out = documents[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    train = [ids for at, ids in enumerate(documents, 1) if at % HELD_OUT_EVERY and ids not in held_out]
    return Corpus(tokenizer, train, held_out)


def packed(documents: Sequence[Sequence[int]], seq: int) -> dt.data.PackedTokens:
    """Blocks of ``seq`` tokens without a gap; a document may go over several of them."""
    return dt.data.PackedTokens(documents, seq=seq, lengths=[len(ids) for ids in documents])


def padded(documents: Sequence[Sequence[int]], seq: int) -> list[Sample]:
    """The same tokens and the same layout of a sample, but each document begins a block of its own, filled up with padding."""
    pieces = [ids[at : at + seq] for ids in documents for at in range(0, len(ids), seq)]
    made = dt.data.PackedTokens([[*ids, *[0] * (seq - len(ids))] for ids in pieces], seq=seq, lengths=[seq] * len(pieces))
    blocks = made.__getitems__(range(len(pieces)))
    for block, ids in zip(blocks, pieces, strict=True):
        block["documents"][len(ids) :] = -1
    return blocks


class Masking:
    """Draws what is to be guessed: ``transform=`` of a loader, which calls it with a generator for each sample.

    Of all tokens but the special ones it chooses ``MASKED_SHARE``; 80% of these become ``[MASK]``, 10% any token, and 10% stay.
    Their ``labels`` are what they were, all others are ``IGNORED``.
    """

    def __init__(self, corpus: Corpus) -> None:
        self.words, self.mask = corpus.words, corpus.mask

    def __call__(self, sample: Sample, generator: torch.Generator) -> Sample:
        """A sample with other ``input_ids`` and ``labels`` (int64 ``[seq]`` both)."""
        ids = sample["input_ids"]
        chosen, fate = torch.rand(2, len(ids), generator=generator)
        anything = torch.randint(self.mask + 1, self.words, ids.shape, generator=generator)
        guess = (chosen < MASKED_SHARE) & (ids > self.mask)
        shown = torch.where(guess & (fate < 0.8), self.mask, torch.where(guess & (fate >= 0.9), anything, ids))
        return {**sample, "input_ids": shown, "labels": torch.where(guess, ids, IGNORED)}


class MaskedOnce(Dataset[Sample]):
    """Samples whose gaps are always the same ones: for a figure that can be compared between runs."""

    def __init__(self, samples: Any, masking: Masking) -> None:
        draw = partial(masking, generator=torch.Generator().manual_seed(0))
        self.samples = [draw(samples[index]) for index in range(len(samples))]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:
        return self.samples[index]

    def counts(self) -> Tensor:
        """Count how often each token is to be guessed, int64 ``[words at most]``."""
        labels = torch.cat([sample["labels"] for sample in self.samples])
        return torch.bincount(labels[labels != IGNORED])

    def entropy(self) -> float:
        """Return the entropy of the tokens to be guessed, in nats: the lowest mean loss of a guess that ignores the context."""
        counts = self.counts()
        return torch.special.entr(counts.double() / counts.sum()).sum().item()
