"""The group of commands, and which commands are in it."""

from __future__ import annotations

import typer

from dtrain.cli.checkpoints.converting import convert
from dtrain.cli.checkpoints.differing import diff
from dtrain.cli.checkpoints.listing import list_steps
from dtrain.cli.checkpoints.pruning import prune
from dtrain.cli.checkpoints.showing import show
from dtrain.cli.checkpoints.verifying import verify

app = typer.Typer()


@app.callback(invoke_without_command=True)
def checkpoints(context: typer.Context) -> int:
    """List, verify, compare, prune and convert checkpoints."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
    return 0


app.command("list")(list_steps)
app.command("verify")(verify)
app.command("show")(show)
app.command("diff")(diff)
app.command("prune")(prune)
app.command("convert")(convert)
