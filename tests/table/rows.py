"""The truth table of ``dtrain launch``: one row for each thing that goes wrong between a program and its machine.

A row has the script, the disturbance, and the result that the launcher must have. ``test_table`` holds dtrain to it on 2 and 4
ranks, with and without preload; ``benchmarks/truth_table.py`` prints the results of other launchers. No row imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from table import acts, scripts
from table.acts import Act, World, empty_world

Stream = Literal["file", "closed", "full", "unread"]
Lines = tuple[int, int]
"""The fewest and the most lines on standard error, besides the traceback of the program."""

SILENT: Lines = (0, 0)
ONE: Lines = (1, 1)
FEW: Lines = (1, 12)
NOTICE: Lines = (0, 1)

KILLED = 128 + 9
HUNG = 124
USAGE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row. ``{folder}`` in options and script is the job's own folder, where it is started.

    Args:
        name: the event, as the page about the table has it.
        code: exit code of the launcher.
        lines: how much it says.
        says: a pattern that is found in it; ``{culprit}`` is the rank in question.
        source: of the script; None: there is none.
        encoding: of the source.
        script: its path, as it is given on the command line.
        each: it may happen to any rank, and is tried on all of them; else it concerns the last rank.
        n: the number of ranks, where the row is about it.
        options: of dtrain; other launchers do not have them.
        env: variables of the launcher; None: it has none of that name.
        world: the environment of the job while it runs; gives more variables.
        shell: commands of a shell before it becomes the launcher.
        mounts: the shell mounts a file system, in a view that is the job's own.
        stdout: where the launcher's output goes.
        act: the disturbance of the running job.
        finished: files that the ranks have left, each with its rank.
        not_for_others: why other launchers are not asked to.
    """

    name: str
    code: int
    lines: Lines
    says: str = ""
    source: str | None = scripts.DONE
    encoding: str = "utf-8"
    script: str = "script.py"
    each: bool = False
    n: str | None = None
    options: tuple[str, ...] = ()
    env: Mapping[str, str | None] = field(default_factory=dict)
    world: World = empty_world
    shell: str = ""
    mounts: bool = False
    stdout: Stream = "file"
    act: Act | None = None
    finished: tuple[str, ...] = ()
    not_for_others: str = ""

    def write(self, folder: Path) -> None:
        """Put the script where it is looked for."""
        if self.source is not None:
            path = folder / self.script.replace("{folder}", str(folder))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(self.source.encode(self.encoding))


def _refused(name: str, says: str, **settings: Any) -> Row:
    return Row(name=name, code=USAGE, lines=ONE, says=says, **settings)


def _done(name: str, *, lines: Lines = SILENT, **settings: Any) -> Row:
    return Row(name=name, code=0, lines=lines, **settings)


def _fails(name: str, code: int, source: str, says: str, *, on_each: bool = True, **settings: Any) -> Row:
    return Row(name=name, code=code, lines=FEW, source=source, says=says, each=on_each, **settings)


def _ended(name: str, code: int, word: str, *signals: str, source: str = scripts.STAYS, **settings: Any) -> Row:
    says = f"^dtrain: launch: {word}; ranks ended$"
    return Row(name=name, code=code, lines=ONE, says=says, source=source, act=acts.send(*signals), **settings)


STALE_NAMES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT",
    "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE",
    "DTRAIN_RUN_DIR", "DTRAIN_FAILURE_FILE", "DTRAIN_HEARTBEAT_FD", "DTRAIN_DUMP_REQUEST_FD", "DTRAIN_LOOPBACK",
    "DTRAIN_SOCKET_FOLDER_PREFIX", "GLOO_SOCKET_IFNAME",
)  # fmt: skip
STALE_VALUES = {"wrong": "7", "empty": "", "garbage": "\x1b[2J no\nnumber ü"}

_SCRIPT = [
    _refused("the script is missing", "no such script", source=None),
    _refused("the script is missing, and its name has a line break", "no such script", source=None, script="no\nscript.py"),
    _refused("the script is a folder", "is a folder", source=None, script="."),
    _refused("the script has a syntax error", ".py:2 is not valid Python", source="import os\nif os\n"),
    _refused("the script is latin-1 and not UTF-8", "not utf-8 text|encoding", source="name = 'é'\n", encoding="latin-1"),
    _fails("the script imports what is not there", 1, "import not_there\n", "No module named 'not_there'", on_each=False),
]

_COUNT = [
    _refused("`-n 0`", "-n must be an integer from 1", n="0"),
    _refused("`-n -1`", "-n must be an integer from 1", n="-1"),
    _refused("`-n x`", "-n must be an integer", n="x"),
    _refused("`-n 1000000`", "-n must be an integer from 1", n="1000000", not_for_others="they would begin to start them"),
]

_KILLED = "rank {culprit} of .* was killed by"
_FAILED = r"^dtrain: launch: rank {culprit} of \d failed with"
_OTHERS_ENDED = r"\(pid \d+ on \S+\); the other ranks were ended$"

_RANKS = [
    _done("every rank exits with 0", source="import sys\nsys.exit(0)\n"),
    *(
        _fails(f"one rank exits with {code}", code, scripts.exits(code), f"{_FAILED} exit code {code} {_OTHERS_ENDED}")
        for code in (1, 3, 77, 255)
    ),
    _fails("one rank raises an exception", 1, scripts.RAISES, "rank {culprit} of .*: ValueError: loss is nan"),
    _fails("one rank is killed by SIGKILL", KILLED, scripts.killed("SIGKILL"), f"{_KILLED} SIGKILL .*memory"),
    _fails("one rank crashes (SIGSEGV)", 139, scripts.SEGFAULT, f"{_KILLED} SIGSEGV"),
    _fails("one rank aborts", 134, scripts.ABORTS, f"{_KILLED} SIGABRT"),
    _fails("one rank calls os._exit(9)", 9, scripts.LEAVES, f"{_FAILED} exit code 9 {_OTHERS_ENDED}"),
    _fails(
        "one rank raises and is slow to exit, the others fail of it", 1, scripts.SLOW_TO_EXIT,
        "rank {culprit} of .*: ValueError: the cause",
    ),
    _fails("one rank is killed, the others fail of it", KILLED, scripts.KILLED_FIRST, f"{_KILLED} SIGKILL"),
    _done("one rank returns early, the others go on", source=scripts.EARLY_AND_FINE, each=True),
    _fails(
        "one rank returns early, the others fail of it", 1, scripts.EARLY_AND_MISSED,
        "rank {culprit} of .* left early, with exit code 0",
    ),
    _fails(
        "one rank is stopped (SIGSTOP)", HUNG, scripts.hangs("stop"), "rank {culprit} of .* no progress",
        on_each=False, options=("--hang-timeout", "3", "--grace", "0.5"),
    ),
    _fails(
        "one rank holds the interpreter's lock", HUNG, scripts.hangs("hold"),
        r"no progress(.|\n)*rank {culprit}: \S*script.py:", on_each=False, options=("--hang-timeout", "3", "--grace", "0.5"),
    ),
    _fails(
        "one rank fails, the others and their children in sessions of their own ignore signals", 5,
        scripts.hidden_children(fails=True), "rank {culprit} of .* exit code 5 ", on_each=False, options=("--grace", "0.5"),
    ),
    _done(
        "all ranks are done, their children in sessions of their own go on and ignore signals",
        source=scripts.hidden_children(fails=False), options=("--grace", "0.5"),
    ),
]  # fmt: skip

_SIGNALS = [
    _ended("SIGTERM to the launcher", 143, "terminated", "SIGTERM"),
    _ended("SIGHUP to the launcher", 129, "hung up", "SIGHUP"),
    _ended("Ctrl-C once", 130, "interrupted", "SIGINT"),
    _ended("Ctrl-C once, ranks ignore it", 130, "interrupted", "SIGINT", source=scripts.STUBBORN, options=("--grace", "1")),
    *(
        _ended(
            f"Ctrl-C {often}, ranks ignore it", 130, "interrupted", *numbers, source=scripts.STUBBORN,
            options=("--grace", "3600"),
        )
        for often, numbers in (("twice", ["SIGINT"] * 2), ("three times", ["SIGINT"] * 3))
    ),
    Row(name="SIGKILL to the launcher", code=-9, lines=SILENT, source=scripts.STAYS, act=acts.send("SIGKILL")),
    Row(
        name="SIGKILL to the launcher, children of ranks ignore signals", code=-9, lines=SILENT,
        source=scripts.hidden_children(fails=None), act=acts.send("SIGKILL"),
    ),
]  # fmt: skip

_DELETED = "mkdir gone && cd gone && rmdir ../gone"
_READ_ONLY = "mkdir ro && mount --bind ro ro && mount -o remount,bind,ro ro && cd ro"
_FULL = "mkdir logs && mount -t tmpfs -o size=64k none logs"

_SURROUNDINGS = [
    _done("the port of the environment is taken", world=acts.taken_port, source=scripts.OTHER_PORT, lines=NOTICE),
    *(
        _done(
            f"variables of another launch: {kind}", env=dict.fromkeys(STALE_NAMES, value), lines=NOTICE,
            source=scripts.ENVIRONMENT,
        )
        for kind, value in STALE_VALUES.items()
    ),
    _done("a space in the path", script="a folder/my script.py"),
    _done("quotes in the path", script="it's/\"quoted\".py"),
    _done("a line break in the path", script="two\nlines.py"),
    _done("a path that is not ASCII", script="ünï/çødé 漢字.py"),
    _done("a path of 300 characters", script=f"{'d' * 150}/{'s' * 146}.py"),
    _refused(
        "the working directory is deleted", "--run-dir", shell=_DELETED,
        script="{folder}/script.py",
    ),
    _done(
        "the working directory is deleted, the run folder is elsewhere", shell=_DELETED,
        script="{folder}/script.py", options=("--run-dir", "{folder}/run"),
    ),
    _done("HOME is unset", env={"HOME": None}),
    _refused(
        "the working directory is read-only", "--run-dir", mounts=True, shell=_READ_ONLY, script="{folder}/script.py",
    ),
    _done(
        "the working directory is read-only, the run folder is elsewhere", mounts=True, shell=_READ_ONLY,
        script="{folder}/script.py", options=("--run-dir", "{folder}/run"),
    ),
    _done("open files are limited to 64", shell="ulimit -n 64"),
]  # fmt: skip

_OUTPUT = [
    _done("stdout is closed", stdout="closed", source=scripts.PRINTS, lines=NOTICE, finished=("done",)),
    _done("stdout is full", stdout="full", source=scripts.PRINTS, lines=ONE, finished=("done",), says="No space left"),
    _done("stdout is never read", stdout="unread", source=scripts.PRINTS, lines=ONE, finished=("done",), says="nobody read"),
    _done(
        "the log folder is full", shell=_FULL, mounts=True,
        options=("--run-dir", "{folder}/logs"), source=scripts.PRINTS, lines=FEW, finished=("done",), says="No space left",
    ),
    _fails(
        "the log folder is full, and one rank fails", 1, scripts.PRINTS + scripts.RAISES, "rank {culprit} of .* exit code 1 ",
        on_each=False, mounts=True, shell=_FULL,
        options=("--run-dir", "{folder}/logs"),
    ),
]  # fmt: skip

ROWS = (*_SCRIPT, *_COUNT, *_RANKS, *_SIGNALS, *_SURROUNDINGS, *_OUTPUT)
