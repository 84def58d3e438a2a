"""Rules for every example: short, public names only, explained by --help, no copy of another example."""

import ast
import re
import runpy
import sys
from itertools import combinations
from pathlib import Path

import pytest

import public
from example_runs import EXAMPLES

MOST_LINES = 140
SHARED_LINES = 10  # equal lines one after another: a primitive is missing

LOOPS = sorted(path for path in EXAMPLES.glob("*.py") if "dt.init_dist(" in path.read_text())


def code_lines(path: Path) -> list[str]:
    """Return the code lines of a file: no blank lines, no comments, no imports, and no docstrings."""
    source, left_out = path.read_text(), set()
    for node in ast.walk(ast.parse(source)):
        text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if text or isinstance(node, (ast.Import, ast.ImportFrom)):
            left_out.update(range(node.lineno, node.end_lineno + 1))
    lines = (line.strip() for number, line in enumerate(source.splitlines(), 1) if number not in left_out)
    return [line for line in lines if line and not line.startswith("#")]


def longest_shared(a: list[str], b: list[str]) -> list[str]:
    """The longest run of lines that both have."""
    best, before = (0, 0), [0] * (len(b) + 1)
    for i, line in enumerate(a, 1):
        row = [0] * (len(b) + 1)
        for j, other in enumerate(b, 1):
            if line == other:
                row[j] = before[j - 1] + 1
                best = max(best, (row[j], i))
        before = row
    length, end = best
    return a[end - length : end]


def test_all_example_loops_are_discovered():
    names = {path.stem for path in LOOPS}
    assert {"pretrain_gpt", "pretrain_bert", "finetune_bert", "train_resnet", "train_gan", "train_diffusion"} <= names
    assert {"train_embeddings", "train_dpo", "train_custom", "tensor_parallel", "train_moe", "train_grpo"} <= names


@pytest.mark.parametrize("path", LOOPS, ids=lambda path: path.stem)
def test_example_loop_stays_within_the_line_limit(path):
    most = 100 if path.stem == "train_custom" else MOST_LINES
    assert len(path.read_text().splitlines()) <= most


@pytest.mark.parametrize("path", sorted(EXAMPLES.rglob("*.py")), ids=lambda path: path.stem)
def test_example_uses_public_names_only(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "dtrain":
            assert node.module == "dtrain", f"line {node.lineno}: from {node.module} import ..."
        if isinstance(node, ast.Import):
            assert {alias.name for alias in node.names if alias.name.startswith("dtrain")} <= {"dtrain"}
    assert public.unknown_in(path.read_text()) == set()


def test_no_two_examples_share_a_block():
    """The rule holds for loops and for the modules beside them."""
    lines = {path.name: code_lines(path) for path in sorted(EXAMPLES.rglob("*.py"))}
    shared = {(a, b): longest_shared(lines[a], lines[b]) for a, b in combinations(lines, 2)}
    assert {pair: block for pair, block in shared.items() if len(block) >= SHARED_LINES} == {}


def test_duplicate_block_check_detects_a_shared_block():
    """The check itself: ten equal lines among different lines, at other places."""
    block = [f"x{i}" for i in range(SHARED_LINES)]
    assert longest_shared(["a", *block, "b"], ["c", "d", *block]) == block


@pytest.mark.parametrize("path", LOOPS, ids=lambda path: path.stem)
def test_example_help_shows_the_launch_command(path, tmp_path, monkeypatch, capsys):
    """Check the arguments without training, writing or downloading."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(path), "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(path), run_name="__main__")  # in this process, which has imported torch already
    assert end.value.code == 0
    printed = capsys.readouterr().out
    assert "dtrain launch -n" in printed
    assert "--out" in printed
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", LOOPS, ids=lambda path: path.stem)
def test_example_records_its_run_and_shows_its_progress(path):
    source = path.read_text()
    lacking = [call for call in ("dt.open_run(", "dt.loggers.progress_bar(", "held_out/") if call not in source]
    assert lacking == []
    assert 'print(f"step' not in source, "the progress bar shows steps"


@pytest.mark.parametrize("path", LOOPS, ids=lambda path: path.stem)
def test_example_says_how_long_it_takes_and_to_which_figure(path):
    text = " ".join((ast.get_docstring(ast.parse(path.read_text())) or "").split())
    assert re.search(r"\b\d+ s\b", text), "how long"
    assert len(re.findall(r"\b\d+\.\d+\b", text)) >= 2, "its figure, and that of a baseline"
