"""docs/loop.md: the loop has the lines of the README's, and each line is explained. The code runs with that of all pages."""

from __future__ import annotations

import ast
import contextlib
import os
import re
import tempfile
import textwrap
import warnings

import torch

import dtrain as dt
from pages.fences import DOCS, ROOT, fences
from stand_ins import documents, namespace

PAGE = DOCS / "loop.md"
MODEL = "model = GPT(config)"  # explained with the line above it


def code(text: str) -> list[str]:
    """The lines of a loop without comments and indentation; a call that goes over several lines is one line."""
    plain = re.sub(r"(^|\s+)#.*", "", text, flags=re.M)
    joined = re.sub(r",?\s+(?=[)\]])", "", re.sub(r"(?<=[(\[,])\s*\n\s*", " ", plain))
    return [line for raw in re.sub(r"(?<=[(\[]) +", "", joined).splitlines() if (line := raw.strip())]


def calls(text: str) -> list[str]:
    """The names that a loop calls, in order, from its ``with`` line on."""
    return re.findall(r"([A-Za-z_]\w*)\(", text[text.index("with dt.init_dist") :])


def test_readme_loop_is_the_page_loop_without_some_lines():
    of_readme = next(fence.text for fence in fences(ROOT / "README.md") if "loader.until" in fence.text)
    of_page = calls(next(fence.text for fence in fences(PAGE) if fence.language == "python"))
    assert set(calls(of_readme)) - {"print"} <= set(of_page)
    nested = {"print", "clip_by_norm", "auto_microbatch"}  # the page has the transforms in a line of their own
    behind = iter(of_page)
    assert [name for name in calls(of_readme) if name not in nested and name not in behind] == []  # in the same order
    shared = code(of_readme)[-6:]
    assert [line.split("(")[0] for line in shared if "print" not in line] == [
        "for batch in loader.until",
        "state, metrics = step",
        "if state.crossed",
        "dt.save_sharded",
        "dt.save_sharded",
    ]


def test_page_loop_trains_and_resumes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    loop = next(fence.text for fence in fences(PAGE) if fence.language == "python")
    exec(loop.replace('until("3ep")', 'until("1ep")'), namespace(dataset=documents(30_000)))
    assert [checkpoint.step for checkpoint in dt.checkpoint.list_steps("ckpt")] == [118]
    exec(loop, namespace(dataset=documents(30_000)))
    assert [checkpoint.step for checkpoint in dt.checkpoint.list_steps("ckpt")] == [118, 236, 354]
    assert list(dt.loggers.read_jsonl("run.jsonl")) == [100, 200, 300]


def test_every_loop_line_is_explained_in_order():
    lines = code(next(fence.text for fence in fences(PAGE) if fence.language == "python"))
    explained = re.findall(r"^### `(.*)`$", PAGE.read_text(), re.M)
    shown = dict.fromkeys(line for line in lines if not line.startswith("import") and line != MODEL)
    assert explained == list(shown), "the save after the loop is the save in the loop"


def test_every_loop_line_has_a_stated_cost():
    parts = re.split(r"^### ", PAGE.read_text().split("## What is not there")[0], flags=re.M)[1:]
    silent = [paragraph.splitlines()[0] for paragraph in parts if not re.search(r"\*Costs\*|As above", paragraph)]
    assert silent == []


def run(lines: list[str], head: list[str], tail: list[str]) -> str | list:
    """Run the loop with its lines of preparation in this order; return the error, or the weights and the records."""
    torch.manual_seed(0)
    text = textwrap.indent("\n".join(lines), "    ") + "\n" + textwrap.indent("\n".join(tail), "    ")
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), warnings.catch_warnings():
        warnings.simplefilter("error")
        given = namespace()
        names = {name: given[name] for name in ("GPT", "Block", "config", "dataset", "loss_fn")}
        try:
            exec("\n".join(head) + "\n" + text, names)
        except Exception as error:  # noqa: BLE001  # of any kind: each is an answer to a line in the wrong place
            return f"{type(error).__name__}: {error}"
        state = names["state"]
        return [state.step, state.clock.epoch, [param.sum().item() for param in state.params.values()], os.listdir("ckpt")]


def preparation() -> tuple[list[str], list[str], list[str]]:
    """Split the loop in three: the code that opens its block, the preparation, and the iterations; shorter than on the page."""
    text = next(fence.text for fence in fences(PAGE) if fence.language == "python")
    text = text.replace('"3ep"', '"4ba"').replace('"1ep"', '"4ba"').replace("256", "16").replace('"100ba"', '"2ba"')
    block = next(node for node in ast.parse(text).body if isinstance(node, ast.With))
    parts = [ast.unparse(node) for node in block.body]
    loop = next(place for place, node in enumerate(block.body) if isinstance(node, ast.For))
    return ["import torch, dtrain as dt", "with dt.init_dist() as dist:"], parts[:loop], parts[loop:]


def test_reordered_setup_lines_raise_or_give_equal_results():
    head, lines, tail = preparation()
    right = run(lines, head, tail)
    assert right[0] == 4, right
    ends = {}
    for index, line in enumerate(lines[:-1]):
        others = [*lines[:index], *lines[index + 1 :]]
        ends["one later", line] = run([*others[: index + 1], line, *others[index + 1 :]], head, tail)
        ends["last", line] = run([*others, line], head, tail)
        ends["left out", line] = run(others, head, tail)
    assert {name: end for name, end in ends.items() if not isinstance(end, str) and end != right} == {}
    assert sum(isinstance(end, str) for end in ends.values()) >= 20


def test_step_by_hand_trains():
    *_, by_hand = (fence.text for fence in fences(PAGE) if fence.language == "python")
    scope = namespace()
    with dt.init_dist():
        exec(by_hand, scope)
    assert scope["state"].step == 1
