"""The English of the package: figures that a change may not make worse.

A summary names an object or an action. A question word at its start, and "what" or "it" in place of a noun, are hard to read.
"""

import ast
import re
from pathlib import Path

import dtrain

SOURCE = Path(dtrain.__file__).parent
QUESTION = re.compile(r"(What|Whether|Where|Who|Whose|Which|How|When|Why)\b")
MOST_PER_1000 = {"what": 1.0, "it": 5.0}
MOST_QUESTIONS = 0.01


def docstrings(source: str) -> list[str]:
    """Return the docstrings of a module, its classes and its functions."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    return [text for node in ast.walk(ast.parse(source)) if isinstance(node, kinds) and (text := ast.get_docstring(node))]


def share_of_questions(texts: list[str]) -> float:
    return sum(bool(QUESTION.match(text)) for text in texts) / len(texts)


def per_1000_words(word: str, texts: list[str]) -> float:
    words = re.findall(r"\w+", " ".join(texts).lower())
    return 1000 * words.count(word) / len(words)


PACKAGE = [text for path in sorted(SOURCE.rglob("*.py")) for text in docstrings(path.read_text())]


def test_summaries_do_not_begin_with_a_question_word():
    asking = [text.split("\n")[0] for text in PACKAGE if QUESTION.match(text)]
    assert share_of_questions(PACKAGE) <= MOST_QUESTIONS, asking


def test_pronoun_frequency_stays_below_the_limit():
    found = {word: round(per_1000_words(word, PACKAGE), 2) for word in MOST_PER_1000}
    assert {word: n for word, n in found.items() if n > MOST_PER_1000[word]} == {}


def test_language_statistics_match_a_known_text():
    texts = docstrings('"""What it is."""\ndef f():\n    """Return it."""\nx = """it"""\n')
    assert texts == ["What it is.", "Return it."]
    assert share_of_questions(texts) == 0.5
    assert per_1000_words("it", texts) == 400.0


# ---- pages -------------------------------------------------------------------------------------------------------------------

DOCS = Path(__file__).parents[1] / "docs"
LEAST_EXAMPLES = {"first pages": 3.0, "user pages": 2.5}
LEAST_ON_A_PAGE = 2.0
FIRST_PAGES = [
    "index",
    "quickstart",
    "loop",
    "concepts",
    "sharding",
    "checkpoints",
    "microbatch",
    "memory",
    "precision",
    "data",
    "launch",
    "observing",
]
EXAMPLE = re.compile(r"\b(for example|for instance|such as|e\.g\.)", re.I)


def prose(page: str) -> str:
    """Return the text of a page outside of fenced code and comments."""
    return re.sub(r"^ *```.*?^ *```|<!--.*?-->", "", page, flags=re.S | re.M)


def examples_per_1000_words(pages: list[str]) -> float:
    text = " ".join(map(prose, pages))
    return 1000 * len(EXAMPLE.findall(text)) / len(re.findall(r"[A-Za-z']+", text))


def user_pages() -> dict[str, str]:
    """Return the pages before the section of evidence that are written by hand, by name. The page of names is made."""
    nav = (DOCS.parent / "mkdocs.yml").read_text().split("\nnav:\n")[1].split("  - Evidence:\n")[0]
    named = [name for name in re.findall(r"([\w-]+\.md)$", nav, re.M) if (DOCS / name).exists() and name != "names.md"]
    return {name: (DOCS / name).read_text() for name in named}


def test_pages_give_enough_examples():
    first = [(DOCS / f"{name}.md").read_text() for name in FIRST_PAGES]
    pages = {"first pages": first, "user pages": list(user_pages().values())}
    found = {name: round(examples_per_1000_words(texts), 2) for name, texts in pages.items()}
    assert {name: n for name, n in found.items() if n < LEAST_EXAMPLES[name]} == {}


def test_every_user_page_gives_examples():
    found = {name: round(examples_per_1000_words([text]), 2) for name, text in user_pages().items()}
    assert {name: n for name, n in found.items() if n < LEAST_ON_A_PAGE} == {}


def test_example_count_leaves_out_code_and_comments():
    page = "For example, two words.\n```text\nsuch as this\n```\n<!-- e.g. that -->\n"
    assert examples_per_1000_words([page]) == 250.0
