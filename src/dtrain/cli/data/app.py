"""The group of commands, and which commands are in it."""

from __future__ import annotations

import typer

from dtrain.cli.data.inspecting import EXAMPLES as INSPECT_EXAMPLES
from dtrain.cli.data.inspecting import inspect
from dtrain.cli.data.writing import EXAMPLES as WRITE_EXAMPLES
from dtrain.cli.data.writing import write
from dtrain.cli.help import GroupedCommand

app = typer.Typer()


@app.callback(invoke_without_command=True)
def data(context: typer.Context) -> int:
    """Write datasets of shards, and show them."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
    return 0


app.command("write", cls=GroupedCommand, epilog=WRITE_EXAMPLES)(write)
app.command("inspect", cls=GroupedCommand, epilog=INSPECT_EXAMPLES)(inspect)
