"""Queries of the ranks of a job: while it runs, from a rank and from a terminal, and afterwards from its files."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from dtrain import launch_protocol
from dtrain.errors import ConfigError, DistError
from dtrain.launch import hang_report
from dtrain.launch.hang_report import LauncherAddress, announce_launcher, explain_hang, withdraw_launcher
from dtrain.launch.rank_records import LauncherRecord, RankEvidence, RankProgress, read_launcher_records, write_launcher_record
from dtrain.testing.fault_injection import patch_calls

TIMEOUT_S = 4

SCRIPT = """
    import os, pathlib, sys, threading, time
    import torch, torch.distributed as dist
    import dtrain as dt
    from dtrain.launch.hang_report import explain_hang

    here = pathlib.Path(os.environ["FOLDER"])

    def say(name, text):
        (here / name).with_suffix(".partial").write_text(text)
        (here / name).with_suffix(".partial").rename(here / name)

    def batches(rank):
        for step in range(6):
            if step == 3 and rank == 1:
                say("asleep", "yes")
                while not (here / "wake").exists():
                    time.sleep(0.02)
            yield torch.ones(3)

    def ask():
        while not (here / "ask").exists():
            time.sleep(0.02)
        say("answer", explain_hang())

    with dt.init_dist(device="cpu") as info:
        if info.rank == 2:
            threading.Thread(target=ask, daemon=True).start()
        for batch in batches(info.rank):
            dt.launch.heartbeat("step")
            dist.all_reduce(batch)
        say(f"done-{info.rank}", explain_hang() if info.rank == 0 else "yes")
"""


SLEEPS = 1 + next(number for number, line in enumerate(SCRIPT.splitlines(), 1) if '"wake"' in line)


def dtrain(*args: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "dtrain", *args], capture_output=True, text=True, timeout=60)


def without_time(told: str) -> str:
    """Return the message, whose last line says that it is an old record."""
    message, _, last = told.rpartition("\n")
    assert re.fullmatch(r"  as of [0-9]{4}-[0-9: +-]+: no launcher of the job can be asked here", last), told
    return message


@pytest.mark.costly
def test_hang_command_explains_running_job_without_stopping_it(start, tmp_path):
    folder = tmp_path / "run"
    job = start(SCRIPT, n=3, options=["--run-dir", str(folder)])
    job.wait_for("asleep")
    asked = dtrain("hang", folder)
    assert (asked.returncode, asked.stderr) == (0, ""), asked.stderr
    first, *rest = asked.stdout.splitlines()
    assert first.startswith("dtrain: launch: asked: rank 1 of 3 made no progress for "), asked.stdout
    assert first.endswith(f" s, and others wait in a collective; see {folder}/hang/report.txt")
    assert rest[0].startswith(tuple(f"  rank 1: {job.script}:{line} in batches (" for line in (SLEEPS, SLEEPS - 1))), rest
    lacks = next(line.rpartition(":")[0] for line in rest if "has not entered" in line)  # it sleeps in one of two lines
    assert lacks == "  rank 1 has not entered all_reduce #4 of group training, where ranks 0, 2 wait; it is in script.py"
    report = (folder / "hang" / "report.txt").read_text()
    assert report.startswith(asked.stdout)
    for line in (
        "group training (gloo): ranks 0, 1, 2",
        "rank 0: in init_dist's block, step, point of progress 4",
        "in batches",
    ):
        assert line in report
    # Again, by a thread of a rank whose main thread waits.
    (tmp_path / "ask").write_text("now")
    (answer,) = job.wait_for("answer")
    assert [line.split(" made no")[0] for line in answer.splitlines()[:1]] == ["dtrain: launch: asked: rank 1 of 3"]
    assert lacks in answer
    (tmp_path / "wake").write_text("now")
    result = job.wait()
    assert result.code == 0, result.err
    assert (
        sum(line.startswith("dtrain: launch: asked: ") for line in result.err.splitlines()) == 3
    )  # the last by rank 0, in passing
    assert len((tmp_path / "done-0").read_text().splitlines()) <= 12
    assert list((folder / "hang").glob("*.pid")) == []
    afterwards = dtrain("hang", folder)
    assert (afterwards.returncode, without_time(afterwards.stdout.rstrip())) == (0, (tmp_path / "done-0").read_text())


@pytest.mark.slow
def test_hang_command_repeats_launcher_message_from_records_and_their_copy(start, tmp_path):
    folder = tmp_path / "run"
    job = start(SCRIPT, n=3, options=["--run-dir", str(folder), "--hang-timeout", str(TIMEOUT_S), "--grace", "0.5"])
    result = job.wait()
    assert result.code == 124, result.err
    said = [line for line in result.err.splitlines() if line.startswith(("dtrain: launch: hang: ", "  "))]
    assert "\n".join(said) == without_time(explain_hang(folder))
    assert explain_hang(folder / "hang") == explain_hang(folder)
    (folder / "hang" / "report.txt").unlink()  # the text can be made from the records again
    assert "\n".join(said) == without_time(explain_hang(folder))
    whole = (folder / "hang" / "report.txt").read_text()
    for rank in range(3):
        assert f"\nrank {rank}: in init_dist's block" in whole
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in (folder / "hang").glob("rank-*"):
        shutil.copy(path, copy)
    from_ranks = explain_hang(copy).splitlines()
    told = [line for line in said[1:] if "has not entered" in line]
    assert told != []
    assert set(told) <= set(from_ranks)  # of the launcher's own knowledge nothing is there
    assert (copy / "report.txt").exists()


def record(*collectives: tuple[int, bool]) -> str:
    issued = [{"number": number, "op": "all_reduce", "sizes": [[2]], "waits": waits} for number, waits in collectives]
    last = max(number for number, _ in collectives)
    group = {"id": "1", "backend": "gloo", "name": "dp_shard", "ranks": [0, 1, 2, 3], "last": last, "collectives": issued}
    return json.dumps({"rank": 0, "passed": 5, "doing": "step", "groups": [group]})


@pytest.fixture
def records(tmp_path: Path) -> Path:
    """Of four ranks on two nodes, whose launchers share a folder; rank 3 lacks a collective."""
    for rank in range(4):
        path = launch_protocol.flight_record_file(tmp_path, rank)
        path.parent.mkdir(exist_ok=True)
        path.write_text(record((40, False)) if rank == 3 else record((40, False), (41, True)))
        stack = f'Thread 0x01 (most recent call first):\n  File "/home/me/loader.py", line {88 if rank == 3 else 9} in f\n'
        launch_protocol.stacks_file(tmp_path, rank).write_text(stack)
    for node in range(2):
        seen = RankProgress(phase="open", at=0.0, passed=5, doing="step")
        ranks = tuple(
            RankEvidence(rank=rank, pid=70 + rank, progress=seen, silent_s=7.0, state="S") for rank in (2 * node, 2 * node + 1)
        )
        write_launcher_record(
            path.parent, LauncherRecord(node_rank=node, at=100.0 + node, world_size=4, timeout_s=None, ranks=ranks)
        )
    return path.parent


def test_explain_hang_combines_records_of_several_nodes(records):
    reason = "made no progress for 7.0 s, and others wait in a collective"
    assert without_time(explain_hang(records)) == "\n".join([
        f"dtrain: launch: asked: rank 3 of 4 {reason}; see {records}/report.txt",
        "  rank 3: /home/me/loader.py:88 in f (step, point of progress 5)",
        "  rank 3 has not entered all_reduce #41 of group dp_shard, where ranks 0, 1, 2 wait; it is in loader.py:88",
        "  ranks 0, 1, 2: /home/me/loader.py:9 in f (step, point of progress 5)",
    ])  # fmt: skip
    assert (records / "report.txt").read_text().splitlines()[7:18] == [
        "group dp_shard (gloo): ranks 0, 1, 2, 3",
        "  rank 0: last done all_reduce #40; waits in all_reduce #41",
        "  rank 1: last done all_reduce #40; waits in all_reduce #41",
        "  rank 2: last done all_reduce #40; waits in all_reduce #41",
        "  rank 3: last done all_reduce #40",
        "",
        "rank 0: in init_dist's block, step, point of progress 5, last heard of 7.0 s before, process 70, its state S",
        "  last collectives of group dp_shard (gloo)",
        "    all_reduce #40 [[2]]",
        "    all_reduce #41 [[2]] waits",
        "  stacks",
    ]


@pytest.mark.parametrize("about", [None, "", "[]", '{"launch": null}', '{"launch": {"folder": 3}}', "here"])
def test_training_run_folder_resolves_to_its_last_launch(records, tmp_path, about):
    run, nowhere = tmp_path / "gpt", '{"launch": {"folder": "/nowhere"}}'
    (run / "attempts").mkdir(parents=True)
    for number, text in (
        (9, nowhere),
        (10, json.dumps({"launch": {"folder": str(records.parent)}}) if about == "here" else about),
    ):
        if text is not None:
            (run / "attempts" / f"attempt-{number:05d}.json").write_text(text)
    if about == "here":
        assert "rank 3 has not entered all_reduce #41" in explain_hang(run)
    else:
        with pytest.raises(ConfigError, match="has no records of ranks"):
            explain_hang(run)


def test_launcher_records_of_earlier_launch_are_ignored(records):
    (new, old) = read_launcher_records(records)
    write_launcher_record(records, replace(old, at=new.at + 1000.0))
    assert [account.node_rank for account in read_launcher_records(records)] == [1]
    write_launcher_record(records, replace(new, world_size=2, at=new.at + 2000.0))
    assert [account.node_rank for account in read_launcher_records(records)] == [0]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"node_rank": 1}', '{"ranks": [3]}'])
def test_damaged_launcher_record_is_ignored(records, text):
    (records / "launcher-00000.json").write_text(text)
    assert [account.node_rank for account in read_launcher_records(records)] == [1]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"pid": -1, "start_ticks": "", "host": "", "report": ""}'])
def test_damaged_launcher_pid_file_is_ignored(records, text):
    (records / "launcher-00000.pid").write_text(text)
    assert "rank 3 has not entered" in explain_hang(records)


def test_explain_hang_without_folder_or_launcher_raises_config_error(tmp_path, monkeypatch):
    monkeypatch.delenv(launch_protocol.RUN_DIR, raising=False)
    with pytest.raises(
        ConfigError, match=r"path must be set in a process that `dtrain launch` did not start. Pass the folder of a run"
    ):
        explain_hang()
    with pytest.raises(
        ConfigError, match=r"path must be an existing folder, got '.*gone'. Pass the run folder of `dtrain launch`"
    ):
        explain_hang(tmp_path / "gone")
    with pytest.raises(ConfigError, match=r"none of its launchers runs on this machine. Pass the run folder"):
        explain_hang(tmp_path)
    announce_launcher(tmp_path, 0, single_node=True)
    path = tmp_path / "hang" / "launcher-00000.pid"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"host": "elsewhere"}))
    with pytest.raises(ConfigError, match=r"runs on this machine. Query on elsewhere"):
        explain_hang(tmp_path)
    withdraw_launcher(tmp_path, 0)
    withdraw_launcher(tmp_path, 0)
    assert not path.exists()
    (tmp_path / "file").write_text("")
    announce_launcher(tmp_path / "file", 0, single_node=True)  # cannot be written: then no query is possible


def announced(folder: Path, pid: int) -> None:
    path = folder / "hang" / "launcher-00000.pid"
    path.parent.mkdir()
    started = hang_report._process_start_ticks(pid)
    path.write_text(
        json.dumps(asdict(LauncherAddress(pid=pid, start_ticks=started, host=socket.gethostname(), report="report.txt")))
    )


def test_folder_removed_while_reading_has_no_records(tmp_path):
    """A launcher that ends removes a file that is empty."""
    records = tmp_path / "hang"
    records.mkdir()

    def remove() -> None:
        with contextlib.suppress(FileNotFoundError):
            records.rmdir()

    nothing = pytest.raises(ConfigError, match="has no records of ranks")
    with patch_calls("os.listdir", before=remove), patch_calls("os.scandir", before=remove), nothing:
        explain_hang(tmp_path)
    assert not records.exists()


def test_stacks_removed_while_reading_are_still_explained(tmp_path):
    stacks = launch_protocol.stacks_file(tmp_path, 0)
    stacks.parent.mkdir()
    stacks.touch()

    def remove() -> None:
        stacks.unlink(missing_ok=True)

    with patch_calls("dtrain.launch.hang_report.collect_evidence", after=remove):
        assert "rank 0" in explain_hang(tmp_path)
    assert not stacks.exists()


def test_unresponsive_or_dead_launcher_raises_error(tmp_path, monkeypatch):
    waits = "import time; print(1, flush=True); time.sleep(99)"
    deaf, dies = (
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        for code in (
            f"import signal; signal.signal({int(launch_protocol.STACKS_SIGNAL)}, signal.SIG_IGN); {waits}",
            waits,
        )
    )
    for name, process in (("deaf", deaf), ("dies", dies)):
        process.stdout.readline()
        announced_in = tmp_path / name
        announced_in.mkdir()
        announced(announced_in, process.pid)
    monkeypatch.setattr(hang_report, "PATIENCE_S", 0.2)
    with pytest.raises(
        DistError, match=rf"process {deaf.pid}, did not answer within 0.2 s. Its ranks do not run, or the launcher is stopped"
    ):
        explain_hang(tmp_path / "deaf")
    monkeypatch.setattr(hang_report, "PATIENCE_S", 60.0)
    with pytest.raises(DistError, match=rf"process {dies.pid}, exited before its answer. Read the output of the launcher"):
        explain_hang(tmp_path / "dies")
    for process in (deaf, dies):
        process.kill()
        process.communicate(timeout=60)


def test_launcher_of_another_user_is_refused(tmp_path, monkeypatch):
    def refuse(pid: int, number: int) -> None:
        raise PermissionError

    announced(tmp_path, os.getpid())
    monkeypatch.setattr(hang_report.os, "kill", refuse)
    with pytest.raises(
        ConfigError, match=f"the launcher, process {os.getpid()}, belongs to another user. Run the query as that user"
    ):
        explain_hang(tmp_path)


def test_reused_pid_of_launcher_is_not_signalled(tmp_path):
    announce_launcher(tmp_path, 0, single_node=True)
    path = tmp_path / "hang" / "launcher-00000.pid"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"start_ticks": "1"}))  # this process would die of the signal
    with pytest.raises(ConfigError, match="none of its launchers runs on this machine"):
        explain_hang(tmp_path)
