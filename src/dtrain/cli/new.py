"""Define ``dtrain new``: write a training loop to start from into a new file."""

from __future__ import annotations

import re
import shlex
import sys
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from dtrain.errors import ConfigError, escape_unprintable
from dtrain.packages import install_command

EXAMPLES = """
dtrain new loop.py                  for your model, data and loss
dtrain new train_gpt.py --task lm
dtrain new loop.py --task vision --force
"""

TASKS = {
    "blank": "your own model, data and loss, with random numbers until then",
    "lm": "a byte-level language model, on the source code of Python",
    "vision": "image classification, on drawn images",
    "finetune": "text classification, with a model of transformers",
    "diffusion": "image generation by diffusion, on drawn images",
}
"""Description of each task. ``templates`` has a file for each task: a loop named ``loop.py``, which runs unchanged."""

# The name also occurs in the text of the loop.
_LOOP_NAME = re.compile(r"[\w-]+\.py", re.ASCII)
_RESERVED_NAMES = {"dtrain", "numpy", "tensordict", "torch", "transformers", "tokenizers"}
# Modules, and the extras that install them.
_REQUIRED_EXTRAS = {"finetune": [("transformers", "hf")]}


def _complete_task(incomplete: str) -> list[str]:
    """Complete the names of tasks for the shell."""
    return [task for task in TASKS if task.startswith(incomplete)]


def new(
    path: Annotated[str, typer.Argument(metavar="LOOP", help="The file to write, as in loop.py.", show_default=False)],
    task: Annotated[
        str,
        typer.Option("--task", metavar="TASK", help=f"Training task: {', '.join(TASKS)}.", autocompletion=_complete_task),
    ] = "blank",
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
) -> int:
    """Write a training loop to start from.

    The loop is one file of at most 82 lines that runs unchanged on any number of processes. It shards, logs, saves, evaluates,
    and resumes with the same command. Its data is generated or installed, so nothing is downloaded.

    Exit codes: 0 written; 1 the file could not be written; 2 bad usage, or the file exists.
    """
    if task not in TASKS:
        raise ConfigError(f"new: --task must be one of {', '.join(TASKS)}, got {task!r}. Use blank for a loop without a task.")
    file_path = _check_path(path)
    template = files("dtrain.cli").joinpath("templates", f"{task}.py.txt").read_text(encoding="utf-8")
    try:
        with file_path.open("w" if force else "x", encoding="utf-8") as file:
            file.write(template.replace("loop.py", file_path.name).replace("runs/loop", f"runs/{file_path.stem}"))
    except FileExistsError:
        raise ConfigError(f"new: {path!r} exists already. Choose another name, or pass --force to overwrite it.") from None
    except OSError as error:
        raise OSError(f"new: {path!r} cannot be written: {error.strerror}. Choose another path.") from error
    typer.echo(f"{escape_unprintable(path)}: {TASKS[task]}")
    for module, extra in _REQUIRED_EXTRAS.get(task, ()):
        if find_spec(module) is None:
            typer.echo(f"first:  {install_command(extra)}  ({module} is not installed here)")
    typer.echo(f"run it: dtrain launch -n 2 --run-dir runs/{file_path.stem} {shlex.quote(path)}")
    return 0


def _check_path(path: str) -> Path:
    """Return the path of the loop if a loop can be written and run there."""
    file_path = Path(path)
    if not _LOOP_NAME.fullmatch(file_path.name):
        raise ConfigError(
            f"new: LOOP must be a name of letters, digits, - and _ that ends with .py, got {path!r}. Use loop.py, for example."
        )
    if file_path.stem in _RESERVED_NAMES or file_path.stem in sys.stdlib_module_names:
        raise ConfigError(
            f"new: LOOP must not shadow the module {file_path.stem!r}, got {path!r}. Use another name, such as loop.py."
        )
    if file_path.is_dir():
        raise ConfigError(f"new: {path!r} is a folder. Name a file in it, as in {path}/loop.py.")
    if not file_path.parent.is_dir():
        raise ConfigError(f"new: no such folder: {str(file_path.parent)!r}. Create the folder, or choose another.")
    return file_path
