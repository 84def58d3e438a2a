"""Examples as a user runs them: launched on several processes, with their own default input; and how they ended."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
from safetensors.torch import load_file

from dtrain.checkpoint.checkpoint_info import latest_checkpoint

EXAMPLES = Path(__file__).parents[1] / "examples"
PATIENCE_S = 1800  # a whole run takes minutes alone, and the machine may be busy

_NUMBER = r"-?\d+(?:\.\d+)?"
_LAST_LINE = re.compile(
    rf"^(?:\[rank \d+\] )?(?P<what>.+?) (?P<value>{_NUMBER})(?: [\w/]+)?, baseline (?P<baseline>{_NUMBER}) \((?P<of>.+)\)$",
    re.M,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """Last line of an example: its value beside a baseline."""

    what: str
    value: float
    baseline: float


def launched(script: str, *options: str, out: Path, n: int = 2, env: dict[str, str] | None = None) -> str:
    """Run ``dtrain launch -n N examples/SCRIPT --out OUT OPTIONS`` and return its output; ``n=1`` runs without launcher."""
    launcher = ["-m", "dtrain", "launch", "-n", str(n)] if n > 1 else []
    done = subprocess.run(
        [sys.executable, *launcher, str(EXAMPLES / script), "--out", str(out), *options],
        capture_output=True, text=True, timeout=PATIENCE_S, cwd=out.parent,
        env=environment(HF_HUB_OFFLINE="1", **(env or {})),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def here(script: str, *options: str, out: Path) -> str:
    """Run the example in this process, as one rank, and return its output. This saves a start and an import of torch."""
    arguments = [script, "--out", str(out), *options]
    with (
        contextlib.redirect_stdout(io.StringIO()) as printed,
        contextlib.chdir(out.parent),
        mock.patch.object(sys, "argv", arguments),
        torch.random.fork_rng(devices=[]),
    ):
        runpy.run_path(str(EXAMPLES / script), run_name="__main__")
    return printed.getvalue()


def last_files(out: Path) -> dict[str, bytes]:
    """The files of tensors of an example's last checkpoint, byte for byte."""
    folder = latest_checkpoint(out / "checkpoints")
    assert folder is not None
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


def last_tensors(out: Path) -> dict[str, bytes]:
    """Weights, optimizer state and random state of it, as each rank stored them."""
    folder = latest_checkpoint(out / "checkpoints")
    assert folder is not None
    files = {path.name: load_file(path) for path in sorted(folder.glob("*.safetensors"))}
    return {f"{file} {key}": tensor.numpy().tobytes() for file, tensors in files.items() for key, tensor in tensors.items()}


def ended(printed: str, what: str = "") -> Ending:
    """Return the last line with a value and its baseline, of the lines whose ``what`` begins with this text."""
    lines = [line for line in _LAST_LINE.finditer(printed) if line["what"].startswith(what)]
    assert lines, f"no line '{what}<what> <value>, baseline <value> (<what that is>)' in:\n{printed}"
    return Ending(what=lines[-1]["what"], value=float(lines[-1]["value"]), baseline=float(lines[-1]["baseline"]))


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", **more}


def processes_of(mark: str) -> dict[int, bool]:
    """Processes of a job, by an environment variable that all of them inherit: pid -> whether it runs the script."""
    processes: dict[int, bool] = {}
    for folder in Path("/proc").iterdir():
        try:
            env = (folder / "environ").read_bytes().split(b"\0") if folder.name.isdigit() else []
            line = (folder / "cmdline").read_bytes().split(b"\0") if env else []
        except OSError:  # it has ended, or is not ours
            continue
        if f"TEST_JOB={mark}".encode() in env:
            processes[int(folder.name)] = b"".join(line[1:2]).startswith(str(EXAMPLES).encode())  # the launcher runs -m dtrain
    return processes


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"gave up waiting until {what}"
        time.sleep(0.02)


@contextlib.contextmanager
def job(arguments: list[str], cwd: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Yield a running job and its mark; end every process of it."""
    mark = uuid.uuid4().hex
    with (cwd / f"{mark}.log").open("wb") as log:
        process = subprocess.Popen(arguments, cwd=cwd, stdout=log, stderr=log, env=environment(TEST_JOB=mark))
    try:
        yield process, mark
    finally:
        for pid in processes_of(mark):
            os.kill(pid, signal.SIGKILL)
        process.wait()


def ranks_of(mark: str) -> list[int]:
    return [pid for pid, is_rank in processes_of(mark).items() if is_rank]
