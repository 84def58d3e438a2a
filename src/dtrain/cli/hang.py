"""Define ``dtrain hang``: show the state of a job's ranks, and the rank that the other ranks wait for."""

from __future__ import annotations

from typing import Annotated

import typer

from dtrain.errors import ConfigError, DistError


def hang(
    run_dir: Annotated[str, typer.Argument(metavar="RUN_DIR", help="The run folder of `dtrain launch`, or of dt.open_run.")],
) -> int:
    """Show the state of a job's ranks, and the blocking rank.

    While the job runs on this machine, its launcher queries the ranks, and the job continues. Afterwards, the last records are
    shown. All stacks and the last collectives of every rank are in hang/report.txt of the run folder.

    Exit codes: 0 shown; 1 the launcher does not answer; 2 there are no records.
    """
    from dtrain.launch.hang.query import explain_hang

    try:
        typer.echo(explain_hang(run_dir))
    except (ConfigError, DistError) as error:
        raise type(error)(str(error).replace("explain_hang:", "hang:", 1)) from None
    return 0
