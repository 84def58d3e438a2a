"""``dtrain new``: each loop that it writes runs as it is, learns and resumes; and one line for each mistake."""

import ast
import contextlib
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import dtrain as dt
import public
from dtrain.cli.main import TASKS
from dtrain.cli.main import new as write_loop
from example_runs import ended

PATIENCE_S = 1800  # for a task of a minute: the machine may be busy

# Steps after which a loop is clearly better than its baseline, and how much better it must be there.
LENGTHS = {
    "blank": ("40ba", lambda value, baseline: value < baseline / 4),
    "lm": ("60ba", lambda value, baseline: value < baseline - 0.5),
    "vision": ("60ba", lambda value, baseline: value > baseline + 0.3),
    "finetune": ("60ba", lambda value, baseline: value > baseline + 0.15),
    "diffusion": ("60ba", lambda value, baseline: value < baseline / 3),
}
RULES = "E,F,W,I,B,UP,SIM,RUF,PIE,RET,C4"


@pytest.fixture
def new(command_line, monkeypatch, tmp_path):
    """``new(*args)``, as of ``command_line``, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return command_line("new")


def run(*command):
    quiet = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=PATIENCE_S, env=quiet)


# Processes that have started and imported torch once run one loop after the other.
IN_TURN = """
import runpy, sys
for task, length in {lengths}.items():
    print("loop", task, flush=True)
    sys.argv = [f"my_{{task}}.py", "--until", length]
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def loops(tmp_path_factory):
    """Return the folder in which each loop has run on two ranks, and the output of rank 0 of each."""
    with contextlib.chdir(tmp_path_factory.mktemp("loops")):
        for task in TASKS:
            write_loop(f"my_{task}.py", task=task)
        Path("in_turn.py").write_text(IN_TURN.format(lengths={task: length for task, (length, _) in LENGTHS.items()}))
        done = run("-m", "dtrain", "launch", "-n", "2", "in_turn.py")
        assert done.returncode == 0, done.stdout + done.stderr
        parts = re.split(r"^loop (\w+)\n", re.sub(r"^\[rank 1\] .*\n|^\[rank 0\] ", "", done.stdout, flags=re.M), flags=re.M)
        return Path.cwd(), dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.costly
@pytest.mark.parametrize("task", TASKS)
def test_template_loop_learns_on_two_ranks(loops, task):
    folder, printed = loops
    length, better = LENGTHS[task]
    ending = ended(printed[task])
    assert better(ending.value, ending.baseline), printed[task]
    steps, out = int(length.removesuffix("ba")), folder / "runs" / f"my_{task}"
    assert [ending.step for ending in dt.checkpoint.list_steps(out / "checkpoints")][-1] == steps
    assert list(dt.loggers.read_jsonl(out / "metrics.jsonl")) == list(range(20, steps + 1, 20))
    assert (out / "attempts").is_dir()
    assert sorted(path.name for path in (out / "ledger").iterdir())[:2] == ["rank-00000.jsonl", "rank-00001.jsonl"]
    if task == "diffusion":
        assert (out / "made.pgm").read_bytes()[:13] == b"P5 64 64 255 "


@pytest.mark.costly
def test_finished_loop_prints_same_result_on_other_rank_count(loops, monkeypatch, capsys):
    folder, printed = loops
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["my_blank.py", "--until", LENGTHS["blank"][0]])
    with torch.random.fork_rng(devices=[]):
        runpy.run_path("my_blank.py", run_name="__main__")
    again = capsys.readouterr().out
    assert "step " not in again, "it trained on after its end"
    assert ended(again).value == pytest.approx(ended(printed["blank"]).value, abs=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_stopped_loop_resumes_to_same_weights(new, task):
    new("loop.py", "--task", task)
    loop = Path("loop.py").read_text()
    stopping = loop.replace("dt.should_stop(state)", "dt.should_stop(state) or state.step == 13")
    assert stopping != loop
    Path("stopping.py").write_text(stopping)
    for script, out in (("loop.py", "whole"), ("stopping.py", "parts"), ("loop.py", "parts")):
        done = run("-m", "dtrain", "launch", "-n", "2", script, "--until", "30ba", "--out", out)
        assert done.returncode == 0, done.stdout + done.stderr
    told = run("-m", "dtrain", "checkpoints", "diff", "--json", "whole/checkpoints", "parts/checkpoints")
    differing = {difference["key"] for difference in json.loads(told.stdout)["differences"]}
    assert differing <= {"clock/seconds", "clock/before/seconds"}, told.stdout + told.stderr


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_template_loop_runs_unchanged(new, task):
    new("loop.py", "--task", task)
    done = run("-m", "dtrain", "launch", "-n", "2", "--run-dir", "runs/loop", "loop.py")
    assert done.returncode == 0, done.stdout + done.stderr
    ending = ended(done.stdout.replace("[rank 0] ", ""))
    assert LENGTHS[task][1](ending.value, ending.baseline)
    assert [path.name for path in Path("runs").iterdir()] == ["loop"]  # of the launcher and of the loop
    names = {path.name for path in Path("runs/loop").iterdir()}
    assert names >= {"launch.json", "logs", "attempts", "ledger", "metrics.jsonl", "checkpoints"}


@pytest.mark.parametrize("task", TASKS)
def test_template_loop_is_short_and_uses_public_names(new, task):
    new("loop.py", "--task", task)
    source = Path("loop.py").read_text()
    lines = source.splitlines()
    assert len(lines) <= 83
    assert max(map(len, lines)) <= 128
    for node in ast.walk(ast.parse(source)):
        assert not (isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dtrain"))
    assert public.unknown_in(source) == set()
    used = {name.removeprefix("dt.") for name in public.named_in(source)}
    assert {"loggers.jsonl", "Checkpointer", "evaluate", "should_stop", "shard_model"} <= used


@pytest.mark.parametrize("task", TASKS)
def test_template_loop_passes_ruff(new, task):
    if shutil.which("ruff") is None:
        pytest.skip("ruff is not installed; nox -s lint has it")
    new("loop.py", "--task", task)
    for command in (["check", "--select", RULES], ["format", "--check"]):
        done = subprocess.run(
            ["ruff", *command, "--isolated", "--no-cache", "--line-length", "128", "loop.py"], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_written_file_names_itself_and_run_command_is_printed(new, tmp_path):
    (tmp_path / "my runs").mkdir()
    code, out, err = new("my runs/train-2.py")
    assert (code, err) == (0, "")
    assert out.splitlines()[-1] == "run it: dtrain launch -n 2 --run-dir runs/train-2 'my runs/train-2.py'"
    source = (tmp_path / "my runs" / "train-2.py").read_text()
    assert "dtrain launch -n 2 --run-dir runs/train-2 train-2.py" in source
    assert 'default="runs/train-2"' in source
    assert not re.search(r"\bloop\.py|runs/loop", source)


def test_default_task_is_blank(new, tmp_path):
    new("a.py")
    new("b.py", "--task", "blank")
    assert (tmp_path / "a.py").read_text().replace("a.py", "b.py").replace("runs/a", "runs/b") == (
        tmp_path / "b.py"
    ).read_text()


def test_existing_file_is_kept_unless_forced(new, tmp_path):
    (tmp_path / "loop.py").write_text("mine")
    code, out, err = new("loop.py")
    assert (code, out, (tmp_path / "loop.py").read_text()) == (2, "", "mine")
    assert err == "dtrain: new: 'loop.py' exists already. Choose another name, or pass --force to overwrite it.\n"
    assert new("loop.py", "--force")[0] == 0
    assert "dt.init_dist" in (tmp_path / "loop.py").read_text()


MISTAKES = {
    "no file": ("", "new: missing argument 'LOOP'. See `dtrain new --help`."),
    "unknown task": ("x.py --task nlp", "new: --task must be one of blank, lm, vision, finetune, diffusion, got 'nlp'. "),
    "no task": ("x.py --task", "new: option '--task' requires an argument. See"),
    "unknown option": ("x.py --fast", "new: no such option: --fast"),
    "another ending": ("loop.txt", "new: LOOP must be a name of letters, digits, - and _ that ends with .py, got 'loop.txt'. "),
    "an empty name": ("''", "new: LOOP must be a name of letters, digits, - and _ that ends with .py, got ''. "),
    "a line end": ("'a\n.py'", "new: LOOP must be a name of letters, digits, - and _ that ends with .py, got 'a\\n.py'. "),
    "no folder": ("nope/loop.py", "new: no such folder: 'nope'. Create the folder, or choose another."),
    "a folder": ("folder.py", "new: 'folder.py' is a folder. Name a file in it, as in folder.py/loop.py."),
    "torch": ("torch.py", "new: LOOP must not shadow the module 'torch', got 'torch.py'. Use another name"),
    "standard library": ("random.py", "new: LOOP must not shadow the module 'random', got 'random.py'. "),
}


@pytest.mark.parametrize(("args", "expected"), MISTAKES.values(), ids=MISTAKES)
def test_invalid_arguments_print_one_line_and_write_nothing(new, tmp_path, args, expected):
    (tmp_path / "folder.py").mkdir()
    code, out, err = new(*shlex.split(args))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"dtrain: {expected}")
    assert re.search(r"\. [A-Z]", err)
    assert os.listdir(tmp_path) == ["folder.py"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_unwritable_folder_prints_one_line(new, tmp_path):
    (tmp_path / "closed").mkdir(mode=0o500)
    code, _, err = new("closed/loop.py")
    assert code == 1
    assert err == "dtrain: new: 'closed/loop.py' cannot be written: Permission denied. Choose another path.\n"


def test_full_disk_prints_one_line(new, tmp_path):
    (tmp_path / "loop.py").symlink_to("/dev/full")
    code, _, err = new("loop.py", "--force")
    assert (code, err) == (1, "dtrain: new: 'loop.py' cannot be written: No space left on device. Choose another path.\n")


def test_missing_transformers_is_reported_with_install_command(new, monkeypatch):
    monkeypatch.setattr("dtrain.cli.main.find_spec", lambda name: None)
    assert 'first:  pip install "dtrain[hf]"  (transformers is not installed here)' in new("loop.py", "--task", "finetune")[1]
    assert "pip install" not in new("other.py", "--task", "lm")[1]
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(SystemExit) as end:
        runpy.run_path("loop.py", run_name="__main__")
    assert end.value.code == 'loop.py needs transformers: pip install "dtrain[hf]"'


def test_help_lists_the_tasks(new):
    assert ", ".join(TASKS) in " ".join(new("--help")[1].split())


def test_every_task_has_a_template_and_vice_versa():
    from importlib.resources import files

    names = {path.name for path in files("dtrain.cli").joinpath("templates").iterdir()}
    assert names == {f"{task}.py.txt" for task in TASKS}
