"""``dtrain env`` as a command: both forms tell the same, secrets stay secret, and a broken torch is a line of the report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from dtrain.cli.env import RULES, MachineFacts, TorchBuild, check_machine, format_facts, parse_probe_output
from dtrain.cli.env import env as env_command
from dtrain.machine import CommandOutput, CpuCores, Gpu, Gpus, Hardware, HostMemory, NetworkInterface
from dtrain.packages import Package

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
    listed, findings = result.stdout.split("\n\n")
    names = [line.split("  ")[0] for line in listed.splitlines()]
    assert names[:5] == ["dtrain", "python", "packages", "torch", "system"]
    assert "error: environment: RANK=0 is set but WORLD_SIZE is not; set both, or unset RANK\n" in findings
    assert "s3cret" not in result.stdout
    assert "HF_TOKEN is set (value not shown)" in listed


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
    monkeypatch.setattr("dtrain.cli.env.collect_machine_facts", lambda: with_variables(**variables))
    assert env_command(as_json=False) == code
    assert capsys.readouterr().out.splitlines()[-1].startswith(last)


def test_broken_torch_is_reported_as_finding(env):
    result = env(torch="import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    assert (result.returncode, result.stderr) == (1, "")
    assert "error: torch: cannot be used: importing it was ended by signal 11" in result.stdout


@pytest.mark.costly
def test_env_command_imports_no_torch_itself(env):
    code = "import sys; from dtrain.cli.main import run\ntry: run()\nfinally: print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code, "env"], capture_output=True, text=True, timeout=180)
    assert result.stdout.endswith("\nFalse\n")
    assert "collectives: gloo" in result.stdout  # so the real torch was asked


def test_facts_of_machine_with_gpus_are_formatted():
    lines = format_facts(with_gpus(replace(CUDA_TORCH, warnings=("driver too old",)), OMP_NUM_THREADS="4"))
    assert "            it warns: driver too old" in lines
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


GIB, MIB = 2**30, 2**20
LOOPBACK = NetworkInterface(name="lo", addresses=("127.0.0.1", "::1"), loopback=True, up=True)
ETHERNET = NetworkInterface(name="eth0", addresses=("192.0.2.7",), loopback=False, up=True)
UNPLUGGED = NetworkInterface(name="eth1", addresses=(), loopback=False, up=False)
TORCH = TorchBuild(
    version="2.13.0+cpu", folder="/lib/torch", cuda=None, devices=(), gloo=True, nccl=None, threads=8, warnings=()
)
CUDA_TORCH = replace(TORCH, version="2.13.0+cu128", cuda="12.8", devices=("H200", "H200"), nccl="2.28.9")
GPUS = Gpus(listed=(Gpu(name="H200", memory_bytes=140 * GIB, driver="580.1"),) * 2, device_files=2, problem=None)

SOUND = MachineFacts(
    dtrain="0.1.0",
    python="3.12.3",
    executable="/bin/python",
    packages=(
        Package(name="torch", version="2.13.0+cpu", at_least="2.11"),
        Package(name="einops", version="1.0", at_least=None),
    ),
    torch=TORCH,
    torch_problem=None,
    hardware=Hardware(
        system="Linux",
        cores=CpuCores(present=16, usable=8, quota=None),
        memory=HostMemory(total_bytes=64 * GIB, available_bytes=60 * GIB, limit_bytes=None),
        shm_bytes=32 * GIB,
        open_files=(1024, 4096),
        gpus=Gpus(listed=(), device_files=0, problem=None),
    ),
    host="box",
    addresses={"box": ("192.0.2.7",)},
    interfaces=(LOOPBACK, ETHERNET, UNPLUGGED),
    variables={},
    named_variables=("HF_TOKEN",),
)


def with_hardware(**changes):
    return replace(SOUND, hardware=replace(SOUND.hardware, **changes))


def with_gpus(torch=CUDA_TORCH, gpus=GPUS, **variables):
    return replace(with_hardware(gpus=gpus), torch=torch, variables=variables)


def with_variables(**variables):
    return replace(SOUND, variables=variables)


def with_packages(*packages):
    return replace(SOUND, packages=packages)


OF_A_LAUNCH = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "x"}
ADDRESSES = {"box": ("192.0.2.7",), "127.0.0.1": ("127.0.0.1",)}

HEALTHY = {
    "a CPU machine": SOUND,
    "GPUs": with_gpus(),
    "one GPU of two made visible": with_gpus(replace(CUDA_TORCH, devices=("H200",)), CUDA_VISIBLE_DEVICES="1"),
    "a CUDA build on a CPU machine": replace(SOUND, torch=replace(CUDA_TORCH, devices=())),
    "inside a launch": replace(with_variables(**OF_A_LAUNCH), addresses=ADDRESSES),
    "a world of one": with_variables(RANK="0", WORLD_SIZE="1"),
    "threads within the cores": with_variables(OMP_NUM_THREADS="8"),
    "threads by nesting level": with_variables(OMP_NUM_THREADS="4,2"),
    "a quota that is respected": replace(
        with_hardware(cores=CpuCores(present=16, usable=8, quota=2.5)), variables={"OMP_NUM_THREADS": "2"}
    ),
    "an interface for gloo": with_variables(GLOO_SOCKET_IFNAME="eth0"),
    "two interfaces for gloo": with_variables(GLOO_SOCKET_IFNAME="eth0,lo"),
    "a prefix for NCCL": with_variables(NCCL_SOCKET_IFNAME="eth"),
    "an exact name for NCCL": with_variables(NCCL_SOCKET_IFNAME="=eth0"),
    "all but some for NCCL": with_variables(NCCL_SOCKET_IFNAME="^docker,lo"),
    "no limit of open files": with_hardware(open_files=(None, None)),
    "an unknown host, but an interface for gloo": replace(with_variables(GLOO_SOCKET_IFNAME="lo"), addresses={"box": ()}),
    "harmless values of costly switches": with_variables(NCCL_DEBUG="WARN", CUDA_LAUNCH_BLOCKING="0"),
}

FEW_FILES = "warning: limits: 256 open files; ranks hold sockets, pipes and shared tensors open"
WRONG = {
    "package missing": (
        with_packages(Package(name="einops", version=None, at_least="0.8")),
        "error: packages: einops is not installed; pip install einops",
    ),
    "torch too old": (
        with_packages(Package(name="torch", version="2.10.1+cu128", at_least="2.11")),
        "error: packages: torch 2.10.1+cu128 is older than 2.11, the first that dtrain runs with; pip install 'torch>=2.11'",
    ),
    "torch broken": (
        replace(SOUND, torch=None, torch_problem="ImportError: libcudart.so.12"),
        "error: torch: cannot be used: ImportError: libcudart.so.12; try `/bin/python -c 'import torch'`; reinstall it",
    ),
    "torch without gloo": (replace(SOUND, torch=replace(TORCH, gloo=False)), "error: torch: is built without gloo"),
    "CPU build with GPUs": (with_gpus(TORCH), "error: torch: 2.13.0+cpu is a CPU build, but there are 2 NVIDIA GPUs; install"),
    "device files only": (
        with_gpus(TORCH, Gpus(listed=(), device_files=1, problem=None)),
        "error: torch: 2.13.0+cpu is a CPU build, but there are 1 NVIDIA GPUs",
    ),
    "driver too old": (
        with_gpus(replace(CUDA_TORCH, devices=(), warnings=("The NVIDIA driver on your system is too old",))),
        "error: torch: cannot use any of 2 GPUs: The NVIDIA driver on your system is too old; match",
    ),
    "GPUs unusable without a word": (
        with_gpus(replace(CUDA_TORCH, devices=())),
        "error: torch: cannot use any of 2 GPUs: torch gives no reason",
    ),
    "GPUs hidden": (
        with_gpus(replace(CUDA_TORCH, devices=()), CUDA_VISIBLE_DEVICES=""),
        "warning: gpus: CUDA_VISIBLE_DEVICES='' hides all 2 GPUs; unset it",
    ),
    "no NCCL": (with_gpus(replace(CUDA_TORCH, nccl=None)), "error: torch: is built without NCCL"),
    "driver broken": (
        with_gpus(gpus=Gpus(listed=(), device_files=2, problem="exit code 9: no driver")),
        "error: gpus: nvidia-smi failed: exit code 9: no driver; if there is a GPU, reload",
    ),
    "driver without a GPU": (
        with_gpus(TORCH, Gpus(listed=(), device_files=0, problem="exit code 6: No devices were found")),
        "warning: gpus: nvidia-smi failed: exit code 6: No devices were found",
    ),
    "RANK alone": (
        with_variables(RANK="3", MASTER_PORT="1"),
        "error: environment: RANK=3 is set but WORLD_SIZE is not; set both, or unset RANK MASTER_PORT",
    ),
    "WORLD_SIZE alone": (with_variables(WORLD_SIZE="2"), "error: environment: WORLD_SIZE=2 is set but RANK is not"),
    "RANK beyond": (
        with_variables(RANK="2", WORLD_SIZE="2"),
        "error: environment: needs 0 <= RANK < WORLD_SIZE, got RANK=2 WORLD_SIZE=2",
    ),
    "RANK in letters": (
        with_variables(RANK="a", WORLD_SIZE="2"),
        "error: environment: needs 0 <= RANK < WORLD_SIZE, got RANK=a",
    ),
    "no meeting place": (
        replace(with_variables(RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1"), addresses=ADDRESSES),
        "error: environment: WORLD_SIZE=2 needs MASTER_ADDR and MASTER_PORT; set them, or unset RANK WORLD_SIZE MASTER_ADDR",
    ),
    "left over in a shell": (
        replace(with_variables(RANK="0", WORLD_SIZE="4", MASTER_ADDR="127.0.0.1", MASTER_PORT="1"), addresses=ADDRESSES),
        "warning: environment: WORLD_SIZE=4 makes `python loop.py` wait for 3 more ranks; if no launcher set it, unset RANK",
    ),
    "MASTER_ADDR left over": (
        replace(with_variables(MASTER_ADDR="127.0.0.1"), addresses=ADDRESSES),
        "warning: environment: MASTER_ADDR is set but RANK is not, maybe by an old launch; unset MASTER_ADDR",
    ),
    "MASTER_ADDR unknown": (
        replace(with_variables(**OF_A_LAUNCH | {"MASTER_ADDR": "gone"}), addresses={"box": ("192.0.2.7",), "gone": ()}),
        "error: network: MASTER_ADDR=gone does not resolve; correct or unset it",
    ),
    "host unknown": (
        replace(SOUND, addresses={"box": ()}),
        "warning: network: the host name 'box' does not resolve, and gloo listens where it points to; add it to /etc/hosts",
    ),
    "no loopback": (replace(SOUND, interfaces=(ETHERNET,)), "error: network: no loopback interface with 127.0.0.1 is up"),
    "loopback down": (replace(SOUND, interfaces=(replace(LOOPBACK, up=False), ETHERNET)), "error: network: no loopback"),
    "gloo's interface missing": (
        with_variables(GLOO_SOCKET_IFNAME="ib0"),
        "error: network: GLOO_SOCKET_IFNAME=ib0: no interface 'ib0' is up; choose from lo, eth0, or unset it",
    ),
    "gloo's interface down": (
        with_variables(GLOO_SOCKET_IFNAME="eth0,eth1"),
        "error: network: GLOO_SOCKET_IFNAME=eth0,eth1: no",
    ),
    "NCCL's interface missing": (
        with_gpus(NCCL_SOCKET_IFNAME="ib"),
        "error: network: NCCL_SOCKET_IFNAME=ib matches no interface that is up; choose from lo, eth0, or unset it",
    ),
    "NCCL's interface by its whole name": (with_gpus(NCCL_SOCKET_IFNAME="=eth"), "error: network: NCCL_SOCKET_IFNAME==eth"),
    "all of NCCL's interfaces excluded": (with_gpus(NCCL_SOCKET_IFNAME="^lo,eth"), "error: network: NCCL_SOCKET_IFNAME=^lo"),
    "NCCL's interface missing on a CPU machine": (with_variables(NCCL_SOCKET_IFNAME="ib"), "warning: network: NCCL_SOCKET"),
    "threads in letters": (
        with_variables(OMP_NUM_THREADS="all"),
        "warning: environment: OMP_NUM_THREADS=all is not a number of threads; unset it",
    ),
    "no threads": (with_variables(OMP_NUM_THREADS="0"), "warning: environment: OMP_NUM_THREADS=0 is not a number of threads"),
    "more threads than cores": (
        with_variables(OMP_NUM_THREADS="9"),
        "warning: environment: OMP_NUM_THREADS=9, but this process may use 8 cores; unset it",
    ),
    "more threads than the quota": (
        replace(with_hardware(cores=CpuCores(present=16, usable=8, quota=2.5)), variables={"OMP_NUM_THREADS": "3"}),
        "warning: environment: OMP_NUM_THREADS=3, but this process may use 2 cores",
    ),
    "quota below the cores": (
        with_hardware(cores=CpuCores(present=16, usable=8, quota=0.5)),
        "warning: cores: the control group allows 0.5 of 8 cores, and libraries start a thread for each; set OMP_NUM",
    ),
    "no shared memory": (with_hardware(shm_bytes=None), "warning: memory: there is no /dev/shm"),
    "Docker's shared memory": (with_hardware(shm_bytes=64 * MIB), "warning: memory: /dev/shm has 64 MiB"),
    "few open files": (
        with_hardware(open_files=(256, 4096)),
        f"{FEW_FILES}; ulimit -n 1024",
    ),
    "few open files, and few more to have": (
        with_hardware(open_files=(256, 512)),
        f"{FEW_FILES}; ulimit -n 512",
    ),
    "few open files, and no more to have": (
        with_hardware(open_files=(256, 256)),
        f"{FEW_FILES}; ask",
    ),
    "every kernel waited for": (
        with_variables(CUDA_LAUNCH_BLOCKING="1"),
        "warning: environment: CUDA_LAUNCH_BLOCKING=1: every",
    ),
    "NCCL talks": (with_variables(NCCL_DEBUG="info"), "warning: environment: NCCL_DEBUG=info: every rank writes long logs"),
}


@pytest.mark.parametrize("facts", HEALTHY.values(), ids=HEALTHY)
def test_sound_machine_has_no_findings(facts):
    assert check_machine(facts) == []


@pytest.mark.parametrize(("facts", "expected"), WRONG.values(), ids=WRONG)
def test_single_problem_gives_one_finding(facts, expected):
    (finding,) = map(str, check_machine(facts))
    assert finding.startswith(expected)
    assert "; " in finding  # and the remedy
    assert "\n" not in finding


def test_every_rule_has_a_failing_case():
    assert [rule.__name__ for rule in RULES if not any(list(rule(facts)) for facts, _ in WRONG.values())] == []


def test_errors_are_listed_before_warnings():
    facts = replace(SOUND, addresses={"box": ()}, interfaces=(ETHERNET,))  # of two rules, the first of which warns
    assert [finding.level for finding in check_machine(facts)] == ["error", "warning"]


def test_missing_torch_is_reported_once():
    facts = replace(with_packages(Package(name="torch", version=None, at_least="2.11")), torch=None, torch_problem="no torch")
    assert [finding.what for finding in check_machine(facts)] == ["packages: torch is not installed"]


PROBE = (
    '{"version": "2", "folder": "/t", "cuda": null, "devices": [], "gloo": true, "nccl": null, "threads": 1, "warnings": ["w"]}'
)
BUILD = TorchBuild(version="2", folder="/t", cuda=None, devices=(), gloo=True, nccl=None, threads=1, warnings=("w",))
PROBED = {
    "facts": (CommandOutput(code=0, out=f"noise\n{PROBE}\n", err="noise"), BUILD),
    "noise after": (CommandOutput(code=0, out=f"{PROBE}\nbye\n", err=""), BUILD),
    "nothing": (CommandOutput(code=0, out="bye\n", err=""), "it ended before it could say anything"),
    "error": (CommandOutput(code=1, out="", err="Traceback\nImportError: no\n\n"), "ImportError: no"),
    "silent error": (CommandOutput(code=1, out="", err=""), "it printed nothing"),
    "signal": (CommandOutput(code=-11, out="", err=""), "importing it was ended by signal 11"),
    "hang": (CommandOutput(code=None, out="", err=""), "importing it took more than 120 s"),
}


@pytest.mark.parametrize(("said", "expected"), PROBED.values(), ids=PROBED)
def test_probe_output_is_parsed_as_facts_or_problem(said, expected):
    assert parse_probe_output(said) == expected
