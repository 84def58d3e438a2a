"""Prove a script: ``dtrain prove``. Imports no torch before the proof starts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from dtrain.cli.output import print_json
from dtrain.cli.parameters import AsJson, integer, number, option
from dtrain.errors import ConfigError

_prove_option = partial(option, "prove", "Runs")


def parse_ranks(command: str, name: str, text: str) -> tuple[int, ...]:
    """Parse numbers of ranks such as ``2,3``.

    Raises:
        ConfigError: another text, or a number below 2.
    """
    words = text.split(",")
    if not all(re.fullmatch(r"[0-9]{1,3}", word) and int(word) >= 2 for word in words):
        raise ConfigError(f"{command}: {name} must be numbers of at least 2, got {text!r}. Pass 2,3, for example.")
    return tuple(map(int, words))


def parse_allowed(texts: Sequence[str]) -> dict[str, str]:
    """Parse known differences of the form ``NAME=REASON``, or ``@FILE`` with one in each line. A line with # is a comment.

    Raises:
        ConfigError: a name without a reason, or a file that cannot be read.
    """
    allowed = {}
    for text in texts:
        entries = [text]
        if text.startswith("@"):
            if not Path(text[1:]).is_file():
                raise ConfigError(f"prove: --allow must be NAME=REASON or @FILE, got no file {text[1:]!r}. Check the path.")
            lines = map(str.strip, Path(text[1:]).read_text(encoding="utf-8").splitlines())
            entries = [line for line in lines if line and not line.startswith("#")]
        for entry in entries:
            name, _, reason = map(str.strip, entry.partition("="))
            if not name or not reason:
                raise ConfigError(
                    f"prove: --allow must be NAME=REASON, got {entry!r}. Say why it is right: 'metric tokens=counted per rank'."
                )
            allowed[name] = reason
    return allowed


def prove(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="A Python file that trains.")],
    args: Annotated[list[str] | None, typer.Argument(metavar="[ARGS]...", help="Arguments of the script.")] = None,
    steps: Annotated[int, _prove_option("--steps N", "Steps of each run.  [default: 4]", integer(2))] = 4,
    ranks: Annotated[
        Any, _prove_option("--ranks LIST", "Numbers of ranks to compare with one rank.  [default: 2,3]", parse_ranks)
    ] = (2, 3),
    keep_precision: Annotated[
        bool,
        _prove_option("--keep-precision", "Compute in the script's own dtypes, so that rounding counts as a difference."),
    ] = False,
    seed: Annotated[int, _prove_option("--seed N", "Selects the step and the rank of the kill.  [default: 0]", integer(0))] = 0,
    timeout: Annotated[float, _prove_option("--timeout SECONDS", "Longest run.  [default: 300]", number(above=0))] = 300.0,
    fast: Annotated[
        bool, _prove_option("--fast", "Compare only 1 rank and the first number of --ranks, without metrics and resumes.")
    ] = False,
    allow: Annotated[
        list[str] | None,
        _prove_option(
            "--allow NAME=REASON", "A known difference, by fact or cause; @FILE has one in each line; may be repeated."
        ),
    ] = None,
    junit: Annotated[str | None, _prove_option("--junit FILE", "Also write the result to FILE as JUnit XML.")] = None,
    as_json: AsJson = False,
) -> int:
    """Run a script in several ways, and compare the runs.

    The script runs for a few steps in float64: twice on one rank, on several ranks with each strategy, with other microbatches,
    and killed and resumed. The answer names the first difference, and its likely cause.

    Exit codes: 0 all runs agree; 1 a run differs, fails or shows nothing; 2 bad usage.

    Examples:
        dtrain prove loop.py                       4 steps in each run, on 1, 2 and 3 ranks
        dtrain prove --steps 6 loop.py --width 32  options after the script belong to the script
        dtrain prove --json loop.py > proof.json
        dtrain prove --fast --junit proof.xml --allow 'metric tokens=counted per rank' loop.py
    """
    if junit is not None and not Path(junit).absolute().parent.is_dir():
        raise ConfigError(f"prove: --junit must be a file in a folder that exists, got {junit!r}. Create the folder.")
    from dtrain.prove.proof import prove as run_proof

    report = run_proof(
        script,
        args or (),
        steps=steps,
        world_sizes=ranks,
        keep_precision=keep_precision,
        fast=fast,
        allow=parse_allowed(allow or ()),
        seed=seed,
        timeout_s=timeout,
        on_progress=lambda line: typer.echo(f"dtrain: prove: {line}", err=True),
    )
    if junit is not None:
        Path(junit).write_text(report.junit(), encoding="utf-8")
    print_json(report.as_dict()) if as_json else typer.echo(report.text())
    return 0 if report.passed else 1
