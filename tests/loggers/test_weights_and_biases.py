"""Weights & Biases offline: the content of the files that ``wandb sync`` uploads, read as W&B's own records. No network."""

import json
import math
import struct
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dtrain.loggers.logger import close
from dtrain.loggers.media import log_images, log_table, log_text
from dtrain.loggers.trackers import wandb

PATIENCE_S = 90.0
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(scope="module", autouse=True)
def its_service(tmp_path_factory) -> Iterator[None]:
    """W&B's process ends with these tests, and its files are in a folder of theirs."""
    folder = tmp_path_factory.mktemp("wandb")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("CONFIG", "CACHE", "DATA", "ARTIFACT"):
            patch.setenv(f"WANDB_{name}_DIR", str(folder))
        patch.setattr(tempfile, "tempdir", str(folder))  # it makes folders when it is imported, and removes them at exit
        patch.setenv("WANDB_SILENT", "true")
        patch.setenv("WANDB_ERROR_REPORTING", "false")
        yield
        import wandb as package

        package.teardown()


def write(folder, records, **more):
    log = wandb("digits", path=folder, offline=True, init={"settings": quiet()}, timeout_s=PATIENCE_S, **more)
    log._close_timeout_s = PATIENCE_S
    for step, numbers in records:
        log(step, numbers)
    close(log)
    return (Path(folder) / "wandb-run-id").read_text().strip()


def quiet():
    import wandb as package

    return package.Settings(console="off", x_disable_stats=True, x_disable_machine_info=True, disable_git=True)


def records(file: Path) -> Iterator:
    """W&B's records out of its file: LevelDB's log format, blocks of 32 KiB with pieces of a checksum, a size and a kind."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, offset, whole = file.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while offset < len(data):
        left = 32768 - offset % 32768
        if left < 7:
            offset += left
            continue
        _, size, kind = struct.unpack("<IHB", data[offset : offset + 7])
        whole += data[offset + 7 : offset + 7 + size]
        offset += 7 + size
        if kind in (1, 4):  # a whole record, or the last piece of one
            record = Record()
            record.ParseFromString(whole)
            whole = b""
            yield record


def runs(folder) -> list[list]:
    """The records of each start of the run, in order. W&B's process writes the last ones when the run has been finished."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        files = [list(records(path)) for path in sorted(Path(folder).glob("wandb/offline-run-*/*.wandb"))]
        if all(any(record.HasField("exit") for record in entries) for entries in files):
            return files
        assert time.monotonic() < deadline
        time.sleep(0.05)


def history(entries) -> list[dict]:
    rows = [record.history for record in entries if record.WhichOneof("record_type") == "history"]
    items = [{item.key or item.nested_key[0]: json.loads(item.value_json) for item in row.item} for row in rows]
    return [{name: value for name, value in row.items() if not name.startswith("_")} for row in items]


@pytest.mark.costly
def test_resumed_run_continues_same_run_with_loop_steps(tmp_path):
    first = write(tmp_path, [(10, {"loss": 2.0}), (20, {"loss": 1.0})], settings={"lr": 0.1, "token": "12ab"})
    again = write(tmp_path, [(20, {"loss": 1.5}), (5, {"loss": math.nan, "step": 3.0})])
    assert again == first
    before, after = runs(tmp_path)
    assert history(before) == [{"step": 10, "loss": 2.0}, {"step": 20, "loss": 1.0}]
    repeated, back = history(after)
    assert repeated == {"step": 20, "loss": 1.5}, "none is lost when steps go back"
    assert (back["step"], back["metric/step"]) == (5, 3.0)
    assert math.isnan(back["loss"])
    (run,) = [record.run for record in before if record.WhichOneof("record_type") == "run"]
    config = {item.key: json.loads(item.value_json) for item in run.config.update if item.key != "_wandb"}
    assert (run.run_id, run.project, config) == (first, "digits", {"lr": 0.1, "token": "[redacted]"})
    axes = {record.metric.glob_name: record.metric.step_metric for record in before if record.metric.step_metric}
    assert axes == {"*": "step"}
    assert {entry.run.run_id for entries in (before, after) for entry in entries if entry.HasField("run")} == {first}


def test_failed_training_marks_run_as_failed(tmp_path):
    log = wandb("digits", path=tmp_path, offline=True, init={"settings": quiet()}, timeout_s=PATIENCE_S)
    log._close_timeout_s = PATIENCE_S
    log(1, {"loss": 1.0})
    log.begin_closing(failed=True)  # as init_dist does when its block is left with an exception
    close(log)
    (entries,) = runs(tmp_path)
    assert [record.exit.exit_code for record in entries if record.HasField("exit")] == [1]


def test_refused_init_arguments_warn_once(tmp_path):
    log = wandb("digits", path=tmp_path, offline=True, init={"no_such_argument": 1}, timeout_s=PATIENCE_S)
    log._close_timeout_s = PATIENCE_S
    with pytest.warns(UserWarning, match="wandb: .*no_such_argument.*. Metrics are no longer logged there"):
        close(log)


def test_pictures_texts_and_tables_are_files_of_the_run(tmp_path):
    log = wandb("digits", path=tmp_path, offline=True, init={"settings": quiet()}, timeout_s=PATIENCE_S)
    log_images(log, 4, {"frame": np.ones((2, 1, 3, 5))})
    log_text(log, 4, {"answer": "<four>"})
    log_table(log, 4, {"rollouts": [{"reward": 0.5, "text": None}]})
    log._close_timeout_s = PATIENCE_S
    close(log)
    kinds = {file.suffix: file for file in tmp_path.rglob("media/**/*.*") if file.is_file()}
    assert {".png", ".html", ".json"} <= set(kinds)
    assert kinds[".html"].read_text() == "<pre>&lt;four&gt;</pre>"
