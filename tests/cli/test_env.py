"""``dtrain env`` as a command: both forms tell the same, secrets stay secret, and a broken torch is a line of the report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from cli.test_env_checks import CUDA_TORCH, GPUS, SOUND, with_gpus, with_variables
from dtrain.cli import env_facts
from dtrain.cli.env import env as env_command
from dtrain.cli.env import format_facts

FAST_TORCH = """
from types import SimpleNamespace
__version__, version = "2.13.0+fake", SimpleNamespace(cuda=None, hip=None)
cuda = SimpleNamespace(is_available=lambda: False)
get_num_threads = lambda: 3
print("a library that prints while it is imported")
"""
FAST_DISTRIBUTED = "is_available = is_gloo_available = lambda: True\nis_nccl_available = lambda: False\n"


@pytest.fixture
def env(tmp_path):
    """``env(*args, torch=..., **variables)``: the command with a torch of a few lines in the place of the real one."""

    def run(*args, torch=FAST_TORCH, **variables):
        (tmp_path / "torch").mkdir(exist_ok=True)
        (tmp_path / "torch" / "__init__.py").write_text(torch)
        (tmp_path / "torch" / "distributed.py").write_text(FAST_DISTRIBUTED)
        kept = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME")}
        given = {**kept, "PYTHONPATH": str(tmp_path), **variables}
        command = [sys.executable, "-m", "dtrain", "env", *args]
        return subprocess.run(command, env=given, capture_output=True, text=True, timeout=120)

    return run


def test_json_holds_facts_and_findings(env):
    result = env("--json", RANK="0", HF_TOKEN="s3cret", MY_PASSWORD="s3cret", NCCL_DEBUG="WARN")
    told = json.loads(result.stdout)
    assert (result.returncode, result.stderr) == (1, "")
    assert told["torch"]["version"] == "2.13.0+fake"
    assert told["torch"]["threads"] == 3
    assert told["hardware"]["cores"]["usable"] == len(os.sched_getaffinity(0))
    assert told["hardware"]["memory"]["total_bytes"] > 0
    assert "127.0.0.1" in told["interfaces"][0]["addresses"]
    assert told["variables"] == {"NCCL_DEBUG": "WARN", "RANK": "0"}
    assert told["named_variables"] == ["HF_TOKEN", "PYTHONPATH"]
    assert "s3cret" not in result.stdout
    expected = {"level": "error", "what": "environment: RANK=0 is set but WORLD_SIZE is not", "do": "set both, or unset RANK"}
    assert expected in told["findings"]


def test_text_lists_facts_then_findings(env):
    result = env(RANK="0", HF_TOKEN="s3cret")
    assert (result.returncode, result.stderr) == (1, "")
    known, found = result.stdout.split("\n\n")
    names = [line.split("  ")[0] for line in known.splitlines()]
    assert names[:5] == ["dtrain", "python", "packages", "torch", "system"]
    assert "error: environment: RANK=0 is set but WORLD_SIZE is not; set both, or unset RANK\n" in found
    assert "s3cret" not in result.stdout
    assert "HF_TOKEN is set (value not shown)" in known


@pytest.mark.parametrize(
    ("variables", "code", "last"),
    [
        ({}, 0, "nothing is misconfigured"),
        ({"NCCL_DEBUG": "INFO"}, 0, "warning: environment: NCCL_DEBUG=INFO: every rank writes long logs; unset it unless you"),
        ({"NCCL_DEBUG": "WARN", "RANK": "0"}, 1, "error: environment: RANK=0 is set but WORLD_SIZE is not"),
    ],
    ids=["sound", "warning", "error"],
)
def test_exit_code_is_nonzero_only_for_errors(monkeypatch, capsys, variables, code, last):
    monkeypatch.setattr(env_facts, "collect_machine_facts", lambda: with_variables(**variables))
    assert env_command(as_json=False) == code
    assert capsys.readouterr().out.splitlines()[-1].startswith(last)


@pytest.mark.parametrize(
    ("torch", "problem"),
    [
        ("raise ImportError('libcudart.so.12: cannot open shared object file')", "ImportError: libcudart.so.12: cannot open"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "importing it was ended by signal 11"),
        ("raise SystemExit(0)", "it ended before it could say anything"),
    ],
    ids=["import error", "crash", "exit"],
)
def test_broken_torch_is_reported_as_finding(env, torch, problem):
    result = env(torch=torch)
    assert (result.returncode, result.stderr) == (1, "")
    assert f"error: torch: cannot be used: {problem}" in result.stdout


def test_env_command_imports_no_torch_itself(env):
    code = "import sys; from dtrain.cli.main import run\ntry: run()\nfinally: print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code, "env"], capture_output=True, text=True, timeout=180)
    assert result.stdout.endswith("\nFalse\n")
    assert "collectives: gloo" in result.stdout  # so the real torch was asked


def test_facts_of_machine_with_gpus_are_formatted():
    lines = format_facts(with_gpus(OMP_NUM_THREADS="4"))
    assert "torch       2.13.0+cu128, for CUDA 12.8, /lib/torch; collectives: gloo, nccl 2.28.9; 8 threads" in lines
    assert "gpus        2, 2 usable by torch" in lines
    assert "            1: H200, 140.0 GiB, driver 580.1" in lines
    assert "interface   lo 127.0.0.1 ::1 (loopback)" in lines
    assert "interface   eth1 (down)" in lines
    assert "variable    OMP_NUM_THREADS=4" in lines


def test_facts_of_machine_with_limits_are_formatted():
    hardware = SOUND.hardware
    limited = replace(
        SOUND,
        hardware=replace(
            hardware,
            cores=replace(hardware.cores, quota=2.5),
            memory=replace(hardware.memory, limit_bytes=4 * 2**30),
            shm_bytes=None,
            open_files=(256, None),
            gpus=replace(GPUS, listed=()),
        ),
        torch=None,
        torch_problem="ImportError: gone",
        addresses={"box": ()},
    )
    lines = format_facts(limited)
    assert "torch       unknown: ImportError: gone" in lines
    assert "cores       8 usable of 16, control group allows 2.5" in lines
    assert "memory      64.0 GiB, 60.0 GiB available, control group allows 4.0 GiB" in lines
    assert "/dev/shm    not there" in lines
    assert "open files  at most 256, can be raised to any number" in lines
    assert "gpus        2, 0 usable by torch" in lines
    assert "host        box: does not resolve" in lines


def test_torch_warnings_are_printed():
    told = format_facts(with_gpus(replace(CUDA_TORCH, warnings=("driver too old",))))
    assert "            it warns: driver too old" in told
