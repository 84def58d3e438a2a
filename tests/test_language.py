"""The English of the package: a summary names an object or an action, so it does not begin with a question word."""

import ast
import re
from pathlib import Path

import dtrain

SOURCE = Path(dtrain.__file__).parent
QUESTION = re.compile(r"(What|Whether|Where|Who|Whose|Which|How|When|Why)\b")
MOST_QUESTIONS = 0.01


def docstrings(source: str) -> list[str]:
    """Return the docstrings of a module, its classes and its functions."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    return [text for node in ast.walk(ast.parse(source)) if isinstance(node, kinds) and (text := ast.get_docstring(node))]


def share_of_questions(texts: list[str]) -> float:
    return sum(bool(QUESTION.match(text)) for text in texts) / len(texts)


PACKAGE = [text for path in sorted(SOURCE.rglob("*.py")) for text in docstrings(path.read_text())]


def test_summaries_do_not_begin_with_a_question_word():
    asking = [text.split("\n")[0] for text in PACKAGE if QUESTION.match(text)]
    assert share_of_questions(PACKAGE) <= MOST_QUESTIONS, asking


def test_question_words_are_found_in_a_known_text():
    texts = docstrings('"""What it is."""\ndef f():\n    """Return it."""\nx = """it"""\n')
    assert texts == ["What it is.", "Return it."]
    assert share_of_questions(texts) == 0.5
