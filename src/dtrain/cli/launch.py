"""``dtrain launch``: from the command line to a plan, and from the plan to an exit code."""

from __future__ import annotations

import os
from datetime import datetime
from typing import Annotated

import typer

from dtrain.launch.front import launch as run_job
from dtrain.launch.plan import DEFAULT_GRACE_S, LaunchPlan, default_nproc, parse_nproc, parse_seconds
from dtrain.launch.rundir import create_run_dir
from dtrain.launch.target import check_module, check_script


def launch(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="Python file to run, or module name with -m.")],
    args: Annotated[
        list[str] | None, typer.Argument(metavar="ARGS", help="Passed to the script as they are.", show_default=False)
    ] = None,
    nproc: Annotated[
        str | None,
        typer.Option("-n", "--nproc", metavar="N", help="Number of ranks.  [default: one per GPU, or 1]"),
    ] = None,
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is a module, as in python -m.")] = False,
    run_dir: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="Folder for what belongs to this launch.  [default: runs/<date and time>]"),
    ] = None,
    grace: Annotated[
        str, typer.Option(metavar="SECONDS", help="Time between asking processes to end and killing them.")
    ] = f"{DEFAULT_GRACE_S:g}",
) -> int:
    """Run a script on N ranks of this machine.

    When a rank fails the others are ended, and no process is left behind. Output comes in whole lines, marked with the
    rank when there are several.

    Exit codes: 0 done; 2 bad usage, nothing was started; the failing rank's own code, or 128 + signal if it was killed;
    130 after Ctrl-C, 143 after SIGTERM; 75 when all ranks exited with 75 (preempted and saved: run it again).
    """
    ranks = parse_nproc(nproc) if nproc is not None else _one_per_gpu()
    grace_s = parse_seconds("--grace", grace)
    (check_module if module else check_script)(script)
    folder = create_run_dir(run_dir, now=datetime.now())  # last of the checks: a typing error leaves nothing behind
    plan = LaunchPlan(nproc=ranks, target=script, is_module=module, args=tuple(args or ()), run_dir=folder, grace_s=grace_s)
    return run_job(plan)


def _one_per_gpu() -> int:
    return default_nproc(os.listdir("/dev"), os.environ.get("CUDA_VISIBLE_DEVICES"))
