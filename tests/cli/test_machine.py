"""Facts are read right from files that look like those of other machines, and from programs that misbehave."""

from __future__ import annotations

import socket
import sys
import threading

import pytest
from dtrain.machine import CommandOutput, read_output, start_query

from dtrain.cli import env
from dtrain.cli.env import TorchBuild
from dtrain.launch import addresses


def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_shm_size_is_none_without_dev_shm(tmp_path):
    assert env.read_shm_bytes(tmp_path) is None
    (tmp_path / "dev/shm").mkdir(parents=True)
    assert env.read_shm_bytes(tmp_path) > 0


def test_hardware_counts_gpu_device_files_and_names_os(tmp_path):
    files = {
        "proc/meminfo": "MemTotal: 2 kB\nMemAvailable: 1 kB\n",
        "etc/os-release": 'NAME="X"\nPRETTY_NAME="Debian GNU/Linux 12"\n',
        "dev/nvidia0": "",
        "dev/nvidia11": "",
        "dev/nvidiactl": "",
    }
    found = env.read_hardware(None, write(tmp_path, files))
    assert found.gpus == env.Gpus(listed=(), device_files=2, problem=None)
    assert found.gpus.count == 2
    assert found.system.endswith(", Debian GNU/Linux 12")


SMI = {
    "no nvidia-smi": (None, (), None),
    "two": (
        CommandOutput(code=0, out="NVIDIA H200, 143771, 580.1\nTesla, 40, A, [N/A], 580.1\n", err=""),
        (
            env.Gpu(name="NVIDIA H200", memory_bytes=143771 * 2**20, driver="580.1"),
            env.Gpu(name="Tesla, 40, A", memory_bytes=0, driver="580.1"),
        ),
        None,
    ),
    "fails": (CommandOutput(code=9, out="NVIDIA-SMI has failed\n", err=""), (), "exit code 9: NVIDIA-SMI has failed"),
    "hangs": (CommandOutput(code=None, out="", err=""), (), "it did not answer within 30 s"),
}


@pytest.mark.parametrize(("said", "listed", "problem"), SMI.values(), ids=SMI)
def test_nvidia_smi_output_is_parsed(said, listed, problem):
    assert env.parse_gpus(said, 0) == env.Gpus(listed=listed, device_files=0, problem=problem)


def test_interfaces_of_this_machine_include_loopback():
    loopback = next(link for link in addresses.list_interfaces() if link.name == "lo")
    assert loopback.loopback
    assert loopback.up
    assert "127.0.0.1" in loopback.addresses


def test_ipv6_addresses_by_interface(tmp_path):
    text = "00000000000000000000000000000001 01 80 10 80       lo\nfd000000000000000000000000000002 02 40 00 80     eth0\n"
    root = write(tmp_path, {"proc/net/if_inet6": text})
    assert addresses.read_ipv6_addresses(root) == {"lo": ["::1"], "eth0": ["fd00::2"]}
    assert addresses.read_ipv6_addresses(tmp_path / "no ipv6") == {}


def test_resolve_names_gives_no_address_for_unknown_name():
    found = env.resolve_names(["127.0.0.1", "no-such-host.invalid", "." * 3])
    assert found == {"127.0.0.1": ("127.0.0.1",), "no-such-host.invalid": (), "...": ()}


def test_resolve_names_does_not_wait_for_unresponsive_name_server(monkeypatch):
    answered, before = threading.Event(), set(threading.enumerate())
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answered.wait(60) and [])
    assert env.resolve_names(["slow"], timeout_s=0.05) == {"slow": ()}
    (asking,) = set(threading.enumerate()) - before
    assert asking.daemon  # it does not hold up the end of the process
    answered.set()
    asking.join(60)


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
    assert env.parse_probe_output(said) == expected


def test_hanging_program_is_killed():
    process = start_query([sys.executable, "-c", "import time; time.sleep(60)"])
    assert read_output(process, timeout_s=0.05) == CommandOutput(code=None, out="", err="")
    with process.stdout, process.stderr:
        assert process.wait(timeout=60) == -9


def test_invalid_utf8_output_is_replaced():
    said = read_output(start_query([sys.executable, "-c", "import os; os.write(2, b'\\xff end'); exit(3)"]), timeout_s=60)
    assert (said.code, said.out, said.last_line) == (3, "", "\ufffd end")


def test_only_harmless_variables_are_shown_with_values():
    environ = {"RANK": "1", "NCCL_DEBUG": "INFO", "HF_TOKEN": "x", "PATH": "/bin", "MY_NCCL_KEY": "x", "http_proxy": "u:p@h"}
    assert env.visible_variables(environ) == {"NCCL_DEBUG": "INFO", "RANK": "1"}
    assert env.hidden_variable_names(environ) == ("HF_TOKEN", "http_proxy")
