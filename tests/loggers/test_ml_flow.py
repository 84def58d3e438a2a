"""MLflow: its store in a file, its server on loopback, both read back by its own client."""

import math
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress

import numpy as np
import pytest

from dtrain.loggers.logger import UniqueNames, close, failed_loggers
from dtrain.loggers.media import log_images, log_table, log_text
from dtrain.loggers.trackers import mlflow, mlflow_name

PATIENCE_S = 90.0
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(autouse=True)
def quiet(monkeypatch) -> None:
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_SERVER_ENABLE_JOB_EXECUTION", "false")  # it would leave a folder in shared memory


@pytest.fixture(scope="module")
def database(tmp_path_factory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db"


def client(uri):
    from mlflow.tracking import MlflowClient

    return MlflowClient(tracking_uri=uri)


def write(uri, folder, records, **more):
    log = mlflow("digits", path=folder, tracking_uri=uri, timeout_s=PATIENCE_S, **more)
    for step, numbers in records:
        log(step, numbers)
    log._close_timeout_s = PATIENCE_S  # tables may still have to be made, on a busy machine
    close(log)
    return (folder / "mlflow-run-id").read_text().strip()


def history(uri, run_id, name):
    return [(metric.step, metric.value) for metric in client(uri).get_metric_history(run_id, name)]


@pytest.mark.costly
def test_resumed_run_continues_same_run_and_logs_settings_once(database, tmp_path):
    settings = {"lr": 0.1, "model": {"width": 64, "token": "12ab"}, "note": "x" * 9000}
    first = write(database, tmp_path, [(10, {"loss": 2.0}), (20, {"loss": 1.0})], settings=settings, name="first")
    again = write(database, tmp_path, [(20, {"loss": 1.5}), (30, {"loss": 0.5})], settings={"lr": 0.2})
    assert again == first
    assert history(database, first, "loss") == [(10, 2.0), (20, 1.0), (20, 1.5), (30, 0.5)]
    run = client(database).get_run(first)
    assert (run.info.run_name, run.info.status) == ("first", "FINISHED")
    shown = {name: value[:10] for name, value in run.data.params.items()}
    assert shown == {"lr": "0.1", "model.width": "64", "model.token": "[redacted]", "note": "x" * 10}


@pytest.mark.costly
def test_unsupported_numbers_and_names_are_marked(database, tmp_path):
    log = mlflow("digits", path=tmp_path, tracking_uri=database)
    log(1, {"loss": math.nan, "a+b": 1.0, "/deep//x": 2.0})
    with pytest.warns(UserWarning, match="mlflow: metric 'a#b' is written as 'a_b_2'. Another metric is written as 'a_b'"):
        log(2, {"loss": math.inf, "a#b": 3.0})
    log._close_timeout_s = PATIENCE_S
    close(log)
    run_id = (tmp_path / "mlflow-run-id").read_text().strip()
    (_, first), (_, second) = history(database, run_id, "loss")
    assert math.isnan(first)
    assert second == sys.float_info.max, "MLflow's own store has no infinity"
    assert history(database, run_id, "a_b") == [(1, 1.0)]
    assert history(database, run_id, "a_b_2") == [(2, 3.0)]
    assert history(database, run_id, "deep/x") == [(1, 2.0)]


def test_many_metrics_are_split_into_several_requests(database, tmp_path):
    numbers = {f"metric/{number}": float(number) for number in range(1500)}
    settings = {f"setting/{number}": number for number in range(250)}
    run_id = write(database, tmp_path, [(1, numbers)], settings=settings)
    run = client(database).get_run(run_id)
    assert run.data.metrics == numbers
    assert len(run.data.params) == 250


def test_run_id_of_another_store_starts_new_run(database, tmp_path):
    (tmp_path / "mlflow-run-id").write_text("0" * 32)
    assert write(database, tmp_path, [(1, {"loss": 1.0})]) != "0" * 32


def test_failed_training_marks_run_as_failed(database, tmp_path):
    log = mlflow("digits", path=tmp_path, tracking_uri=database)
    log._close_timeout_s = PATIENCE_S
    log(1, {"loss": 1.0})
    log.begin_closing(failed=True)  # as init_dist does when its block is left with an exception
    close(log)
    run_id = (tmp_path / "mlflow-run-id").read_text().strip()
    assert client(database).get_run(run_id).info.status == "FAILED"


def log_and_close(log) -> None:
    log(1, {"loss": 1.0})
    close(log)


@pytest.fixture
def server(database, tmp_path, port) -> Iterator[str]:
    """MLflow's server, over the store in a file."""
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", database]
    command += ["--default-artifact-root", str(tmp_path), "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    with open(tmp_path / "server.log", "wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, cwd=tmp_path, start_new_session=True)
    try:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                    break
            except OSError:
                alive = process.poll() is None
                assert alive, (tmp_path / "server.log").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()  # it removes its shared memory
        try:
            process.wait(PATIENCE_S)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.slow  # its server takes fifteen seconds to begin; the store in a file has all but the wire
def test_server_accepts_new_and_resumed_run(server, tmp_path):
    folder = tmp_path / "run"
    first = write(server, folder, [(10, {"loss": 2.0})], settings={"lr": 0.1})
    assert write(server, folder, [(20, {"loss": 1.0})]) == first
    assert history(server, first, "loss") == [(10, 2.0), (20, 1.0)]
    assert client(server).get_run(first).data.params == {"lr": "0.1"}


def test_unreachable_server_warns_once(tmp_path, port):
    before = len(failed_loggers())
    log = mlflow("digits", path=tmp_path, tracking_uri=f"http://127.0.0.1:{port}", timeout_s=PATIENCE_S)
    log._close_timeout_s = PATIENCE_S
    with pytest.warns(UserWarning, match=r"mlflow: .*Connection refused.*. Metrics are no longer logged there"):
        log_and_close(log)
    assert [failure.name for failure in failed_loggers()[before:]] == ["mlflow"]


@pytest.fixture
def silent_server() -> Iterator[str]:
    """It takes connections, and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


def test_hanging_server_warns_once(silent_server, tmp_path):
    log = mlflow("digits", path=tmp_path, tracking_uri=silent_server, timeout_s=0.3)
    with pytest.warns(
        UserWarning, match=r"mlflow: TimeoutError: (not finished|no answer for) 0.3 s.*. Metrics are no longer logged there"
    ):
        log_and_close(log)


NAMES = {
    "plain": ("speed/tokens", "speed/tokens"),
    "characters": ("a(b)[%]", "a_b____"),
    "slashes": ("//a//b/", "a/b"),
    "dots": ("../a/./b", "__/a/_/b"),
    "nothing": ("", "_"),
    "only slashes": ("//", "_"),
    "long": ("x" * 300, "x" * 240),
}


@pytest.mark.parametrize(("name", "cleaned"), NAMES.values(), ids=NAMES)
def test_metric_name_is_converted_to_allowed_characters(name, cleaned):
    assert mlflow_name(name) == cleaned


def test_converted_names_stay_unique():
    names = UniqueNames("here", str.lower)
    assert [names("a"), names("a")] == ["a", "a"]
    with pytest.warns(UserWarning, match="here: metric 'A' is written as 'a_2'. Another metric is written as 'a'"):
        assert names("A") == "a_2"
    assert names("A") == "a_2"


def test_pictures_texts_and_tables_are_artifacts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    log = mlflow("digits", path=tmp_path, tracking_uri=uri, timeout_s=PATIENCE_S)
    log_images(log, 4, {"frame": np.ones((2, 1, 3, 5))})
    log_text(log, 4, {"answer": "four"})
    log_table(log, 4, {"rollouts": [{"reward": 0.5}]})
    log._close_timeout_s = PATIENCE_S
    close(log)
    run_id = (tmp_path / "mlflow-run-id").read_text().strip()
    media = sorted(entry.path for entry in client(uri).list_artifacts(run_id, "media"))
    assert media == ["media/answer", "media/rollouts"]
    assert [file.read_text() for file in sorted(tmp_path.rglob("step-00000004.*"))] == [
        "four",
        '{"columns": ["reward"], "data": [[0.5]]}',
    ]
    assert any(file.suffix == ".png" for file in tmp_path.rglob("frame*"))
