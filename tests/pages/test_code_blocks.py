"""The code of every page runs: its Python in order, and its commands are ones that the command line takes."""

from __future__ import annotations

import ast
import contextlib
import doctest
import os
import re
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import typer

import dtrain as dt
import public
from dtrain.cli.main import app
from dtrain.testing import Ranks
from pages.assumptions import assumed, sentence
from pages.fences import DOCS, LANGUAGES, PAGES, ROOT, called, commands, fences, ours, prose
from pages.given import GIVEN, RANKS, RUN_BY, SHOWN_BY, WITHOUT_GROUPS
from pages.shown import shown, source
from stand_ins import namespace

HERE = [page for page in PAGES if called(page) not in RUN_BY and any(fence.language == "python" for fence in fences(page))]


@pytest.fixture
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore settings of the whole process that code may change."""
    for name in ("RANK", "WORLD_SIZE", "CUBLAS_WORKSPACE_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    environment = dict(os.environ)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    deterministic, tf32 = torch.are_deterministic_algorithms_enabled(), dt.dist.use_tf32()
    dt.dist.use_tf32(tf32)
    with torch.random.fork_rng():
        yield
    dt.dist.use_tf32(tf32)
    torch.use_deterministic_algorithms(deterministic)
    for number, handler in handlers.items():
        signal.signal(number, handler)
    os.environ.clear()
    os.environ.update(environment)


def run(path: str, folder: str) -> None:
    """Run the Python of a page, block after block, in an empty folder; a block that is a file is written instead."""
    page = Path(path)
    name = called(page)
    given = iter(GIVEN.get(name, ()))
    with contextlib.chdir(folder), warnings.catch_warnings(), contextlib.ExitStack() as stack:
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning)  # torch's own compiler imports it
        if name not in WITHOUT_GROUPS:
            stack.enter_context(dt.init_dist())
        names = namespace()
        exec(next(given, ""), names)
        for block in fences(page):
            if block.language != "python" or block.text.startswith(tuple(SHOWN_BY)):
                continue
            if block.file:
                Path(block.file).write_text(block.text)
                continue
            if block.anew:
                names = namespace()
                exec(next(given, ""), names)
            code = "\n" * (block.line - 1) + block.text  # so that an error names the line of the page
            exec(compile(code, name, "exec"), names)


@pytest.mark.parametrize("page", HERE, ids=called)
@pytest.mark.usefixtures("as_before")
def test_page_python_blocks_run(page: Path, tmp_path: Path, ranks: Callable[[int], Ranks]) -> None:
    if called(page) in RANKS:
        ranks(RANKS[called(page)]).run(run, str(page), str(tmp_path))
    else:
        run(str(page), str(tmp_path))


SESSIONS = [page for page in PAGES if any(fence.language == "pycon" for fence in fences(page))]


@pytest.mark.parametrize("page", SESSIONS, ids=called)
@pytest.mark.usefixtures("as_before")
def test_page_sessions_run_in_an_empty_interpreter(page: Path) -> None:
    """The sessions of a page, in order, print the lines below them."""
    text = "\n".join(block.text for block in fences(page) if block.language == "pycon")
    session = doctest.DocTestParser().get_doctest(text, {}, called(page), str(page), 0)
    printed: list[str] = []
    doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS).run(session, out=printed.append)
    assert printed == []


@pytest.mark.parametrize("page", [page for page in PAGES if assumed(page)], ids=called)
def test_page_says_what_its_code_assumes(page: Path) -> None:
    """Code of a page runs in an empty interpreter, or a line behind the first block lists the names that it needs."""
    # The page of the loop does not link to itself.
    there = "the loop above" if called(page) == "docs/loop.md" else "[a loop](loop.md)"
    assert sentence(assumed(page)).replace("[a loop](loop.md)", there) in prose(page).splitlines()


def test_assumed_names_are_those_read_before_they_are_bound(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```python\nimport a.b\nwith a as f:\n    x = [y for y in f if g(lambda z: z + q)]\n```\n"
        "```python\ndef h(i):\n    return i + late + never\nlate = x\nm = m + 1\n```\n"
        "<!-- anew -->\n```python\nprint(x)\n```\n"
    )
    assert assumed(page) == {"g", "q", "never", "m", "x"}
    assert sentence({"torch", "dt", "state", "mine"}) == (
        "*Assumed here and below: `import torch, dtrain as dt`; `state` of [a loop](loop.md); your own `mine`.*"
    )


def test_page_exceptions_name_existing_pages_and_blocks() -> None:
    named = {*RUN_BY, *RANKS, *WITHOUT_GROUPS, *GIVEN}
    assert named - {called(page) for page in PAGES} == set()
    namespaces = {called(page): 1 + sum(block.anew for block in fences(page)) for page in PAGES}
    assert {page: (len(codes), namespaces[page]) for page, codes in GIVEN.items() if len(codes) > namespaces[page]} == {}
    texts = [block.text for page in PAGES for block in fences(page)]
    assert [begin for begin in SHOWN_BY if not any(text.startswith(begin) for text in texts)] == []


def test_tests_named_as_page_runners_exist() -> None:
    for page, test in RUN_BY.items():
        source = (ROOT / test).read_text()
        assert Path(page).name in source, f"{test} does not read {page}"
    for line, test in SHOWN_BY.items():
        assert re.search(r"(\w+)\(", line)[1] in (ROOT / test).read_text(), f"{test} does not call what {line!r} does"


def test_every_code_block_has_a_known_language() -> None:
    unknown = [
        f"{called(page)}:{block.line}: {block.language!r}"
        for page in PAGES
        for block in fences(page)
        if block.language not in LANGUAGES
    ]
    assert unknown == []


def headings(page: Path, line: int) -> list[str]:
    """The headings that stand above a line, outermost first."""
    text = re.sub(r"^```.*?^```", lambda m: "\n" * m[0].count("\n"), page.read_text(), flags=re.S | re.M)
    above: dict[int, str] = {}
    for row in text.splitlines()[: line - 1]:
        if match := re.match(r"(#+) (.*)", row):
            above = {level: title for level, title in above.items() if level < len(match[1])} | {len(match[1]): match[2]}
    return list(above.values())


def test_unexecuted_python_is_under_a_heading_naming_its_library() -> None:
    """Code of another library stands under a heading that names the library. ``py`` on a page about dtrain would not run."""
    others = re.compile(
        r"Composer|DDP|by hand|DeepSpeed|Accelerate|Fabric|torchtitan|MosaicML|torch|transformers|mistake", re.I
    )
    astray = [
        f"{called(page)}:{block.line}"
        for page in PAGES
        for block in fences(page)
        if block.language == "py" and not others.search(" / ".join(headings(page, block.line)))
    ]
    assert astray == []


WIDTH = 88  # columns that a page of the site shows without a scroll bar
NOT_FOR_USERS = {"CHANGELOG.md", "docs/log.md", "docs/evidence.md", "docs/truth-table.md", "docs/scale.md", "docs/figures.md"}


@pytest.mark.parametrize("page", [page for page in PAGES if called(page) not in NOT_FOR_USERS], ids=called)
def test_code_of_a_page_fits_its_column(page: Path) -> None:
    """Output of programs may be wider, and so may code that a page shares with a file of the tests."""
    shared = {source(file, name) for file, name in shown(page.read_text())}
    wide = [
        f"{called(page)}:{block.line + number}"
        for block in fences(page)
        if block.language in ("python", "py", "pycon", "bash") and block.text not in shared
        for number, line in enumerate(block.text.splitlines())
        if len(line) > WIDTH and (block.language != "pycon" or line.startswith((">>> ", "... ")))
    ]
    assert wide == []


@pytest.mark.parametrize("page", PAGES, ids=called)
def test_page_python_blocks_parse(page: Path) -> None:
    for block in fences(page):
        if block.language in ("python", "py"):
            ast.parse(block.text)


# Commands.

COMMAND = typer.main.get_command(app)
AT_ONCE = {"--install-completion", "--show-completion"}  # the parser itself would do it, to the user's own files


def refusal(arguments: list[str]) -> str | None:
    """Return the error of the command line's parser for some arguments, if any. Nothing else runs."""
    if set(arguments) & AT_ONCE:
        return None
    command, name, parent = COMMAND, "dtrain", None
    rest = list(arguments)
    try:
        while True:
            context = command.make_context(name, list(rest), parent=parent)
            if not hasattr(command, "resolve_command"):
                return None
            if not context._protected_args:
                return None
            name, command, rest = command.resolve_command(context, [*context._protected_args, *context.args])
            parent = context
    except typer.Exit:  # --help, --version
        return None
    except typer.BadParameter.__mro__[1] as error:
        return str(error)


def test_command_check_refuses_unknown_commands() -> None:
    assert refusal(["launch", "-n", "2", "loop.py", "--anything"]) is None
    assert refusal(["--version"]) is None
    assert refusal(["checkpoints", "convert", "ckpt", "out", "--to", "hf"]) is None
    for wrong in (
        ["lanch", "x.py"],
        ["launch", "--nprocs", "2", "x.py"],
        ["checkpoints", "lst"],
        ["checkpoints", "list", "--deep"],
    ):
        assert refusal(wrong) is not None, wrong


@pytest.mark.parametrize("page", PAGES, ids=called)
def test_page_commands_are_valid(page: Path) -> None:
    wrong = []
    for block in fences(page):
        if block.language in ("bash", "console"):
            for words in commands(block):
                arguments = ours(words)
                if arguments is not None and (said := refusal(arguments)):
                    wrong.append(f"{called(page)}:{block.line}: {' '.join(words)}: {said}")
    assert wrong == []


SCRIPT = re.compile(r"^(?:examples|benchmarks|tests)/[\w/]+\.py$")


@pytest.mark.parametrize("page", PAGES, ids=called)
def test_page_scripts_exist_with_their_options(page: Path) -> None:
    wrong = []
    for block in fences(page):
        if block.language not in ("bash", "console"):
            continue
        for words in commands(block):
            for index, word in enumerate(words):
                script = word.split(":")[0]
                if not SCRIPT.match(script):
                    continue
                if not (ROOT / script).exists():
                    wrong.append(f"{called(page)}:{block.line}: no {script}")
                    continue
                options = [
                    argument.split("=")[0] for argument in words[index + 1 :] if argument.startswith("--") and argument != "--"
                ]
                if ("dtrain" in words and "plan" in words) or "--slow" in options:  # options of dtrain plan, of pytest
                    continue
                source = (ROOT / script).read_text()
                wrong += [
                    f"{called(page)}:{block.line}: {script} has no {option}"
                    for option in options
                    if f'"{option}"' not in source and option != "--help"
                ]
    assert wrong == []


@pytest.mark.parametrize("page", PAGES, ids=called)
def test_dtrain_names_on_a_page_exist(page: Path) -> None:
    text = "".join(block.text for block in fences(page) if block.language in ("python", "bash", "console", "pycon"))
    unknown = public.unknown_in(text + "".join(re.findall(r"`[^`\n]+`", prose(page))))
    assert {name for name in unknown if not page.with_name(f"{name.removeprefix('dt.')}.md").exists()} == set()


def test_page_list_is_complete() -> None:
    assert len(PAGES) > 25
    assert DOCS / "architecture.md" in PAGES
