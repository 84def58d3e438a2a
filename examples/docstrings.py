"""Text to classify: the docstrings of some packages of the running Python's standard library, labelled by package.

They are on every machine that can run the examples. Which package a docstring is from is often told by its subject, not by
a word of its own, so there is something to learn. The tokenizer is WordPiece, as BERT's; its vocabulary depends on nothing
but the text, so ranks and resumed runs have the same without exchanging it.
"""

import ast
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.processors import TemplateProcessing
from torch import Tensor

Sample = dict[str, Tensor]

PACKAGES = ("asyncio", "email", "http", "importlib", "logging", "multiprocessing", "unittest", "xml")
SHORTEST = 20  # characters; what is shorter says too little ("Return the value.")
HELD_OUT_EVERY = 5  # the fifth of every five texts is held out

_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")  # in BERT's own order, so that padding is 0
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def read_docstrings() -> tuple[list[str], list[int]]:
    """All docstrings of ``PACKAGES``, each text once, and the index of each one's package."""
    root = Path(sysconfig.get_path("stdlib"))
    label_of: dict[str, int] = {}
    for label, package in enumerate(PACKAGES):
        for path in sorted((root / package).rglob("*.py")):
            for text in _docstrings_in(path):
                label_of.setdefault(text, label)
    return list(label_of), list(label_of.values())


def _docstrings_in(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_bytes())):
        text = ast.get_docstring(node) if isinstance(node, _DOCUMENTED) else None
        if text is not None and len(text) >= SHORTEST:
            yield text


def build_tokenizer(texts: Sequence[str], *, words: int = 3000) -> Tokenizer:
    """A WordPiece tokenizer: the most frequent words of the texts are whole, others are spelt.

    Its vocabulary is a pure function of the texts, unlike that of the trainer in ``tokenizers``, which differs between runs.
    """
    tokenizer = Tokenizer(WordPiece({}, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = BertNormalizer(lowercase=True), BertPreTokenizer()
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(tokenizer.normalizer.normalize_str(text)))
    letters = sorted(set("".join(counts)))
    frequent = sorted(counts, key=lambda word: (-counts[word], word))[:words]
    pieces = dict.fromkeys([*_SPECIAL, *letters, *(f"##{letter}" for letter in letters), *frequent])
    vocab = {piece: index for index, piece in enumerate(pieces)}
    tokenizer.model = WordPiece(vocab, unk_token="[UNK]")
    special = [(name, vocab[name]) for name in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=special)
    return tokenizer


def train_and_held_out(
    texts: Sequence[str], labels: Sequence[int], tokenizer: Tokenizer, seq: int
) -> tuple[list[Sample], list[Sample]]:
    """Samples ``{"input_ids": int64 [seq], "attention_mask": int64 [seq], "labels": int64 []}`` to train on, and to test with.

    Texts are cut and padded to ``seq`` tokens; the attention mask is 0 on padding.
    """
    tokenizer.enable_truncation(seq)
    tokenizer.enable_padding(length=seq)
    samples = [
        {"input_ids": torch.tensor(e.ids), "attention_mask": torch.tensor(e.attention_mask), "labels": torch.tensor(label)}
        for e, label in zip(tokenizer.encode_batch(list(texts)), labels, strict=True)
    ]
    held_out = samples[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    return [sample for at, sample in enumerate(samples, 1) if at % HELD_OUT_EVERY], held_out
