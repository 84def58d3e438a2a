"""``dtrain new``: a loop to start from, written into a file that is the user's own from then on."""

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
from dtrain.optional_dependencies import install_command

EXAMPLES = """
dtrain new loop.py                  your model, your data and your loss go in
dtrain new train_gpt.py --task lm
dtrain new loop.py --task vision --force
"""

TASKS = {
    "blank": "a model, data and a loss of your own; random numbers until then",
    "lm": "a language model of bytes, on the source code of Python",
    "vision": "classes of pictures, which are drawn",
    "finetune": "classes of texts, with a model of transformers",
    "diffusion": "pictures out of noise, on drawn ones",
}
"""Each has a file in ``templates``: a loop named ``loop.py``, which runs as it stands."""

_LOOP_NAME = re.compile(r"[\w-]+\.py", re.ASCII)  # it stands in the loop's own text
_RESERVED_NAMES = {"dtrain", "numpy", "tensordict", "torch", "transformers", "tokenizers"}
_REQUIRED_EXTRAS = {"finetune": [("transformers", "hf")]}  # modules, and the extras that bring them


def _complete_task(incomplete: str) -> list[str]:
    """For shell completion."""
    return [task for task in TASKS if task.startswith(incomplete)]


def new(
    path: Annotated[str, typer.Argument(metavar="LOOP", help="The file to write, as in loop.py.", show_default=False)],
    task: Annotated[
        str,
        typer.Option("--task", metavar="TASK", help=f"What it trains: {', '.join(TASKS)}.", autocompletion=_complete_task),
    ] = "blank",
    force: Annotated[bool, typer.Option("--force", help="Write over a file that is there.")] = False,
) -> int:
    """Write a training loop to start from.

    It is one file of at most 80 lines that runs as it is, on any number of processes: sharded, logged, saved and resumed by the
    same command, evaluated. Its data is at hand, so nothing is downloaded.

    Exit codes: 0 written; 1 it could not be written; 2 bad usage, or a file that is there.
    """
    if task not in TASKS:
        raise ConfigError(f"new: --task must be one of {', '.join(TASKS)}, got {task!r}; blank is a loop without a subject")
    place = _check_path(path)
    template = files("dtrain.cli").joinpath("templates", f"{task}.py.txt").read_text(encoding="utf-8")
    try:
        with place.open("w" if force else "x", encoding="utf-8") as file:
            file.write(template.replace("loop.py", place.name).replace("runs/loop", f"runs/{place.stem}"))
    except FileExistsError:
        raise ConfigError(f"new: {path!r} is there already; give another name, or --force to write over it") from None
    except OSError as error:
        raise OSError(f"new: {path!r} cannot be written: {error.strerror}; give another place") from error
    typer.echo(f"{escape_unprintable(path)}: {TASKS[task]}")
    for module, extra in _REQUIRED_EXTRAS.get(task, ()):
        if find_spec(module) is None:
            typer.echo(f"first:  {install_command(extra)}  ({module} is not installed here)")
    typer.echo(f"run it: dtrain launch -n 2 --run-dir runs/{place.stem} {shlex.quote(path)}")
    return 0


def _check_path(path: str) -> Path:
    """Where the loop goes, if a loop can be there."""
    place = Path(path)
    if not _LOOP_NAME.fullmatch(place.name):
        raise ConfigError(
            f"new: LOOP must be a name of letters, digits, - and _ that ends with .py, got {path!r}; as in loop.py"
        )
    if place.stem in _RESERVED_NAMES or place.stem in sys.stdlib_module_names:
        raise ConfigError(
            f"new: a loop in {path!r} would be imported in place of the module {place.stem!r}; give another name, as in loop.py"
        )
    if place.is_dir():
        raise ConfigError(f"new: {path!r} is a folder; give a file in it, as in {path}/loop.py")
    if not place.parent.is_dir():
        raise ConfigError(f"new: no such folder: {str(place.parent)!r}; make it first, or choose another")
    return place
