"""Log metrics to trackers: ``tensorboard``, ``wandb`` and ``mlflow``. Each has a ``RecordWriter`` in a background thread."""

from __future__ import annotations

import html
import importlib.util
import json
import math
import os
import re
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dtrain import storage
from dtrain.arguments import check_number, warn
from dtrain.errors import ConfigError
from dtrain.loggers.logger import (
    BackgroundLogger,
    Logger,
    MetricRecord,
    Ranks,
    UniqueNames,
    null_logger,
    rank_path,
    report_failure,
    to_plain_value,
)
from dtrain.loggers.media import Picture, Table, encode_table
from dtrain.packages import missing_extra_error
from dtrain.run.metadata import make_redactor, settings_to_plain
from dtrain.run.run_files import flatten

# W&B uploads at the end, and a local store of MLflow may still have to create tables.
_CLOSE_TIMEOUT_S = 30.0
# names with a meaning of W&B's own
_RESERVED_NAMES = ("step", "_step", "_runtime", "_timestamp", "_wandb")
# limits of the MLflow REST API: metrics and parameters per request, characters per parameter
_MAX_METRICS, _MAX_PARAMS, _MAX_PARAM_LENGTH = 1000, 100, 5000
# MLflow allows 250 characters. The margin is for an appended number.
_MAX_NAME_LENGTH = 240
_RUN_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")


def wandb(
    project: str,
    *,
    path: str | Path,
    offline: bool = False,
    settings: Any = None,
    init: Mapping[str, Any] | None = None,
    ranks: Ranks = 0,
    timeout_s: float = 120.0,
) -> Logger:
    """Log metrics to a run of Weights & Biases, with the step of the loop as the horizontal axis.

    The run id is stored in ``<path>/wandb-run-id``, so a resumed run continues the same W&B run. The step is a metric,
    ``step``, which is the axis of all charts: W&B's own step counter must not decrease and would drop the steps repeated after
    a resume.

    All calls run in a background thread: a missing network, a missing login or a server that hangs causes one warning, and
    training continues. Values other than numbers are skipped with one warning per name. A metric named ``step`` is written as
    ``metric/step``.

    Args:
        project: name of the project, created if missing.
        path: folder for the files of W&B and the run id.
        offline: if True, files below ``<path>/wandb`` are written only; ``wandb sync`` uploads the files.
        settings: settings of the run, as in ``open_run``, stored as the W&B config; secrets are redacted.
        init: further arguments of ``wandb.init``, such as ``{"entity": "us", "name": "first", "tags": ["gpt"]}``.
        ranks: 0, or "all" for one run per rank, with ``{rank}`` in the path.
        timeout_s: seconds per call; a longer call drops the logger with one warning.

    Example:
        import dtrain as dt

        log = dt.loggers.wandb("gpt", path="runs/gpt", settings=vars(args), init={"tags": ["baseline"]})
        log(state.clock.step, dt.reduce_metrics(metrics))

    Raises:
        ConfigError: the package wandb is not installed, ``project`` is empty, or ``path`` is on a server.
    """
    if not isinstance(project, str) or not project:
        raise ConfigError(f"wandb: project must be the name of a project, got {project!r}. Pass project='gpt', for example.")
    target = _prepare("wandb", ["wandb"], settings, path, ranks, timeout_s)
    if target is None:
        return null_logger
    folder, config, (package,) = target
    options = {"project": project, "mode": "offline" if offline else "online", "config": config, **(init or {})}
    names, numbers = UniqueNames("wandb", reserved=_RESERVED_NAMES), NumericFilter("wandb")
    return BackgroundLogger(
        "wandb",
        lambda: _WandbRun(package, folder / "wandb-run-id", options, timeout_s),
        convert=lambda record: {names(name): value for name, value in numbers(record).items()},
        timeout_s=timeout_s,
        close_timeout_s=_CLOSE_TIMEOUT_S,
        takes_media=True,
    )


class _WandbRun:
    def __init__(self, package: Any, file: Path, options: Mapping[str, Any], timeout_s: float) -> None:
        run_id = _read_run_id(file)
        if run_id is None:
            run_id = uuid.uuid4().hex[:12]
            # Write the id before the first request, so that a kill does not lead to two runs.
            _write_run_id(file, run_id)
        # W&B's console capture would replace sys.stdout from a thread. The launcher keeps all output.
        self._package = package
        quiet = package.Settings(console="off", login_timeout=timeout_s)
        storage.make_folders(file.parent)
        self._run = package.init(**{"dir": str(file.parent), "id": run_id, "resume": "allow", "settings": quiet, **options})
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, records: Sequence[MetricRecord]) -> None:
        for record in records:
            media = {name: self._to_media(value) for name, value in record.media.items()}
            self._run.log({"step": record.step, **record.numbers, **media})

    def _to_media(self, value: Any) -> Any:
        if isinstance(value, Picture):
            return self._package.Image(value.pixels)
        if isinstance(value, Table):
            # Columns of W&B have one type each.
            return self._package.Table(columns=value.columns, data=value.rows, allow_mixed_types=True)
        return self._package.Html(f"<pre>{html.escape(value)}</pre>", inject=False)

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


def mlflow(
    experiment: str,
    *,
    path: str | Path,
    tracking_uri: str | None = None,
    name: str | None = None,
    settings: Any = None,
    ranks: Ranks = 0,
    timeout_s: float = 60.0,
) -> Logger:
    """Log metrics and settings to a run of MLflow: metrics by step of the loop, settings once as parameters.

    The run id is stored in ``<path>/mlflow-run-id``, so a resumed run continues the same MLflow run if the store still has the
    run. All requests run in a background thread: a server that fails or hangs causes one warning, and training continues.
    Values other than numbers are skipped with one warning per name. Characters that MLflow rejects become ``_``.

    Args:
        experiment: name of the experiment, created if missing.
        path: folder of the run id.
        tracking_uri: ``"http://host:5000"`` or ``"sqlite:////path/mlflow.db"``; None uses MLflow's own default, such as
            ``MLFLOW_TRACKING_URI``.
        name: name of the run; None lets MLflow choose a name.
        settings: settings of the run, as in ``open_run``; secrets are redacted.
        ranks: 0, or "all" for one run per rank, with ``{rank}`` in the path.
        timeout_s: seconds per request; a longer request drops the logger with one warning.

    Example:
        import dtrain as dt

        log = dt.loggers.mlflow("gpt", path="runs/gpt", tracking_uri="http://host:5000", settings=vars(args))
        log(state.clock.step, dt.reduce_metrics(metrics))

    Raises:
        ConfigError: the package mlflow is not installed, ``experiment`` is empty, or ``path`` is on a server.
    """
    if not isinstance(experiment, str) or not experiment:
        raise ConfigError(
            f"mlflow: experiment must be the name of an experiment, got {experiment!r}. Pass experiment='gpt', for example."
        )
    target = _prepare("mlflow", ["mlflow.tracking", "mlflow.entities"], settings, path, ranks, timeout_s)
    if target is None:
        return null_logger
    folder, params, (tracking, entities) = target
    names, numbers = UniqueNames("mlflow", mlflow_name), NumericFilter("mlflow")
    return BackgroundLogger(
        "mlflow",
        lambda: _MlflowRun(
            tracking.MlflowClient(tracking_uri=tracking_uri), entities, folder / "mlflow-run-id", experiment, name, params
        ),
        convert=lambda record: {names(each): value for each, value in numbers(record).items()},
        timeout_s=timeout_s,
        close_timeout_s=_CLOSE_TIMEOUT_S,
        takes_media=True,
    )


class _MlflowRun:
    def __init__(
        self, client: Any, entities: Any, file: Path, experiment: str, name: str | None, settings: Mapping[str, Any]
    ) -> None:
        self._client, self._entities = client, entities
        stored_id = _read_run_id(file)
        if stored_id is not None and self._exists(stored_id):
            self._id = stored_id
            client.update_run(stored_id, status="RUNNING")
        else:
            self._id = client.create_run(self._get_or_create_experiment(experiment), run_name=name).info.run_id
            _write_run_id(file, self._id)
            self._log_params(settings)

    def _exists(self, run_id: str) -> bool:
        try:
            return bool(self._client.get_run(run_id).info.lifecycle_stage == "active")
        except Exception as error:
            # The store may differ from the store of the earlier attempt.
            if getattr(error, "error_code", None) == "RESOURCE_DOES_NOT_EXIST":
                return False
            raise

    def _get_or_create_experiment(self, name: str) -> str:
        experiment = self._client.get_experiment_by_name(name)
        if experiment is None:
            try:
                return str(self._client.create_experiment(name))
            except Exception:
                # Another process may have created the experiment in the meantime.
                experiment = self._client.get_experiment_by_name(name)
                if experiment is None:
                    raise
        return str(experiment.experiment_id)

    def _log_params(self, settings: Mapping[str, Any]) -> None:
        names = UniqueNames("mlflow", mlflow_name)
        params = [
            self._entities.Param(names(name), (value if isinstance(value, str) else json.dumps(value))[:_MAX_PARAM_LENGTH])
            for name, value in flatten(settings)
        ]
        for begin in range(0, len(params), _MAX_PARAMS):
            self._client.log_batch(self._id, params=params[begin : begin + _MAX_PARAMS])

    def write(self, records: Sequence[MetricRecord]) -> None:
        metrics = [
            self._entities.Metric(name, value, int(record.time * 1000), record.step)
            for record in records
            for name, value in record.numbers.items()
        ]
        for record in records:
            for name, value in record.media.items():
                self._log_media(mlflow_name(name), record.step, value)
        for begin in range(0, len(metrics), _MAX_METRICS):
            self._client.log_batch(self._id, metrics=metrics[begin : begin + _MAX_METRICS])

    def _log_media(self, name: str, step: int, value: Any) -> None:
        """Log a picture by step, which MLflow shows beside the charts; a text or a table as an artifact."""
        if isinstance(value, Picture):
            self._client.log_image(self._id, value.pixels, key=name.replace("/", "_"), step=step)
            return
        text, suffix = (encode_table(value), "json") if isinstance(value, Table) else (value, "txt")
        self._client.log_text(self._id, text, f"media/{name}/step-{step:08d}.{suffix}")

    def close(self, *, failed: bool) -> None:
        self._client.set_terminated(self._id, status="FAILED" if failed else "FINISHED")


def mlflow_name(name: str) -> str:
    """Replace all characters except letters, digits and ``_-. :/``, and normalize the path."""
    text = re.sub(r"[^\w\-. :/]", "_", name)
    text = "/".join(part if part.strip(".") else "_" * len(part) for part in text.split("/") if part)
    return text[:_MAX_NAME_LENGTH].rstrip("/") or "_"


def tensorboard(path: str | Path, *, settings: Any = None, ranks: Ranks = 0, timeout_s: float = 60.0) -> Logger:
    """Write TensorBoard event files into ``path``: one scalar per metric, by step of the loop.

    A background thread writes. TensorBoard's reader hides the earlier values of steps that a resumed run repeats. Values other
    than numbers are skipped with one warning per name. Non-finite numbers are written.

    Args:
        path: folder, created if missing; ``{rank}`` and ``{time}`` as in ``jsonl``.
        settings: settings of the run, as in ``open_run``, written once per folder as a text; secrets are redacted.
        ranks: 0, or "all" with ``{rank}`` in the path.
        timeout_s: seconds per write; a longer write drops the logger with one warning.

    Example:
        import dtrain as dt

        log = dt.loggers.tensorboard("runs/gpt/tensorboard", settings={"lr": 3e-4})
        log(state.clock.step, dt.reduce_metrics(metrics))

    Raises:
        ConfigError: the package tensorboard is not installed, ``timeout_s`` is not a number above 0, or ``path`` is invalid
            (see ``jsonl``).
    """
    target = _prepare("tensorboard", ["torch.utils.tensorboard"], settings, path, ranks, timeout_s)
    if target is None:
        return null_logger
    folder, plain_settings, (writers,) = target
    name = f"tensorboard {folder}"
    return BackgroundLogger(
        name,
        lambda: _EventFileWriter(folder, writers.SummaryWriter, plain_settings),
        convert=NumericFilter(name),
        timeout_s=timeout_s,
        takes_media=True,
    )


class _EventFileWriter:
    def __init__(self, folder: Path, make_writer: Any, settings: Mapping[str, Any]) -> None:
        self._folder, self._make_writer, self._settings = folder, make_writer, settings
        self._writer: Any = None

    def write(self, records: Sequence[MetricRecord]) -> None:
        if self._writer is None:
            self._open(records[0].step)
        for record in records:
            for name, value in record.numbers.items():
                self._writer.add_scalar(name, value, record.step, record.time)
            for name, value in record.media.items():
                if isinstance(value, Picture):
                    self._writer.add_image(name, value.pixels, record.step, record.time, dataformats="HWC")
                else:
                    # TensorBoard renders markdown, in which indented lines are code.
                    text = _to_markdown(value) if isinstance(value, Table) else "    " + value.replace("\n", "\n    ")
                    self._writer.add_text(name, text, record.step, record.time)
        self._writer.flush()

    def _open(self, step: int) -> None:
        storage.make_folders(self._folder)
        resumed = any(name.startswith("events.out.tfevents") for name in storage.list_names(self._folder))
        # purge_step hides this step and later steps in earlier files.
        self._writer = self._make_writer(log_dir=str(self._folder), purge_step=step if resumed else None)
        if self._settings and not resumed:
            # TensorBoard renders markdown, in which indented lines are code.
            rows = "\n".join(f"    {name}: {json.dumps(value)}" for name, value in flatten(self._settings))
            self._writer.add_text("settings", rows)

    def close(self, *, failed: bool) -> None:
        if self._writer is not None:
            self._writer.close()


def _to_markdown(table: Table) -> str:
    rows = [table.columns, ["---"] * len(table.columns), *table.rows]
    cells = ([str(cell).replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows)
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def _read_run_id(file: Path) -> str | None:
    """Read the run id in ``file``; None if the file is missing or holds no valid id."""
    try:
        text = storage.read_file(file, limit=1000).decode(errors="replace").strip()
    except OSError:
        return None
    return text if _RUN_ID.fullmatch(text) else None


def _write_run_id(file: Path, run_id: str) -> None:
    """Write the run id to ``file`` durably."""
    storage.make_folders(file.parent)
    storage.replace_file(file, f"{run_id}\n".encode())


def _prepare(
    caller: str, modules: Sequence[str], settings: Any, path: str | Path, ranks: Ranks, timeout_s: float
) -> tuple[Path, dict[str, Any], list[Any]] | None:
    """Check the package and the arguments that all trackers share, and import the modules of the package in this thread.

    Threads that import at the same time could wait for each other.

    Returns:
        The folder of this rank, the settings as plain data without secrets, and the modules; None if this rank logs nothing.

    Raises:
        ConfigError: the package is not installed, ``settings`` is neither a mapping, a dataclass nor an
            ``argparse.Namespace``, or see ``rank_path``.
    """
    try:
        spec = importlib.util.find_spec(caller)
    # A broken installation raises these errors.
    except (ImportError, ValueError):
        spec = None
    # A plain folder with the name of the package, such as W&B's own, has no origin.
    if spec is None or spec.origin is None:
        raise missing_extra_error(f"{caller}: needs the package {caller}", caller)
    check_number(caller, "timeout_s", timeout_s, above=0)
    try:
        plain = settings_to_plain(settings)
    except ConfigError:
        kinds = "a mapping, a dataclass or an argparse.Namespace"
        raise ConfigError(
            f"{caller}: settings must be {kinds}, got {type(settings).__name__}. Pass settings=vars(args), for example."
        ) from None
    redacted = make_redactor((), os.environ).redact_data(plain or {})
    assert isinstance(redacted, dict), "redaction keeps the type"
    folder = rank_path(path, ranks, caller)
    if folder is None:
        return None
    try:
        return folder, redacted, [importlib.import_module(name) for name in modules]
    except Exception as error:  # noqa: BLE001 - an installed package may fail to import
        report_failure(caller, None, error)
        return None


class NumericFilter:
    """Filter that keeps the numbers of a record as floats and skips other values with one warning per name."""

    __slots__ = ("_caller", "_warned")

    def __init__(self, caller: str) -> None:
        self._caller = caller
        self._warned: set[str] = set()

    def __call__(self, numbers: Mapping[str, Any]) -> dict[str, float]:
        floats = {}
        for name, value in numbers.items():
            number = to_plain_value(value)
            if isinstance(number, int | float):
                try:
                    floats[str(name)] = float(number)
                # An int may exceed the range of floats.
                except OverflowError:
                    floats[str(name)] = math.inf if number > 0 else -math.inf
            elif name not in self._warned:
                self._warned.add(name)
                text = number["unloggable"] if isinstance(number, dict) and "unloggable" in number else repr(number)[:40]
                warn(f"{self._caller}: metric {str(name)!r} must be a number, got {text}. The metric is skipped.")
        return floats
