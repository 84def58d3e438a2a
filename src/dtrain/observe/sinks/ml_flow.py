"""``mlflow``: metrics to an MLflow server, or to a store in a file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dtrain.errors import ConfigError
from dtrain.observe.sinks.guard import drop, nowhere
from dtrain.observe.sinks.names import DistinctNames, for_mlflow
from dtrain.observe.sinks.packages import imported, need
from dtrain.observe.sinks.ranks import Ranks, path_here
from dtrain.observe.sinks.run_ids import flat, keep_id, kept_id, settings_of
from dtrain.observe.sinks.sink import Sink
from dtrain.observe.sinks.thread import InThread, Record, check_patience
from dtrain.observe.sinks.values import NumbersOnly

ID_FILE = "mlflow-run-id"
_CLOSE_S = 30.0  # a store in a file may still have its tables to make
_METRICS, _PARAMS, _LONGEST = 1000, 100, 5000  # in one request, and characters of a setting: what every server takes


def mlflow(
    experiment: str,
    *,
    folder: str | Path,
    tracking_uri: str | None = None,
    name: str | None = None,
    settings: Any = None,
    ranks: Ranks = 0,
    patience_s: float = 60.0,
) -> Sink:
    """A sink that logs to a run of MLflow: metrics over the loop's steps, settings once, as parameters.

    The run's id stays in ``folder/mlflow-run-id``, so a resumed run goes on with the same run, if the store still has it. All
    of it happens in a thread of its own: a server that fails or hangs is one warning, and training goes on. Values that are
    no numbers are left out, with one warning a name; characters that MLflow does not take become ``_``.

    Args:
        experiment: created where missing.
        folder: where the id is kept.
        tracking_uri: ``"http://host:5000"``, ``"sqlite:////path/mlflow.db"``; None for what MLflow itself takes, such as
            ``MLFLOW_TRACKING_URI``.
        name: of the run; None for one that MLflow makes up.
        settings: the run's, as ``open_run`` takes them; what looks secret is redacted.
        ranks: 0, or "all", which needs ``{rank}`` in the folder: a run for each rank.
        patience_s: a call that takes longer drops the sink, with one warning.

    Raises:
        ConfigError: the package mlflow is not installed; no experiment; a folder on a server.
    """
    need("mlflow")
    if not isinstance(experiment, str) or not experiment:
        raise ConfigError(f"mlflow: needs the name of an experiment, got {experiment!r}")
    check_patience(patience_s, "mlflow")
    said, here = settings_of(settings, "mlflow"), path_here(folder, ranks, "mlflow")
    if here is None:
        return nowhere
    try:
        client, entities = imported("mlflow.tracking").MlflowClient, imported("mlflow.entities")
    except Exception as error:  # noqa: BLE001 - it is installed, and does not work here
        drop("mlflow", None, error)
        return nowhere
    names, numbers = DistinctNames("mlflow", for_mlflow), NumbersOnly("mlflow")
    return InThread(
        "mlflow",
        lambda: _Run(client(tracking_uri=tracking_uri), entities, here / ID_FILE, experiment, name, said),
        prepared=lambda record: {names(each): value for each, value in numbers(record).items()},
        patience_s=patience_s,
        close_s=_CLOSE_S,
    )


class _Run:
    def __init__(
        self, client: Any, entities: Any, file: Path, experiment: str, name: str | None, settings: Mapping[str, Any]
    ) -> None:
        self._client, self._entities = client, entities
        kept = kept_id(file)
        if kept is not None and self._found(kept):
            self._id = kept
            client.update_run(kept, status="RUNNING")
        else:
            self._id = client.create_run(self._experiment(experiment), run_name=name).info.run_id
            keep_id(file, self._id)
            self._describe(settings)

    def _found(self, run_id: str) -> bool:
        try:
            return bool(self._client.get_run(run_id).info.lifecycle_stage == "active")
        except Exception as error:
            if getattr(error, "error_code", None) == "RESOURCE_DOES_NOT_EXIST":  # another store than last time
                return False
            raise

    def _experiment(self, name: str) -> str:
        found = self._client.get_experiment_by_name(name)
        if found is None:
            try:
                return str(self._client.create_experiment(name))
            except Exception:
                found = self._client.get_experiment_by_name(name)  # another run was faster
                if found is None:
                    raise
        return str(found.experiment_id)

    def _describe(self, settings: Mapping[str, Any]) -> None:
        names = DistinctNames("mlflow", for_mlflow)
        params = [
            self._entities.Param(names(name), (value if isinstance(value, str) else json.dumps(value))[:_LONGEST])
            for name, value in flat(settings).items()
        ]
        for begin in range(0, len(params), _PARAMS):
            self._client.log_batch(self._id, params=params[begin : begin + _PARAMS])

    def write(self, records: Sequence[Record]) -> None:
        metrics = [
            self._entities.Metric(name, value, int(record.time * 1000), record.step)
            for record in records
            for name, value in record.numbers.items()
        ]
        for begin in range(0, len(metrics), _METRICS):
            self._client.log_batch(self._id, metrics=metrics[begin : begin + _METRICS])

    def close(self, *, failed: bool) -> None:
        self._client.set_terminated(self._id, status="FAILED" if failed else "FINISHED")
