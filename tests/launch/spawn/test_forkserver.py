"""Modules to preload, found in the program's own files."""

from __future__ import annotations

import os
import signal
import time

import pytest

from dtrain.launch.launch_plan import Target
from dtrain.launch.processes import ProcessRequest
from dtrain.launch.starter import PreloadModules, find_preload_modules, start_forkserver


def loaded(folder, source, others=None):
    for name, text in {"script": source, **(others or {})}.items():
        path = folder / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return find_preload_modules(Target(kind="script", name=str(folder / "script.py")))


@pytest.mark.parametrize(
    ("source", "others", "expected"),
    [
        ("import os, json.decoder", {}, PreloadModules()),
        ("import torch", {}, PreloadModules(needed=("torch",))),
        ("def f():\n    from torch import nn", {}, PreloadModules(needed=("torch",), optional=("torch.nn",))),
        ("import transformers", {}, PreloadModules(needed=("torch",))),
        ("import numpy.linalg, tensordict", {}, PreloadModules(needed=("torch",), optional=("numpy.linalg", "tensordict"))),
        ("import model", {"model": "import os"}, PreloadModules()),
        ("import model", {"model": "import torch.nn"}, PreloadModules(needed=("torch",), optional=("torch.nn",))),
        ("from parts import block", {"parts/block": "import torch"}, PreloadModules(needed=("torch",))),
        ("import a", {"a": "import b", "b": "import a, torch"}, PreloadModules(needed=("torch",))),
        ("import torch\ntorch.optim.SGD", {}, PreloadModules(needed=("torch",), optional=("torch._dynamo",))),
        ("import os\noptimize()", {}, PreloadModules()),
        ("not python at all", {}, PreloadModules()),
    ],
    ids=[
        "stdlib",
        "torch",
        "in a function",
        "another",
        "several",
        "own",
        "own with torch",
        "own package",
        "circle",
        "training",
        "own optim",
        "broken",
    ],
)
def test_preloaded_modules_are_imports_of_program(tmp_path, source, others, expected):
    assert loaded(tmp_path, source, others) == expected


def test_dtrain_names_preload_their_modules(tmp_path):
    modules = loaded(tmp_path, "import dtrain as dt\ndt.init_dist()\n")
    assert modules.needed == ("torch",)
    assert "dtrain.dist.init" in modules.optional
    assert "dtrain.shard.fsdp" not in modules.optional


def test_package_target_is_read_from_its_main_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").write_text("import torch")
    assert find_preload_modules(Target(kind="module", name="package")).needed == ("torch",)


def test_non_python_command_preloads_nothing():
    assert find_preload_modules(Target(kind="command", name="echo")) == PreloadModules()


def test_unsafe_module_prevents_fork_requested_during_preload(tmp_path, monkeypatch):
    """Ranks are requested while modules still load. Forked then, they would run beside the ranks started in their place."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "with_thread.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()"
    )
    (tmp_path / "script.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    fd = os.open(os.devnull, os.O_RDWR)
    common = {**os.environ, "PYTHONPATH": str(tmp_path)}
    target = Target(kind="script", name=str(tmp_path / "script.py"))
    preloaded = start_forkserver(target, PreloadModules(needed=("with_thread",)), common, log_fd=fd)
    try:
        preloaded.request_process(ProcessRequest(id=0, kind="rank", fds={"stdout": fd, "stderr": fd}, environment={}))
        said, deadline = [], time.monotonic() + 60
        while not said and time.monotonic() < deadline:
            said += preloaded.read_messages()
            time.sleep(0.01)
        time.sleep(1)  # a fork is there within milliseconds
        assert said + list(preloaded.read_messages()) == [{"unsafe": "importing with_thread started 1 thread"}]
        assert not (tmp_path / "ran").exists()
    finally:
        os.kill(preloaded.pid, signal.SIGKILL)
        os.waitpid(preloaded.pid, 0)
        preloaded.channel.close()
        os.close(fd)
