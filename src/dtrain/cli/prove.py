"""Define ``dtrain prove``: run a training script in several ways, and show whether the runs agree."""

from __future__ import annotations

import re
from functools import partial
from typing import Annotated

import typer

from dtrain.cli.output import print_json
from dtrain.cli.parameters import AsJson, integer, number, option
from dtrain.errors import ConfigError

EXAMPLES = """
dtrain prove loop.py                       4 steps in each run, on 1, 2 and 3 ranks
dtrain prove --steps 6 loop.py --width 32  options after the script belong to the script
dtrain prove --json loop.py > proof.json
"""

_DIFFERS_EXIT_CODE = 1
_RUNS_HEADING = "Runs"
_option = partial(option, "prove")


def parse_ranks(command: str, name: str, text: str) -> tuple[int, ...]:
    """Parse numbers of ranks such as ``2,3``.

    Raises:
        ConfigError: another text, or a number below 2.
    """
    words = text.split(",")
    if not all(re.fullmatch(r"[0-9]{1,3}", word) and int(word) >= 2 for word in words):
        raise ConfigError(f"{command}: {name} must be numbers of at least 2, got {text!r}. Pass 2,3, for example.")
    return tuple(map(int, words))


def prove(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="A Python file that trains.")],
    args: Annotated[list[str] | None, typer.Argument(metavar="[ARGS]...", help="Arguments of the script.")] = None,
    steps: Annotated[int, _option(_RUNS_HEADING, "--steps N", "Steps of each run.  [default: 4]", integer(2))] = 4,
    ranks: Annotated[
        str, _option(_RUNS_HEADING, "--ranks LIST", "Numbers of ranks to compare with one rank.  [default: 2,3]")
    ] = "2,3",
    keep_precision: Annotated[
        bool,
        typer.Option(
            "--keep-precision",
            help="Compute in the script's own dtypes, so that rounding counts as a difference.",
            rich_help_panel=_RUNS_HEADING,
        ),
    ] = False,
    seed: Annotated[int, _option(_RUNS_HEADING, "--seed N", "Selects the step of the kill.  [default: 0]", integer(0))] = 0,
    timeout: Annotated[
        float, _option(_RUNS_HEADING, "--timeout SECONDS", "Longest run.  [default: 300]", number(above=0))
    ] = 300.0,
    as_json: AsJson = False,
) -> int:
    """Run a script in several ways, and compare the runs.

    The script runs for a few steps in float64: twice on one rank, on several ranks with each strategy, with other microbatches,
    and killed and resumed. The answer names the first difference, and its likely cause.

    Exit codes: 0 all runs agree; 1 a run differs or fails; 2 bad usage.
    """
    from dtrain.prove.proof import prove as run_proof

    report = run_proof(
        script,
        args or (),
        steps=steps,
        world_sizes=parse_ranks("prove", "--ranks", ranks),
        keep_precision=keep_precision,
        seed=seed,
        timeout_s=timeout,
        on_progress=lambda line: typer.echo(f"dtrain: prove: {line}", err=True),
    )
    if as_json:
        print_json(report.as_dict())
    else:
        typer.echo(report.text())
    return 0 if report.passed else _DIFFERS_EXIT_CODE
