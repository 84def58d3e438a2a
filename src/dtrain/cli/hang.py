"""``dtrain hang``: what the ranks of a job do, and which of them the others wait for."""

from __future__ import annotations

from typing import Annotated

import typer

from dtrain.errors import ConfigError, DistError


def hang(
    run_dir: Annotated[str, typer.Argument(metavar="RUN_DIR", help="The run folder of `dtrain launch`, or of dt.open_run.")],
) -> int:
    """Show what the ranks do, and which one keeps the others.

    While the job runs here, its launcher asks the ranks, and the job goes on. Afterwards, what was written down last is shown.
    All stacks and the last collectives of every rank are in hang/report.txt of the run folder.

    Exit codes: 0 shown; 1 the launcher does not answer; 2 nothing is known there.
    """
    from dtrain.launch.hang.query import explain_hang

    try:
        typer.echo(explain_hang(run_dir))
    except (ConfigError, DistError) as error:
        raise type(error)(str(error).replace("explain_hang:", "hang:", 1)) from None
    return 0
