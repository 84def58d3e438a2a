"""Names of files and prefixes of lines, with ``{rank}`` and the like in them. Pure."""

from __future__ import annotations

import os
import string
from pathlib import Path

from dtrain.errors import ConfigError
from dtrain.launch.plan import Layout, OutputPlan

FIELDS = ("rank", "local_rank", "world_size", "local_world_size", "node_rank", "host")
STDOUT, STDERR = "logs/rank-{rank:05d}.stdout", "logs/rank-{rank:05d}.stderr"
"""Where each rank's streams go unless asked otherwise, below the folder of the launch."""


def check_output(plan: OutputPlan, layout: Layout) -> None:
    """Return when every template can be filled for the ranks of ``layout``.

    Raises:
        ConfigError: an unknown field, an empty name, or a prefix of several lines.
    """
    for option, template in (("--stdout", plan.stdout), ("--stderr", plan.stderr), ("--prefix", plan.prefix)):
        if template is None:
            continue
        text = fill(option, template, layout, layout.base_rank)
        if option != "--prefix" and (not text.strip() or "\0" in text or text.endswith("/")):
            raise ConfigError(f"launch: {option} must name a file, got {template!r}; leave it out for {STDOUT!r} and the like")
        if option == "--prefix" and not set(text).isdisjoint("\r\n"):
            raise ConfigError(f"launch: --prefix must be one line, got {template!r}; it is put in front of each line")


def fill(option: str, template: str, layout: Layout, rank: int) -> str:
    """``template`` with what is known about ``rank``.

    Raises:
        ConfigError: an unknown field, or braces that do not match.
    """
    known = {
        "rank": rank,
        "local_rank": rank - layout.base_rank,
        "world_size": layout.world_size,
        "local_world_size": layout.nproc,
        "node_rank": layout.node_rank,
        "host": os.uname().nodename,
    }
    try:
        stray = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None and name not in known]
        if not stray:
            return template.format_map(known)
    except (ValueError, LookupError, AttributeError) as error:
        raise ConfigError(
            f"launch: {option} {template!r} cannot be filled in: {error}; a brace itself is {{{{ or }}}}"
        ) from None
    fields = " ".join(f"{{{name}}}" for name in FIELDS)
    raise ConfigError(f"launch: {option} {template!r}: no field {{{stray[0]}}}; there are {fields}")


def log_files(plan: OutputPlan, layout: Layout, run_dir: Path, rank: int) -> tuple[Path, Path]:
    """The files of a rank's standard output and error; a relative name counts from the folder of the launch."""
    stdout = fill("--stdout", plan.stdout or STDOUT, layout, rank)
    stderr = fill("--stderr", plan.stderr or STDERR, layout, rank)
    return run_dir / stdout, run_dir / stderr
