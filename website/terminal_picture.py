"""Record a run that is killed and resumed, and draw the terminal: ``python website/terminal_picture.py``.

The script runs the commands that the picture shows, in a temporary folder, and writes their output to docs/images as one SVG
for each colour scheme. Two things are left out: the text that the trained model generates, and the path of the folder.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
OPTIONS = "examples/pretrain_gpt.py --steps 120 --save-every 40"
KILLED_AFTER = 80  # step of the checkpoint that the second command resumes

COLOURS = {
    "light": {"ground": "#ffffff", "frame": "#d0d7de", "text": "#1f2328", "prompt": "#116329", "kill": "#b31d28"},
    "dark": {"ground": "#0d1117", "frame": "#30363d", "text": "#e6edf3", "prompt": "#56d364", "kill": "#ff7b72"},
}
LINE, CHAR, PAD = 20, 7.83, 18  # pixels


def start(command: str, folder: Path) -> subprocess.Popen[str]:
    """Start a command line of ``dtrain`` in ``folder``."""
    program, *words = command.split()
    found = Path(sys.executable).with_name(program)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [found, *words], cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def lines(process: subprocess.Popen[str], folder: Path) -> Iterator[str]:
    """Yield the lines that a command prints, without the path of the folder; end before the generated text."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.endswith("sample:\n"):
            break
        yield line.rstrip().replace(f"{folder}/", "")


def record() -> list[str]:
    """Run, kill with SIGKILL and resume on another number of processes; return what the terminal shows."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        (folder / "examples").symlink_to(ROOT / "examples")
        command = f"dtrain launch -n 2 {OPTIONS}"
        shown = [f"$ {command} &"]
        process = start(command, folder)
        checkpoint = folder / "ckpt" / "pretrain_gpt" / "checkpoints" / f"step-{KILLED_AFTER:08}"
        while not checkpoint.exists():
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        shown += [*lines(process, folder), "$ kill -9 $!", ""]
        command = f"dtrain launch -n 3 {OPTIONS}"
        process = start(command, folder)
        shown += [f"$ {command}", *lines(process, folder)]
        process.communicate()
        assert process.returncode == 0, shown
    return shown


def drawing(shown: list[str], scheme: str) -> str:
    """Return the SVG of a terminal with these lines."""
    colours = COLOURS[scheme]
    width, height = round(max(map(len, shown)) * CHAR) + 2 * PAD, len(shown) * LINE + 2 * PAD
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">',
        "<title>A run on two processes is killed with kill -9 and resumed on three</title>",
        f"<style>text {{ font: 13px ui-monospace, Menlo, Consolas, monospace; fill: {colours['text']}; white-space: pre; }}",
        f".prompt {{ fill: {colours['prompt']}; font-weight: 600; }}",
        f".kill {{ fill: {colours['kill']}; font-weight: 600; }}</style>",
        f'<rect x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="8"',
        f'    fill="{colours["ground"]}" stroke="{colours["frame"]}"/>',
    ]
    for number, line in enumerate(shown):
        kind = ' class="kill"' if "kill -9" in line else ' class="prompt"' if line.startswith("$") else ""
        parts.append(f'<text x="{PAD}" y="{PAD + number * LINE + 14}"{kind} xml:space="preserve">{escape(line)}</text>')
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    recorded = record()
    for each in COLOURS:
        (IMAGES / f"terminal-{each}.svg").write_text(drawing(recorded, each))
    print("\n".join(recorded))
