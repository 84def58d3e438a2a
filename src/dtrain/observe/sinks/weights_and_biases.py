"""``wandb``: metrics to Weights & Biases."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from dtrain import storage
from dtrain.errors import ConfigError
from dtrain.observe.sinks.guard import drop, nowhere
from dtrain.observe.sinks.names import DistinctNames
from dtrain.observe.sinks.packages import imported, need
from dtrain.observe.sinks.ranks import Ranks, path_here
from dtrain.observe.sinks.run_ids import keep_id, kept_id, settings_of
from dtrain.observe.sinks.sink import Sink
from dtrain.observe.sinks.thread import InThread, Record, check_patience
from dtrain.observe.sinks.values import NumbersOnly

ID_FILE = "wandb-run-id"
_CLOSE_S = 30.0  # it uploads
_RESERVED = ("step", "_step", "_runtime", "_timestamp", "_wandb")


def wandb(
    project: str,
    *,
    folder: str | Path,
    mode: Literal["online", "offline"] = "online",
    settings: Any = None,
    init: Mapping[str, Any] | None = None,
    ranks: Ranks = 0,
    patience_s: float = 120.0,
) -> Sink:
    """A sink that logs to a run of Weights & Biases, whose axis is the loop's step.

    The run's id stays in ``folder/wandb-run-id``, so a resumed run goes on with the same run. Its steps are a metric, ``step``,
    which all others are drawn over: W&B's own count must not go back, and would lose what is repeated after a resume.

    All of it happens in a thread of its own: no network, no login or a server that hangs is one warning, and training goes on.
    Values that are no numbers are left out, with one warning a name; a metric named ``step`` is ``metric/step``.

    Args:
        project: created where missing.
        folder: where W&B keeps its files, and the id.
        mode: "offline" writes files only, below ``folder/wandb``; ``wandb sync`` uploads them.
        settings: the run's, as ``open_run`` takes them; they become its config, and what looks secret is redacted.
        init: further arguments of ``wandb.init``, such as ``{"entity": "us", "name": "first", "tags": ["gpt"]}``.
        ranks: 0, or "all", which needs ``{rank}`` in the folder: a run for each rank.
        patience_s: a call that takes longer drops the sink, with one warning.

    Raises:
        ConfigError: the package wandb is not installed; no project; another mode; a folder on a server.
    """
    need("wandb")
    if not isinstance(project, str) or not project:
        raise ConfigError(f"wandb: needs the name of a project, got {project!r}")
    if mode not in ("online", "offline"):
        raise ConfigError(f"wandb: mode must be 'online' or 'offline', got {mode!r}")
    check_patience(patience_s, "wandb")
    said, here = settings_of(settings, "wandb"), path_here(folder, ranks, "wandb")
    if here is None:
        return nowhere
    try:
        package = imported("wandb")
    except Exception as error:  # noqa: BLE001 - it is installed, and does not work here
        drop("wandb", None, error)
        return nowhere
    asked = {"project": project, "mode": mode, "config": said, **(init or {})}
    names, numbers = DistinctNames("wandb", reserved=_RESERVED), NumbersOnly("wandb")
    return InThread(
        "wandb",
        lambda: _Run(package, here / ID_FILE, asked, patience_s),
        prepared=lambda record: {names(name): value for name, value in numbers(record).items()},
        patience_s=patience_s,
        close_s=_CLOSE_S,
    )


class _Run:
    def __init__(self, package: Any, file: Path, asked: Mapping[str, Any], patience_s: float) -> None:
        run_id = kept_id(file)
        if run_id is None:
            run_id = uuid.uuid4().hex[:12]
            keep_id(file, run_id)  # first: a kill in between must not make two runs
        # Its copy of what is printed would replace sys.stdout, from a thread; the launcher keeps all output anyway.
        quiet = package.Settings(console="off", login_timeout=patience_s)
        storage.make_folders(file.parent)
        self._run = package.init(**{"dir": str(file.parent), "id": run_id, "resume": "allow", "settings": quiet, **asked})
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, records: Sequence[Record]) -> None:
        for record in records:
            self._run.log({"step": record.step, **record.numbers})

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))
