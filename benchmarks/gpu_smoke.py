"""The loop of the README and a killed run on a GPU, in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from gpu import ROOT
from gpu_device import Setting
from gpu_results import FAILED, Cell, Table

DTRAIN = (sys.executable, "-m", "dtrain")


def smoke(setting: Setting) -> Iterator[Table]:
    """Run the environment's report, and the loop of the README: alone, resumed, on two ranks, and in ``dtrain prove``."""
    block = (ROOT / "README.md").read_text().split("```python\n")[1].split("```")[0]
    with tempfile.TemporaryDirectory() as folder:
        loop, longer = Path(folder, "loop.py"), Path(folder, "longer.py")
        loop.write_text(block)
        longer.write_text(block.replace('"3ep"', '"5ep"'))
        commands: dict[str, Sequence[str]] = {
            "`dtrain env`": (*DTRAIN, "env"),
            "the loop of the README": (sys.executable, str(loop)),
            "the same with more epochs, by the launcher: resumes": (*DTRAIN, "launch", "-n", "1", str(longer)),
        }
        if not setting.toy:
            commands["the same on two ranks"] = (*DTRAIN, "launch", "-n", "2", str(longer))
            commands["`dtrain prove`"] = (*DTRAIN, "prove", str(loop))
        yield Table(
            title="The loop of the README",
            columns=("command", "result", "seconds", "last line"),
            rows=(_command_row(name, command, folder, setting.seconds) for name, command in commands.items()),
        )


def _command_row(name: str, command: Sequence[str], folder: str, timeout: float) -> list[Cell]:
    begun = time.perf_counter()
    code, output = _output_of(command, folder, timeout)
    if code != 0:
        print(output[-4000:], flush=True)
    last = (output.strip().splitlines() or [""])[-1].replace("|", "/")[:100]
    return [name, FAILED if code != 0 else "ok", time.perf_counter() - begun, last]


def _output_of(command: Sequence[str], folder: str, timeout: float) -> tuple[int | str, str]:
    """Run a command; return its exit code, or ``"timeout"``, and its output."""
    try:
        run = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout)
    except subprocess.TimeoutExpired as error:
        return "timeout", os.fsdecode(error.output or b"")
    return run.returncode, run.stdout


def resume(setting: Setting) -> Iterator[Table]:
    """Kill ``examples/pretrain_gpt.py`` by SIGKILL, resume it, and compare its losses with those of a run without a kill."""
    yield Table(
        title="`examples/pretrain_gpt.py`, killed by SIGKILL and resumed, against a run without a kill",
        columns=("killed after step", "resumed after step", "losses compared", "equal digit by digit", "result", "seconds"),
        rows=[_killed_row(setting)],
    )


def _killed_row(setting: Setting) -> list[Cell]:
    steps, interval = (6, 2) if setting.toy else (120, 20)
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        whole, killed = Path(folder, "whole"), Path(folder, "killed")
        options = ["--text", str(ROOT / "src/dtrain/**/*.py"), "--steps", str(steps), "--save-every", str(interval)]
        command = [sys.executable, str(ROOT / "examples/pretrain_gpt.py"), *options, "--out"]
        undisturbed = subprocess.Popen([*command, str(whole)], stdout=subprocess.DEVNULL)
        try:
            last = _kill_after(killed / "checkpoints" / f"step-{2 * interval:08}", [*command, str(killed)], killed)
            code, output = _output_of([*command, str(killed)], folder, setting.seconds)
            undisturbed.wait(setting.seconds)
        finally:
            undisturbed.kill()
        expected, resumed = losses(whole), losses(killed)
    after = resumed_after(output)
    equal = sum(resumed.get(step) == loss for step, loss in expected.items())
    well = code == 0 and undisturbed.returncode == 0 and 0 < after < steps and len(expected) == equal == steps
    if not well:
        print(output[-4000:], flush=True)
    return [last, after, len(expected), equal, "ok" if well else FAILED, time.perf_counter() - begun]


def _kill_after(checkpoint: Path, command: Sequence[str], run: Path) -> int:
    """Kill a run as soon as a checkpoint is there; return the last step that the run logged."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        while not checkpoint.exists() and process.poll() is None:
            time.sleep(0.02)
        process.kill()
    return max(losses(run), default=0)


def resumed_after(output: str) -> int:
    """Return the step after which a run says that it resumes; 0 if it began anew."""
    _, _, rest = output.partition("resuming after step ")
    return int(rest.split(",")[0]) if rest else 0


def losses(run: Path) -> dict[int, float]:
    """Return the logged losses of a run by step; of a repeated step the last one. A kill may have torn the last line."""
    values = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if "loss" in record:
            values[record["step"]] = record["loss"]
    return values
