"""The folder of a run, written by one process and by several: its content, and that it never stops training."""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dtrain import launch_protocol, spans
from dtrain.dist.context import Preemption, StopAgreement, current_context
from dtrain.errors import ConfigError
from dtrain.run import run_dir, run_files
from dtrain.run.run_dir import LedgerWriter, Run, open_run, upload_run
from dtrain.schedules.durations import Duration
from places import servers

SECRET = "s3cr3t-Xq9-value-71"


@pytest.fixture(autouse=True)
def recorder(monkeypatch):
    """Yield a recorder of this test's own; close all open files at the end."""
    fresh = spans._SpanRecorder()
    monkeypatch.setattr(spans, "_RECORDER", fresh)
    yield fresh
    run_dir._close_run(None)


def lines_of(folder, rank=0):
    text = (Path(folder) / run_files.LEDGER / run_files.ledger_name(rank)).read_text()
    return [json.loads(line) for line in text.splitlines()]


def about_of(folder, attempt=1):
    return json.loads((Path(folder) / run_files.ATTEMPTS / run_files.attempt_name(attempt)).read_text())


def kinds(lines):
    return [line.get("name", line["kind"]) for line in lines]


def steps(first, last, *, spent="step"):
    for step in range(first, last + 1):
        with spans.span(spent):
            spans.record_step(step, samples=8 * step, tokens=64 * step)


def leave(error=None):
    current_context().shutdown_hooks.run(error)


def test_open_run_creates_attempt_and_ledger(tmp_path, monkeypatch):
    monkeypatch.setattr(run_dir._OPEN_RUN, "has_opened", False)  # as in a process of its own
    run = open_run(tmp_path / "runs" / "gpt", settings={"lr": 0.1})
    assert (run.path, run.attempt, run.rank) == (tmp_path / "runs" / "gpt", 1, 0)
    assert run / "metrics.jsonl" == run.path / "metrics.jsonl"
    leave()
    first, _, last = lines_of(run.path)
    assert (first["kind"], first["attempt"], first["rank"], first["pid"], first["step"]) == ("open", 1, 0, os.getpid(), 0)
    assert first["setup_s"] > 0
    assert (last["kind"], last["reason"]) == ("close", "done")


def test_ledger_sums_are_cumulative_and_hold_position(tmp_path):
    run = open_run(tmp_path, every=5)
    with spans.span("generate", "evaluation"):
        steps(1, 12)
    leave()
    lines = [line for line in lines_of(run.path) if line["kind"] == "sum"]
    assert [line["step"] for line in lines] == [5, 10, 12]
    assert [(line["samples"], line["tokens"]) for line in lines] == [(40, 320), (80, 640), (96, 768)]
    assert sum(line["spans"]["step"][0] for line in lines) == 2 * 12  # the spans of this test count, too
    for line in lines:
        assert sum(seconds for _, seconds in line["spans"].values()) == pytest.approx(line["seconds"], abs=1e-6)
        assert line["gauges"]["rss_bytes"] > 1e6
        assert line["causes"] == {"generate": "evaluation"}


def test_steps_within_interval_write_no_lines(tmp_path):
    run = open_run(tmp_path, every="1000sec")
    steps(1, 100)
    assert kinds(lines_of(run.path)) == ["open"]
    leave()
    assert kinds(lines_of(run.path)) == ["open", "sum", "close"]


def test_events_are_written_immediately_with_sums_before_commits(tmp_path):
    spans.record_event("resumed", step=4, path="ckpt")
    run = open_run(tmp_path, every="1000sec")
    steps(5, 6)
    spans.record_event("save", step=6, blocked_s=0.1)
    spans.record_event("committed", step=6, seconds=1.0, bytes=7)
    assert kinds(lines_of(run.path)) == ["open", "resumed", "save", "sum", "committed"]
    assert lines_of(run.path)[1]["step"] == 4


def test_event_of_other_thread_defers_sum_to_next_step(tmp_path):
    run = open_run(tmp_path, every="1000sec")
    steps(1, 2)
    thread = threading.Thread(target=spans.record_event, args=("committed",), kwargs={"step": 2})
    thread.start()
    thread.join()
    assert kinds(lines_of(run.path)) == ["open", "committed"]
    steps(3, 4)
    assert kinds(lines_of(run.path)) == ["open", "committed", "sum"]


def test_event_fields_without_plain_data_become_text(tmp_path):
    run = open_run(tmp_path)
    spans.record_event("odd", kind="close", loss=float("nan"), path=Path("a"), tensor=torch.ones(1), attempt=9)
    line = lines_of(run.path)[-1]
    assert (line["kind"], line["attempt"], line["loss"], line["path"]) == ("event", 1, "nan", "a")
    assert line["tensor"] == "tensor([1.])"


@pytest.mark.parametrize(
    ("error", "reason", "text"),
    [
        (None, "done", None),
        (SystemExit(0), "done", None),
        (SystemExit(3), "failed", "SystemExit: 3"),
        (KeyboardInterrupt(), "stopped", "KeyboardInterrupt"),
        (SystemExit(launch_protocol.PREEMPTED_EXIT_CODE), "stopped", None),
        (KeyError("a\nb"), "failed", r"KeyError: 'a\nb'"),
        (RuntimeError(f"https://me:{SECRET}@host"), "failed", "RuntimeError: https://me:[redacted]@host"),
    ],
    ids=["none", "exit 0", "exit 3", "Ctrl-C", "preempted", "key", "secret"],
)
def test_close_line_holds_reason_of_end(tmp_path, error, reason, text):
    run = open_run(tmp_path)
    leave(error)
    line = lines_of(run.path)[-1]
    assert (line["kind"], line["reason"], line.get("error")) == ("close", reason, text)


def test_preempted_run_records_stop_request(tmp_path, monkeypatch):
    monkeypatch.setattr(
        current_context(), "preemption", Preemption(agreement=StopAgreement(signal_number=15, run_key=1, step=3))
    )
    run = open_run(tmp_path)
    steps(1, 3)
    assert current_context().preemption.poll()
    assert current_context().preemption.poll()
    leave()
    assert kinds(lines_of(run.path)) == ["open", "sum", "stop", "sum", "close"]
    assert [line["reason"] for line in lines_of(run.path)[-1:]] == ["stopped"]


def test_failing_shutdown_hook_is_recorded_in_close_line(tmp_path, monkeypatch):
    def fail(_):
        raise OSError("disk full")

    run = open_run(tmp_path)
    monkeypatch.setitem(current_context().shutdown_hooks.first, "a test's", fail)
    with pytest.raises(OSError, match="disk full"):
        leave()
    assert lines_of(run.path)[-1]["error"] == "OSError: disk full"


def test_later_start_appends_new_attempt_to_same_files(tmp_path):
    for attempt in (1, 2, 3):
        run = open_run(tmp_path)
        assert run.attempt == attempt
        leave()
    assert sorted(os.listdir(tmp_path / run_files.ATTEMPTS)) == [run_files.attempt_name(attempt) for attempt in (1, 2, 3)]
    assert [(line["kind"], line["attempt"]) for line in lines_of(tmp_path)] == [
        (kind, attempt) for attempt in (1, 2, 3) for kind in ("open", "sum", "close")
    ]


def test_partial_line_of_killed_attempt_does_not_damage_later_lines(tmp_path):
    run = open_run(tmp_path)
    leave()
    path = run.path / run_files.LEDGER / run_files.ledger_name(0)
    path.write_text('{"kind":"open","attempt":1}\n{"kind":"su')
    open_run(tmp_path)
    leave()
    whole = path.read_text().splitlines()
    assert whole[1] == '{"kind":"su'
    assert [json.loads(line)["kind"] for line in [whole[0], *whole[2:]]] == ["open", "open", "sum", "close"]


def test_repeated_open_run_returns_open_run(tmp_path):
    run = open_run(tmp_path / "a")
    assert open_run(str(tmp_path / "a"), settings=7) is run
    with pytest.raises(
        ConfigError, match=r"open_run: path must be the open run .*/a, got '.*b'. A process can have one open run"
    ):
        open_run(str(tmp_path / "b"))


@dataclasses.dataclass
class Settings:
    lr: float = 0.1
    token: str = SECRET
    shape: tuple = (1, 2)


@pytest.mark.parametrize(
    ("settings", "shown"),
    [
        (None, None),
        ({"lr": 0.1, "path": Path("x"), "inf": float("inf"), 3: {1}}, {"lr": 0.1, "path": "x", "inf": "inf", "3": [1]}),
        (
            argparse.Namespace(lr=0.1, api_key=SECRET, internal=1),
            {"lr": 0.1, "api_key": "[redacted]", "internal": "[redacted]"},
        ),
        (Settings(), {"lr": 0.1, "token": "[redacted]", "shape": [1, 2]}),
        ({"dtype": torch.bfloat16, "unit": Duration(3, "ep")}, {"dtype": "torch.bfloat16", "unit": {"value": 3, "unit": "ep"}}),
    ],
    ids=["none", "mapping", "argparse", "dataclass", "objects"],
)
def test_settings_are_stored_as_plain_data_without_secrets(tmp_path, settings, shown):
    run = open_run(tmp_path, settings=settings, redact=["inter*"])
    assert run.settings == about_of(run.path)["settings"] == shown


def test_attempt_metadata_is_written_once_without_secrets(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", SECRET)
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setenv("SHELL_HISTORY", "not of interest")
    monkeypatch.setattr(sys, "argv", ["train.py", "--hub-token", SECRET, "--lr", "0.1", "--note", f"x{SECRET}y"])
    run = open_run(tmp_path, redact="lab_*", settings={"lab_id": 9, "note": SECRET})
    text = (run.path / run_files.ATTEMPTS / run_files.attempt_name(1)).read_text()
    content = json.loads(text)
    assert SECRET not in text
    assert (content["format"], content["attempt"], content["world_size"]) == (run_files.FORMAT, 1, 1)
    assert content["hosts"] == {os.uname().nodename: [0]}
    assert content["devices"] == {"cpu": [0]}
    assert content["command"] == ["train.py", "--hub-token", "[redacted]", "--lr", "0.1", "--note", "x[redacted]y"]
    assert content["settings"] == {"lab_id": "[redacted]", "note": "[redacted]"}
    assert content["environment"]["HF_TOKEN"] == "[redacted]"
    assert content["environment"]["NCCL_DEBUG"] == "WARN"
    assert "SHELL_HISTORY" not in content["environment"]
    assert {"dtrain", "python", "torch"} <= set(content["versions"])
    assert content["launch"] is None
    assert set(content) == {
        "format", "attempt", "started_at", "world_size", "hosts", "devices", "command", "python", "folder", "settings", "git",
        "versions", "environment", "launch",
    }  # fmt: skip


def test_git_commit_is_recorded_with_dirty_flag(tmp_path):
    from dtrain.run import metadata

    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path)]
    (tmp_path / "loop.py").write_text("1")
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "x"]):
        subprocess.run([*git, *words], check=True, capture_output=True)
    clean = metadata._git_info(tmp_path)
    (tmp_path / "loop.py").write_text("2")
    assert clean["dirty"] is False
    assert metadata._git_info(tmp_path) == {"commit": clean["commit"], "dirty": True}


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"settings": [1]}, "open_run: settings must be a mapping, a dataclass or an argparse.Namespace, got list"),
        ({"every": "3ep"}, "open_run: every must be in steps or seconds, got '3ep'. Pass '100ba' or '10sec'"),
        ({"every": "soon"}, "duration: "),
        ({"redact": [7]}, r"open_run: redact must be patterns of names, got 7. Pass redact=\['db_\*'\]"),
        ({"upload": "ftp://x/y"}, "protocol must be one of .* got ftp://"),
    ],
    ids=["settings", "epochs", "no duration", "pattern", "upload"],
)
def test_invalid_arguments_are_refused(tmp_path, given, text):
    with pytest.raises(ConfigError, match=text):
        open_run(tmp_path / "run", **given)
    assert not (tmp_path / "run" / run_files.ATTEMPTS).exists()


def test_remote_and_uncreatable_folders_are_refused(tmp_path):
    with pytest.raises(
        ConfigError, match=r"open_run: path must be a local folder, got memory://a/b\. Pass the server as upload="
    ):
        open_run("memory://a/b")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"open_run: cannot write '.*file.*': .*\. All ranks must be able to"):
        open_run(tmp_path / "file" / "run")


def test_full_disk_warns_once_and_later_writes_catch_up(tmp_path, monkeypatch):
    run, full = open_run(tmp_path, every=1), [True]
    real = os.write

    def write(handle, data):
        if full[0]:
            raise OSError(28, "No space left on device")
        return real(handle, data)

    monkeypatch.setattr(run_dir.os, "write", write)
    with pytest.warns(RuntimeWarning, match=r"open_run: cannot write .*No space left.*Training continues") as seen:
        steps(1, 3)
    spans.record_event("save", step=3)
    assert len(seen) == 1
    full[0] = False
    steps(4, 4)
    leave()
    lines = lines_of(run.path)
    assert kinds(lines) == ["open", "dropped", "save", "sum", "sum", "close"]
    assert lines[1]["error"] == "4 lines came late or never"
    assert [line["step"] for line in lines if line["kind"] == "sum"] == [4, 4]
    assert lines[3]["spans"]["step"][0] == 8


def test_partial_line_on_full_disk_is_ended_by_next_write(tmp_path, monkeypatch):
    run, full = open_run(tmp_path, every=1), [True]
    real = os.write
    monkeypatch.setattr(run_dir.os, "write", lambda handle, data: real(handle, data[:9] if full[0] else data))
    with pytest.warns(RuntimeWarning, match="only a part of a line"):
        steps(1, 1)
    full[0] = False
    steps(2, 2)
    text = (run.path / run_files.LEDGER / run_files.ledger_name(0)).read_text().splitlines()
    assert text[1] == '{"kind":"'
    assert [json.loads(line)["kind"] for line in text[2:]] == ["event", "sum"]


def test_removed_folder_does_not_stop_training(tmp_path):
    run = open_run(tmp_path / "run", every=1)
    for path in sorted(run.path.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    with pytest.warns(RuntimeWarning, match="open_run: cannot write"):
        steps(1, 3)
    leave()
    assert list(run.path.iterdir()) == []


def test_forked_child_writes_nothing_and_can_open_its_own_run(tmp_path):
    run = open_run(tmp_path / "parent", every=1)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            steps(1, 3)
            spans.record_event("save")
            other = open_run(tmp_path / "child", every=1)
            steps(4, 5)
            run_dir._close_at_exit()
            code = 0 if other.attempt == 1 else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert kinds(lines_of(run.path)) == ["open"]
    assert kinds(lines_of(tmp_path / "child")) == ["open", "sum", "sum", "sum", "close"]


def test_ledger_lines_of_threads_are_not_interleaved(tmp_path):
    run = open_run(tmp_path, every=1)
    threads = [
        threading.Thread(target=lambda: [spans.record_event("save", text="x" * 500) for _ in range(50)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    steps(1, 50)
    for thread in threads:
        thread.join()
    leave()
    assert kinds(lines_of(run.path)).count("save") == 200


SCRIPT = """
import sys
from dtrain import spans
from dtrain.run.run_dir import open_run
open_run(sys.argv[1], every=1)
with spans.span("step"):
    spans.record_step(1, samples=1, tokens=1)
{end}
"""


@pytest.mark.parametrize(
    ("end", "last"),
    [("", "done"), ("raise KeyError(1)", "failed"), ("import os; os.kill(os.getpid(), 9)", None)],
    ids=["end", "exception", "killed"],
)
@pytest.mark.slow
def test_process_without_init_dist_closes_ledger_at_exit(tmp_path, end, last):
    script = textwrap.dedent(SCRIPT.format(end=end))
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False, timeout=300, capture_output=True)
    lines = lines_of(tmp_path)
    assert lines[-1].get("reason") == last
    assert lines[-1]["kind"] == ("sum" if last is None else "close")
    assert lines[0]["setup_s"] < 300


def on_ranks(folder, bad_rank=None, other_folder=None):
    from dtrain.dist.init import get_dist_info

    rank = get_dist_info().rank
    mine = Path(other_folder) if rank == bad_rank and other_folder else Path(folder)
    if rank == bad_rank and not other_folder:
        mine.parent.mkdir(parents=True, exist_ok=True)
        mine = mine.parent / "file" / "x"
        mine.parent.write_text("")
    try:
        run = open_run(mine, every=1)
    except ConfigError as error:
        return str(error)
    steps(1, 2)
    leave()
    return run.attempt


def test_each_rank_writes_a_ledger_and_rank_0_other_files(ranks, tmp_path):
    assert ranks(2).run(on_ranks, str(tmp_path)) == [1, 1]
    assert ranks(2).run(on_ranks, str(tmp_path)) == [2, 2]
    assert [about_of(tmp_path, attempt)["hosts"] for attempt in (1, 2)] == [{os.uname().nodename: [0, 1]}] * 2
    for rank in (0, 1):
        lines = lines_of(tmp_path, rank)
        assert [line["rank"] for line in lines if line["kind"] == "open"] == [rank, rank]
        assert [line["reason"] for line in lines if line["kind"] == "close"] == ["done", "done"]


def test_folder_unwritable_on_one_rank_is_refused_on_all_ranks(ranks, tmp_path):
    first, second = ranks(2).run(on_ranks, str(tmp_path / "run"), 1)
    assert first == second
    assert first.startswith("open_run: cannot write ")
    assert first.endswith("All ranks must be able to write. (rank 1, 1 of 2 ranks)")
    assert os.listdir(tmp_path / "run" / run_files.ATTEMPTS) == []


def test_different_folders_on_ranks_are_refused(ranks, tmp_path):
    errors = ranks(2).run(on_ranks, str(tmp_path / "a"), 1, str(tmp_path / "b"))
    text = f"open_run: path must be equal on all ranks, got {tmp_path}/b on rank 1 and {tmp_path}/a on rank 0."
    assert [error.startswith(text) for error in errors] == [True] * 2


def test_upload_sends_changed_files_without_checkpoints(tmp_path):
    run = open_run(tmp_path / "run")
    for name in ("metrics.jsonl", "traces/a.json", "checkpoints/step-1/data", "ledger/rank-00001.jsonl"):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text(name)
    there = tmp_path / "remote"
    assert upload_run(run, there) == 5
    names = sorted(path.relative_to(there / "run").as_posix() for path in there.rglob("*") if path.is_file())
    ledgers = ["ledger/rank-00000.jsonl", "ledger/rank-00001.jsonl"]  # of an attempt with more ranks
    assert names == ["attempts/attempt-00001.json", *ledgers, "metrics.jsonl", "traces/a.json"]
    assert upload_run(run, there) == 0
    (run / "metrics.jsonl").write_text("more")
    assert upload_run(run, str(there)) == 1
    assert (there / "run" / "metrics.jsonl").read_text() == "more"


def test_upload_tolerates_file_removed_meanwhile(tmp_path, monkeypatch):
    run = open_run(tmp_path / "run")
    for name in ("a.json", "b.json"):
        (run / name).write_text("x")

    def is_file(path):
        exists = os.path.isfile(path)
        if path.name == "a.json":
            path.unlink(missing_ok=True)
        return exists

    monkeypatch.setattr(Path, "is_file", is_file)
    upload_run(run, tmp_path / "root")
    assert sorted(os.listdir(tmp_path / "root" / "run")) == ["attempts", "b.json", "ledger"]


def test_upload_into_run_folder_sends_no_copies(tmp_path):
    run = open_run(tmp_path / "run")
    assert upload_run(run, run.path) == 2
    assert upload_run(run, run.path / "deeper") == 2
    with pytest.raises(ConfigError, match=r"upload_run: root must be outside of the run's folder, got .*Pass another root"):
        upload_run(Run(path=tmp_path / "run", attempt=1, rank=0), tmp_path)


def test_run_is_uploaded_at_its_end(tmp_path):
    run = open_run(tmp_path / "run", upload=tmp_path / "root")
    leave()
    sent = (tmp_path / "root" / "run" / "ledger" / "rank-00000.jsonl").read_text()
    assert sent == (run / "ledger/rank-00000.jsonl").read_text()
    assert json.loads(sent.splitlines()[-1])["kind"] == "close"


UPLOAD = """
import sys
from dtrain import storage
from dtrain.run.run_dir import open_run, upload_run
run = open_run(sys.argv[1])
(run / "metrics.jsonl").write_text("x")
print(upload_run(run, sys.argv[2]), upload_run(run, sys.argv[2]))
print(sorted(name for name, _ in storage.walk_files(storage.resolve_path(sys.argv[2]))))
"""


@pytest.mark.slow
def test_run_is_uploaded_to_s3_server(tmp_path):
    with servers.s3(behind_proxy=False) as server:
        command = [sys.executable, "-c", UPLOAD, str(tmp_path / "run"), f"{server.root()}/ckpt"]
        environment = {**os.environ, **server.environment}
        done = subprocess.run(command, check=False, timeout=servers.LONG_S, capture_output=True, text=True, env=environment)
    assert done.stdout.splitlines() == [
        "3 0",
        "['run/attempts/attempt-00001.json', 'run/ledger/rank-00000.jsonl', 'run/metrics.jsonl']",
    ], done.stderr


def test_failed_upload_warns_once(tmp_path):
    run = open_run(tmp_path / "run")
    (tmp_path / "file").write_text("")
    with pytest.warns(RuntimeWarning, match=r"upload_run: cannot copy .* Training continues"):
        assert upload_run(run, tmp_path / "file" / "root") == 0
    assert lines_of(run.path)[-1]["logger"] == "upload"


def test_events_contain_no_secrets(tmp_path):
    run = open_run(tmp_path)
    spans.record_event("dropped", logger="mlflow", error=f"no answer from http://me:{SECRET}@host/x?sig={SECRET}", self=1)
    line = lines_of(run.path)[-1]
    assert (line["error"], line["self"]) == ("no answer from http://me:[redacted]@host/x?sig=[redacted]", 1)


@pytest.mark.parametrize("notebook", [False, True], ids=["second run", "notebook"])
def test_setup_time_is_counted_only_for_first_run_of_process(tmp_path, monkeypatch, notebook):
    if notebook:
        monkeypatch.setattr(sys, "ps1", "In : ", raising=False)
        monkeypatch.setattr(run_dir._OPEN_RUN, "has_opened", False)
    else:
        open_run(tmp_path)
        leave()
    open_run(tmp_path)
    assert [line["setup_s"] for line in lines_of(tmp_path) if line["kind"] == "open"][-1] == 0


def test_resuming_earlier_step_writes_sums_from_that_step(tmp_path):
    run = open_run(tmp_path, every=10)
    steps(1, 100)
    spans.set_position(20, samples=160, tokens=1280)
    spans.record_event("resumed", step=20, path="ckpt")
    before = len(lines_of(run.path))
    steps(21, 40)
    assert [line["step"] for line in lines_of(run.path)[before:]] == [30, 40]


def test_disk_full_at_start_is_refused_without_new_attempt(tmp_path, monkeypatch):
    def full(record, **how):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(run_dir, "json", SimpleNamespace(dumps=full))
        with pytest.raises(ConfigError, match=r"open_run: cannot write .*: No space left on device"):
            open_run(tmp_path)
    assert os.listdir(tmp_path / run_files.ATTEMPTS) == []
    assert open_run(tmp_path).attempt == 1


def test_unreadable_settings_raise_config_error(tmp_path):
    class Broken(dict):
        def items(self):
            raise LookupError("no such thing")

    with pytest.raises(ConfigError, match=r"open_run: arguments must be readable, got LookupError: no such thing"):
        open_run(tmp_path, settings=Broken(a=1))


def test_failing_metadata_collection_does_not_stop_run(tmp_path, monkeypatch):
    monkeypatch.setattr(run_dir, "attempt_metadata", lambda *facts: 1 / 0)
    run = open_run(tmp_path)
    assert lines_of(run.path)[-1]["logger"] == "about"
    assert about_of(tmp_path)["attempt"] == 1


def test_closed_ledger_ignores_steps_and_events(tmp_path):
    path = tmp_path / "ledger"
    path.touch()
    ledger = LedgerWriter(path, attempt=1, interval=Duration(1, "ba"))
    ledger.open()
    ledger.close("done")
    ledger.close("done")
    ledger.on_step()
    ledger.on_event({"name": "late", "at": 0.0})
    assert [json.loads(line)["kind"] for line in path.read_text().splitlines()] == ["open", "sum", "close"]
