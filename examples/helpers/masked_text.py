"""Provide masked text: the documentation that comes with Python, in blocks of tokens of which some are masked.

The documents are the topics of ``help()`` (chapters of the language reference) and the triple-quoted strings of the standard
library, mostly docstrings. Every machine that can run the examples has them.
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

MIN_CHARACTERS = 40  # shorter texts have too little context
WORDS = 2000  # whole words in the vocabulary
HELD_OUT_EVERY = 16  # the last of every 16 documents is held out
MASKED_SHARE = 0.15  # of all tokens, as in Devlin et al. 2018, arXiv:1810.04805, section 3.1
IGNORED = -100  # the label of tokens without a loss

_BETWEEN_TRIPLE_QUOTES = re.compile(r'"""(.+?)"""', re.DOTALL)


class Corpus(NamedTuple):
    """Documents as token ids, with their tokenizer."""

    tokenizer: Tokenizer
    train: list[list[int]]
    held_out: list[list[int]]

    def log_frequency(self) -> Tensor:
        """Return the log frequency of each token among masked tokens, float32 ``[words]``."""
        counts = torch.bincount(torch.tensor([token for ids in self.train for token in ids]), minlength=self.words)
        counts[: self.mask + 1] = 0
        return torch.log((counts + 0.1) / counts.sum())

    @property
    def words(self) -> int:
        return self.tokenizer.get_vocab_size()

    @property
    def mask(self) -> int:
        """Return the id of ``[MASK]``, the last special token. Special tokens have the lowest ids."""
        return self.tokenizer.token_to_id("[MASK]")


def read_documents() -> list[str]:
    """Read each text once, in the same order on every machine with this Python. Some installations lack tests, so skip them."""
    texts = dict.fromkeys(topics.values())
    for path in stdlib_files():
        if "test" in path.parts or "tests" in path.parts or "pydoc_data" in path.parts:
            continue
        for text in _BETWEEN_TRIPLE_QUOTES.findall(path.read_text(errors="replace")):
            if len(text.strip()) >= MIN_CHARACTERS:
                texts[text.strip()] = None
    return list(texts)


def read_corpus() -> Corpus:
    """Read the documents, each as ``[CLS]``, its tokens, ``[SEP]``. Training documents equal to a held-out one are left out."""
    texts = read_documents()
    tokenizer = build_tokenizer(texts, words=WORDS)
    documents = [encoded.ids for encoded in tokenizer.encode_batch_fast(texts)]
    held_out = documents[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    train = [ids for number, ids in enumerate(documents, 1) if number % HELD_OUT_EVERY and ids not in held_out]
    return Corpus(tokenizer, train, held_out)


def packed(documents: Sequence[Sequence[int]], seq: int) -> dt.data.PackedTokens:
    """Pack documents into blocks of ``seq`` tokens. A document may continue in the next block."""
    return dt.data.PackedTokens(documents, seq=seq, lengths=[len(ids) for ids in documents])


def padded(documents: Sequence[Sequence[int]], seq: int) -> list[Sample]:
    """Return blocks like ``packed`` does, but start each document in a new block, and pad the rest of its last block."""
    pieces = [ids[start : start + seq] for ids in documents for start in range(0, len(ids), seq)]
    packed_blocks = dt.data.PackedTokens(
        [[*ids, *[0] * (seq - len(ids))] for ids in pieces], seq=seq, lengths=[seq] * len(pieces)
    )
    blocks = packed_blocks.__getitems__(range(len(pieces)))
    for block, ids in zip(blocks, pieces, strict=True):
        block["documents"][len(ids) :] = -1
    return blocks


class Masking:
    """Mask tokens: the ``transform=`` of a loader, which calls it with a generator for each sample.

    ``MASKED_SHARE`` of the tokens that are not special are chosen; 80% of them become ``[MASK]``, 10% a random token, and 10%
    stay. The ``labels`` of chosen tokens are the original tokens, all other labels are ``IGNORED``.
    """

    def __init__(self, corpus: Corpus) -> None:
        self.words, self.mask = corpus.words, corpus.mask

    def __call__(self, sample: Sample, generator: torch.Generator) -> Sample:
        """Return the sample with masked ``input_ids`` and ``labels``, both int64 ``[seq]``."""
        ids = sample["input_ids"]
        chosen, action = torch.rand(2, len(ids), generator=generator)
        random_tokens = torch.randint(self.mask + 1, self.words, ids.shape, generator=generator)
        is_chosen = (chosen < MASKED_SHARE) & (ids > self.mask)
        masked = torch.where(
            is_chosen & (action < 0.8), self.mask, torch.where(is_chosen & (action >= 0.9), random_tokens, ids)
        )
        return {**sample, "input_ids": masked, "labels": torch.where(is_chosen, ids, IGNORED)}


class MaskedOnce(Dataset[Sample]):
    """Samples with fixed masks, so that metrics of different runs are comparable."""

    def __init__(self, samples: Any, masking: Masking) -> None:
        draw = partial(masking, generator=torch.Generator().manual_seed(0))
        self.samples = [draw(samples[index]) for index in range(len(samples))]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:
        return self.samples[index]

    def counts(self) -> Tensor:
        """Count each masked token: int64, at most ``[words]``."""
        labels = torch.cat([sample["labels"] for sample in self.samples])
        return torch.bincount(labels[labels != IGNORED])

    def entropy(self) -> float:
        """Return the entropy of the masked tokens in nats: the lowest mean loss of a prediction without context."""
        counts = self.counts()
        return torch.special.entr(counts.double() / counts.sum()).sum().item()
