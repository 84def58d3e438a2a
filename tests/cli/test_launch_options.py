"""``dtrain launch``: every option reaches the plan, under each of its spellings, and a wrong value is one line."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys

import pytest

from dtrain.cli.launch import parse_nproc
from dtrain.cli.main import run
from dtrain.errors import ConfigError
from dtrain.launch import supervisor
from dtrain.launch.launch_plan import LaunchPlan, NodeLayout


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with things to run, and no scheduler around it."""
    for name in list(os.environ):
        if name.startswith(("SLURM_", "OMPI_", "JOB_", "MASTER_", "NODE_", "WORLD_", "PET_", "TORCHELASTIC_", "CUDA_VISIBLE")):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.py").write_text("open('started', 'w')")
    (tmp_path / "bad.py").write_text("def f(:\n")
    (tmp_path / "latin.py").write_bytes(b"# \xff\n")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "train.py").touch()
    (tmp_path / "program").write_text("#!/bin/sh\n")
    (tmp_path / "program").chmod(0o755)
    return tmp_path


@pytest.fixture
def launch(here, monkeypatch, capfd):
    """Run the command line up to the start of the job; return the plan (None if it was refused) and the messages."""

    def launch_with(*args: str) -> tuple[LaunchPlan | None, str, str]:
        plans: list[LaunchPlan] = []
        monkeypatch.setattr(supervisor, "launch_job", lambda plan: plans.append(plan) or 0)
        # A folder is taken until the launcher ends, and here all launchers are one process.
        monkeypatch.setattr("dtrain.cli.launch.claim_run_dir", lambda folder, node_rank: None)
        monkeypatch.setattr(sys, "argv", ["dtrain", "launch", *args])
        with pytest.raises(SystemExit) as end:
            run()
        assert end.value.code == (0 if plans or set(args) & {"--version", "-h"} else 2)
        out, err = capfd.readouterr()
        return (plans[0] if plans else None), out, err

    return launch_with


def planned(launch, *args: str) -> LaunchPlan:
    plan, out, _ = launch(*args)
    assert plan is not None
    assert out == ""
    return plan


def test_minimal_command_line_gives_default_plan(launch, here):
    plan = planned(launch, "-n", "2", "good.py", "--lr", "1")
    assert (plan.target.kind, plan.target.name, plan.target.args) == ("script", "good.py", ("--lr", "1"))
    assert plan.layout == NodeLayout.one_node(2)
    assert plan.run_dir.parent == here / "runs"
    expected = LaunchPlan(target=plan.target, layout=plan.layout, run_dir=plan.run_dir)
    assert plan == expected


SPELLINGS = {
    "ranks": (["-n", "3"], ["--nproc", "3"], ["-n3"], ["--nproc=3"]),
    "ranks, of torchrun": (["-n", "3"], ["--nproc-per-node", "3"], ["--nproc_per_node=3"]),
    "ranks, of mpirun": (["-n", "3"], ["-np", "3"]),
    "ranks as there are GPUs": ([], ["--nproc-per-node", "auto"], ["-n", "1"]),
    "restarts": (["--max-restarts", "2"], ["--max_restarts=2"]),
    "one node": (
        ["-n", "2"],
        ["-n", "2", "--standalone"],
        ["-n", "2", "--standalone", "--nnodes=1", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"],
        ["-n", "2", "--nnodes", "1:1", "--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:29400", "--rdzv_id", "7"],
        ["-n", "2", "--rdzv-endpoint", "localhost:0"],
    ),
    "a place for static nodes": (
        ["-n2", "--nnodes=2", "--node-rank=0", "--master-addr=127.0.0.1", "--master-port=29400"],
        ["-n2", "--nnodes=2", "--node_rank=0", "--rdzv-backend=static", "--rdzv_endpoint=127.0.0.1:29400"],
        ["-n2", "--nnodes=2", "--node_rank=0", "--rdzv-backend=static", "--rdzv_endpoint=127.0.0.1"],
    ),
    "run folder": (["--run-dir", "r"], ["--run_directory", "r"]),
    "world size": (["-n", "2", "--world-size", "2"], ["-n", "2", "--world_size", "2"], ["-n", "2", "--world_size=-1"]),
    "base rank": (["-n", "2", "--base-rank", "0"], ["-n", "2", "--base_rank", "0"]),
    "node rank": (["-n", "2", "--node-rank", "0"], ["-n", "2", "--node_rank", "0"]),
    "address": (["--master-addr", ""], ["--master_addr", ""], ["--master_addr="], ["--master-addr=127.0.0.1"]),
    "output": (["--stdout", "o-{rank}", "--stderr", "e-{rank}"],),
}


@pytest.mark.parametrize("spellings", SPELLINGS.values(), ids=SPELLINGS)
def test_option_spellings_are_equivalent(launch, spellings):
    plans = [planned(launch, *given, "--run-dir", "r", "good.py") for given in spellings]
    assert all(plan == plans[0] for plan in plans)


def test_composer_command_line_is_accepted(launch, here):
    given = "-n 2 --world_size 2 --base_rank 0 --node_rank 0 --master_addr 127.0.0.1 --master_port 29400"
    given += " --run_directory r --stdout log-{rank} --stderr err-{local_rank} -v -m"
    plan, _, err = launch(*given.split(), "package.train", "--lr", "1")
    assert plan is not None
    assert (plan.target.kind, plan.layout, plan.run_dir) == ("module", NodeLayout.one_node(2), here / "r")
    assert (plan.output.stdout, plan.output.stderr) == ("log-{rank}", "err-{local_rank}")
    assert all(line.startswith("dtrain: launch: ") for line in err.splitlines())


MODES = {
    "module": ("module", "package.train", ["-m"], ["--module"], ["--module_mode"]),
    "command": ("command", "./program", ["-c"], ["--command"], ["--command_mode"], ["--no-python"], ["--no_python"]),
    "command of PATH": ("command", "sh", ["-c"]),
    "script": ("script", "good.py", []),
}


@pytest.mark.parametrize("row", MODES.values(), ids=MODES)
def test_mode_options_select_target_kind(launch, row):
    kind, name, *spellings = row
    for given in spellings:
        plan = planned(launch, *given, name, "-c", "--version")
        assert (plan.target.kind, plan.target.name, plan.target.args) == (kind, name, ("-c", "--version"))


TAKEN = {
    "grace": (["--grace", "0.5"], "grace_s", 0.5),
    "no grace": (["--grace", "0"], "grace_s", 0.0),
    "hang": (["--hang-timeout", "600"], "hang_timeout_s", 600.0),
    "restarts": (["--max-restarts", "3"], "max_restarts", 3),
    "signal by name": (["--stop-signal", "usr1"], "stop_signal", signal.SIGUSR1),
    "signal by full name": (["--stop-signal", "SIGUSR2"], "stop_signal", signal.SIGUSR2),
    "signal by number": (["--stop-signal", "10"], "stop_signal", 10),
    "bind": (["--bind"], "bind", True),
    "no preload": (["--no-preload"], "preload", ()),
    "preload": (["--preload", "torch, numpy.linalg"], "preload", ("torch", "numpy.linalg")),
    "preload as needed": ([], "preload", None),
}


@pytest.mark.parametrize(("given", "name", "value"), TAKEN.values(), ids=TAKEN)
def test_option_sets_plan_field(launch, given, name, value):
    assert getattr(planned(launch, *given, "good.py"), name) == value


def test_output_options_set_output_plan(launch):
    output = planned(launch, "-n", "16", "--log-ranks", "0,8-9", "--prefix", "{host} ", "good.py").output
    assert (output.shown, output.prefix) == (frozenset({0, 8, 9}), "{host} ")
    assert planned(launch, "-n", "2", "--log-ranks", "all", "good.py").output.shown == {0, 1}
    assert planned(launch, "-n", "2", "--log-ranks", "none", "good.py").output.shown == frozenset()


REFUSED = {
    "no script": ("", "missing argument 'SCRIPT'"),
    "missing script": ("nope.py", "no such script: 'nope.py'"),
    "missing script with a line end": ("'a\nb.py'", r"no such script: 'a\nb.py'"),
    "folder": (".", "'.' is a folder"),
    "syntax error": ("bad.py", "bad.py:1 is not valid Python"),
    "not utf-8": ("latin.py", "'latin.py' is not valid Python"),
    "no module": ("-m nope.nope", "no module named 'nope.nope'"),
    "too many ranks": ("-n 1000000 good.py", "-n must be an integer from 1 to 256, got 1000000"),
    "no number": ("-n", "option '-n' requires an argument"),
    "unknown option": ("--fast good.py", "no such option: --fast"),
    "unknown short option": ("-z good.py", "no such option: -z"),
    "run folder": ("--run-dir good.py good.py", "cannot use 'good.py' as the run folder"),
    "gpu without one": ("--nproc-per-node gpu good.py", "-n must not be gpu on a node without a GPU. "),
    "standalone on two nodes": ("--standalone --nnodes 2 good.py", "--standalone is one node, not --nnodes 2. "),
    "a meeting place that is not there": ("--rdzv-backend etcd good.py", "--rdzv-backend must be c10d or static, "),
    "tee": ("--tee 3 good.py", "--tee is an option of torchrun. Remove it, and pass --log-ranks all"),
    "redirects": ("--redirects=3 good.py", "--redirects is an option of torchrun. "),
    "folder of logs": ("--log_dir logs good.py", "--log_dir is an option of torchrun. Use --run-dir FOLDER"),
    "both modes": ("-m -c good.py", "-m and -c exclude each other. "),
    "missing command": ("-c no-such-program", "no program 'no-such-program' in PATH. "),
    "command that cannot be run": ("-c ./good.py", "'./good.py' cannot be run as a program. "),
    "command in this folder": ("-c good.py", "'good.py' cannot be run as a program. Name it as ./good.py "),
    "folder as a command": ("-c package", "'package' is a folder. "),
    "grace": ("--grace -1 good.py", "--grace must be a finite number at least 0 and at most 86400, got -1.0. "),
    "hang of no time": (
        "--hang-timeout 0 good.py",
        "--hang-timeout must be a finite number above 0 and at most 604800, got 0.0",
    ),
    "hang in words": (
        "--hang-timeout 5m good.py",
        "--hang-timeout must be a finite number above 0 and at most 604800, got '5m'. Use 600",
    ),
    "join": ("--join-timeout nan good.py", "--join-timeout must be a finite number above 0 and at most 604800, got nan. "),
    "restarts": ("--max-restarts -1 good.py", "--max-restarts must be an integer from 0 to 1000, got -1. "),
    "preload and not": ("--preload torch --no-preload good.py", "--preload and --no-preload exclude each other. "),
    "preload of no module": ("--preload torch,a/b good.py", "--preload must be names of modules"),
    "signal": ("--stop-signal KILL good.py", "--stop-signal must be TERM, USR1 or USR2, got 'KILL'. "),
    "world size": ("--world_size two good.py", "--world-size must be an integer from 1 to 1000000, got 'two'. "),
    "world smaller than a node": ("-n 8 --world_size 4 good.py", "-n 8 is more than all ranks"),
    "node rank": ("--node-rank x good.py", "--node-rank must be an integer from 0 to 4095, got 'x'. "),
    "negative base rank": ("--base-rank -2 good.py", "--base-rank must be an integer from 0 to 1000000, got -2. "),
    "port": ("--master-port 70000 good.py", "--master-port must be an integer from 1 to 65535, got 70000. "),
    "address with a port": ("--master-addr n0:29500 good.py", "--master-addr must be a host, got 'n0:29500'. "),
    "nodes": ("--nnodes many good.py", "--nnodes must be a number or MIN:MAX, got 'many'. "),
    "rank that is not there": ("-n 2 --log-ranks 0,2 good.py", "--log-ranks '0,2': there is no rank 2. "),
    "ranks in words": ("--log-ranks first good.py", "--log-ranks must be ranks as in 0,8-15"),
    "prefix": ("--prefix '{node}' good.py", "--prefix '{node}': no field {node}. "),
    "file name": ("--stdout '{rnk}' good.py", "--stdout '{rnk}': no field {rnk}. "),
    "empty file name": ("--stderr '' good.py", "--stderr must name a file, got ''. "),
    "path to compare": ("--check-path nope good.py", "--check-path 'nope' does not exist. "),
}


@pytest.mark.parametrize(("given", "message"), REFUSED.values(), ids=REFUSED)
def test_invalid_value_prints_one_line_and_creates_nothing(launch, here, given, message):
    before = sorted(os.listdir(here))
    plan, out, err = launch(*shlex.split(given))
    assert (plan, out, err.count("\n")) == (None, "", 1)
    assert err.startswith(f"dtrain: launch: {message}")
    assert re.search(r"\. [A-Z]", err)
    assert sorted(os.listdir(here)) == before


@pytest.mark.parametrize("text", ["", "x", "1.5", "1e3", "0x2", "²", "1_0", "9" * 30, "0", "-1", "257"])
def test_nproc_must_be_decimal_integer_in_range(text):
    with pytest.raises(ConfigError, match="-n must be an integer from 1 to 256"):
        parse_nproc(text, gpus=0)


def test_verbose_prints_plan_in_one_line(launch):
    _, out, err = launch("-n", "2", "-v", "--grace", "3", "--run-dir", "r", "good.py", "two words", "a\nb\x1b[2J")
    # The plan, and the start and the end of each launch.
    assert (out, err.count("\n")) == ("", 3)
    assert err.startswith("dtrain: launch: ranks 0-1 of 2: python good.py 'two words' ")
    assert r"a\x0ab\x1b[2J" in err
    assert "grace 3 s after a failure, 3 s after a signal" in err


def test_version_needs_no_script(launch):
    assert launch("--version")[1].startswith("dtrain ")


def test_help_groups_options_and_gives_examples(launch):
    _, out, err = launch("-h")
    assert err == ""
    headings = [line for line in out.splitlines() if line.endswith(":") and not line.startswith(" ")]
    nodes = "Several nodes (start the same line once on each):"
    assert headings == ["Arguments:", "Ranks:", "Output and files:", "Failures and signals:", nodes, "Other:", "Examples:"]
    assert "_mode" not in out
    assert "--run_directory" not in out
    assert "\n  dtrain launch -n 8 train.py --lr 3e-4  " in out
    assert max(map(len, out.partition("Examples:")[0].splitlines())) <= 80


def test_script_arguments_are_passed_byte_for_byte(here):
    odd = [b"--help", b"\xff\xfe", b"$HOME", b"~", b"*", b"", b"a b", b"'\"", b"new\nline", "ü€".encode(), b"--", b"-m", b"-n"]
    odd += [b"7", b"--version", b"-h", b"\n"]
    (here / "show.py").write_text("import os, sys; open('seen', 'wb').write(b'\\0'.join(map(os.fsencode, sys.argv[1:])))")
    command = [sys.executable, "-m", "dtrain", "launch", "-n", "1", "--no-preload", "show.py", *odd]
    result = subprocess.run(command, capture_output=True, timeout=90)
    assert (result.returncode, result.stdout) == (0, b"")
    assert all(
        line.startswith((b"dtrain: launch: starting ", b"dtrain: launch: done; ")) for line in result.stderr.splitlines()
    )
    assert (here / "seen").read_bytes().split(b"\0") == odd
    (record,) = here.glob("runs/*/launch.json")
    assert list(map(os.fsencode, json.loads(record.read_text())["target"]["args"])) == odd
