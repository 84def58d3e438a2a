"""The program of a rank, by itself: how it ends, and the files that it leaves for the launcher."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from dtrain import launch_protocol
from dtrain.launch import rank_main as program
from dtrain.launch.processes import inherited_flags, parse_flags


def run_rank(folder, source, *, interrupted=False):
    (folder / "failures").mkdir()
    if interrupted:
        launch_protocol.interrupted_file(folder).touch()
    script = folder / "script.py"
    script.write_text(textwrap.dedent(source))
    own = {
        launch_protocol.RANK: "3",
        launch_protocol.RUN_DIR: str(folder),
        launch_protocol.FAILURE_FILE: str(folder / "failures" / "rank-00003.json"),
    }
    command = [sys.executable, str(Path(program.__file__)), "script", str(script)]
    return subprocess.run(command, env={**os.environ, **own}, capture_output=True, text=True, timeout=90)


def record(folder):
    return launch_protocol.RankFailure.read(folder / "failures" / "rank-00003.json")


@pytest.mark.parametrize("interrupted", [False, True], ids=["its own", "passed on"])
def test_interrupt_shows_traceback_unless_launcher_forwarded_it(tmp_path, interrupted):
    done = run_rank(tmp_path, "import signal\nsignal.raise_signal(signal.SIGINT)\n", interrupted=interrupted)
    assert done.returncode == 130
    assert ("line 2, in <module>" in done.stderr, "KeyboardInterrupt" in done.stderr) == (not interrupted, not interrupted)
    failure = record(tmp_path)
    assert failure is not None
    assert (failure.error_type, failure.exit_code, failure.rank) == ("KeyboardInterrupt", 130, 3)
    assert "line 2, in <module>" in failure.traceback_text


def test_exception_after_interrupt_is_shown(tmp_path):
    done = run_rank(tmp_path, "raise ValueError('while it was saved')", interrupted=True)
    assert (done.returncode, "ValueError: while it was saved" in done.stderr) == (1, True)


def test_exit_handlers_see_last_exception(tmp_path):
    source = """
    import atexit, sys
    def look():
        names = ["last_type", "last_value", "last_traceback", "last_exc"]
        print([repr(getattr(sys, name, None)) for name in names[:2] + names[3:]], sys.last_traceback.tb_lineno)
    atexit.register(look)
    raise ValueError("why")
    """
    done = run_rank(tmp_path, source)
    usual = subprocess.run([sys.executable, tmp_path / "script.py"], capture_output=True, text=True, timeout=90)
    assert "ValueError('why')" in usual.stdout
    assert (done.stdout, done.stderr) == (usual.stdout, usual.stderr)


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        (["python"], []),
        (["python", "script.py", "-O"], []),
        (["python", "-m", "dtrain", "-O"], []),
        (["python", "-c", "pass", "-O"], []),
        (["python", "-", "-O"], []),
        (["python", "-OBmdtrain"], ["-O", "-B"]),
        (["python", "-OO", "-X", "dev", "-Werror", "x.py"], ["-O", "-O", "-X", "dev", "-W", "error"]),
        (["python", "-BWignore::UserWarning:torch", "-m", "x"], ["-B", "-W", "ignore::UserWarning:torch"]),
        (["python", "-i", "-ux", "x.py"], ["-u"]),
        (
            ["python", "--check-hash-based-pycs", "always", "-P", "/bin/dtrain", "-W"],
            ["--check-hash-based-pycs", "always", "-P"],
        ),
    ],
    ids=["none", "script's", "module's", "code's", "input's", "joined", "with values", "value in the word", "for one", "long"],
)
def test_parse_flags_returns_interpreter_options_before_target(command, flags):
    assert parse_flags(command) == flags


@pytest.mark.parametrize(("option", "passed"), [("-E", ["-E", "-u"]), ("-I", ["-I", "-u"]), ("-s", ["-s"])])
def test_ignored_environment_passes_unbuffered_as_option(monkeypatch, option, passed):
    monkeypatch.setattr(sys, "orig_argv", ["python", option, "-m", "dtrain"])
    assert inherited_flags() == passed


LOOK = """
import json, sys
facts = [str(sys.flags), sys.warnoptions, sys._xoptions, sys.orig_argv, __debug__]
print(json.dumps(facts))
"""


@pytest.mark.parametrize("way", [["--preload", "colorsys"], ["--no-preload"]], ids=["preloaded", "plain"])
def test_rank_inherits_interpreter_options_of_launcher(tmp_path, way):
    (tmp_path / "look.py").write_text(LOOK)
    options = ["-OB", "-X", "dev", "-W", "error::UserWarning"]
    ends = {
        "usual": [sys.executable, *options, "look.py", "-W"],
        "rank": [sys.executable, *options, "-m", "dtrain", "launch", "-n", "1", *way, "look.py", "-W"],
    }
    seen = {}
    for name, command in ends.items():
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=90)
        assert done.returncode == 0, done.stderr
        seen[name] = json.loads(done.stdout)
    usual = ["-O", "-B", "-X", "dev", "-W", "error::UserWarning"]
    assert seen["usual"][3][1:-2] == options
    assert seen["rank"][3][1:-2] == usual  # the words of the command line, each by itself
    del seen["usual"][3], seen["rank"][3]
    assert seen["rank"] == seen["usual"]
