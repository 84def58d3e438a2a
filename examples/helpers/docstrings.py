"""Provide text to classify: docstrings of some packages of the standard library, labelled by package.

Every machine that can run the examples has them. The tokenizer is WordPiece, as in BERT. Its vocabulary is a function of the
text, so all ranks and resumed runs have the same tokenizer without communication.
"""

import ast
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.processors import TemplateProcessing

from helpers.labelled_text import Labelled

PACKAGES = ("asyncio", "email", "http", "importlib", "logging", "multiprocessing", "unittest", "xml")
MIN_CHARACTERS = 20

_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")  # in the order of BERT: padding is 0
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def read_docstrings() -> Labelled:
    """Read all docstrings of ``PACKAGES``, each text once, labelled by package."""
    root = Path(sysconfig.get_path("stdlib"))
    label_of: dict[str, int] = {}
    for label, package in enumerate(PACKAGES):
        for path in sorted((root / package).rglob("*.py")):
            for text in _docstrings_in(path):
                label_of.setdefault(text, label)
    return Labelled(texts=list(label_of), labels=list(label_of.values()), names=PACKAGES)


def _docstrings_in(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_bytes())):
        text = ast.get_docstring(node) if isinstance(node, _DOCUMENTED) else None
        if text is not None and len(text) >= MIN_CHARACTERS:
            yield text


def build_tokenizer(texts: Sequence[str], *, words: int = 3000) -> Tokenizer:
    """Build a WordPiece tokenizer with the most frequent words of the texts, and all letters.

    The vocabulary is a pure function of the texts. The trainer of ``tokenizers`` returns different ones in different runs.
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
