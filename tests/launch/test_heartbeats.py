"""A rank's reports reach the launcher's pipe, and the launcher cannot stop the rank."""

from __future__ import annotations

import os
import signal
import threading

import pytest
import torch

from dtrain.launch import heartbeats
from dtrain.launch.heartbeats import ProgressKind, ProgressRecord
from dtrain.monitors.reduce_metrics import reduce_metrics
from dtrain.typing import Metric


@pytest.fixture
def pipe():
    read, write = os.pipe()
    os.set_blocking(read, False)
    heartbeats.connect(write, rank=3)
    yield read
    heartbeats._STATE.fd = None
    os.close(write)
    os.close(read)


def received(read):
    try:
        return heartbeats.ProgressDecoder().feed(os.read(read, 1 << 16))
    except BlockingIOError:
        return []


def test_record_round_trips_through_encoding():
    sent = [
        ProgressRecord(kind=ProgressKind.COMMITTED, rank=511, value=2**40, at=12.5, activity="save"),
        ProgressRecord(kind=ProgressKind.OPENED, rank=0, value=-1, at=0.0),
    ]
    data = b"".join(record.encode() for record in sent)
    assert len(data) == 2 * heartbeats.RECORD_BYTES
    assert heartbeats.ProgressDecoder().feed(data) == sent


@pytest.mark.parametrize("size", [1, 7, 63, 64, 65, 1000])
def test_records_are_decoded_from_fragments_and_foreign_bytes(size):
    sent = [ProgressRecord(kind=ProgressKind.COMMITTED, rank=1, value=step, at=0.5) for step in range(5)]
    unknown = ProgressRecord(kind=ProgressKind.OPENED, rank=1, value=0, at=0.0).encode().replace(b"dtrP\x01", b"dtrP\x63")
    data = (
        b"hello\n"
        + sent[0].encode()
        + b"dtr"
        + sent[1].encode()
        + unknown
        + b"\0" * 100
        + b"".join(r.encode() for r in sent[2:])
    )
    decoder, records = heartbeats.ProgressDecoder(), []
    for begin in range(0, len(data), size):
        records += decoder.feed(data[begin : begin + size])
    assert records == sent


def test_environment_variable_is_consumed_once():
    read, write = os.pipe()
    environment = {"DTRAIN_HEARTBEAT_FD": str(write)}
    heartbeats.connect_from_env(environment, rank=2)
    assert environment == {}
    heartbeats.report(ProgressKind.CLOSED)
    assert [record.rank for record in received(read)] == [2]
    heartbeats.connect_from_env({}, rank=5)
    assert heartbeats._STATE.rank == 2
    heartbeats._STATE.fd = None
    os.close(write)
    os.close(read)


@pytest.mark.parametrize("value", ["nonsense", "999999", "0x1"])
def test_environment_variable_with_an_invalid_value_is_ignored(value):
    heartbeats.connect_from_env({"DTRAIN_HEARTBEAT_FD": value}, rank=0)
    assert heartbeats._STATE.fd is None


def test_long_description_is_truncated():
    (record,) = heartbeats.ProgressDecoder().feed(
        ProgressRecord(kind=ProgressKind.PROGRESS, rank=0, value=1, at=0.0, activity="ü" * 100).encode()
    )
    assert record.activity.startswith("ü" * 19)
    assert len(record.activity.encode()) <= 44


def test_progress_counts_every_heartbeat_and_sends_few(pipe):
    for _ in range(1000):
        heartbeats.heartbeat("step")
    records = received(pipe)
    assert 1 <= len(records) < 1000
    assert (records[0].kind, records[0].rank, records[0].value, records[0].activity) == (ProgressKind.PROGRESS, 3, 1, "step")
    assert heartbeats.last_progress() == (1000, "step")


def test_heartbeats_of_other_threads_are_not_counted(pipe):
    thread = threading.Thread(target=heartbeats.heartbeat, args=("alive",))
    thread.start()
    thread.join()
    assert received(pipe) == []
    assert heartbeats.last_progress()[0] == 0


def test_forked_child_sends_no_records(pipe):
    pid = os.fork()
    if pid == 0:
        heartbeats.report(ProgressKind.COMMITTED, 7)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert received(pipe) == []


def test_full_pipe_does_not_block_the_rank(pipe):
    for step in range(10_000):
        heartbeats.report(ProgressKind.COMMITTED, step)
    assert [record.value for record in received(pipe)][:2] == [0, 1]


def test_closed_pipe_does_not_stop_the_rank():
    read, write = os.pipe()
    heartbeats.connect(write, rank=0)
    os.close(read)
    before = signal.getsignal(signal.SIGPIPE)
    heartbeats.report(ProgressKind.COMMITTED, 1)
    assert heartbeats._STATE.fd is None
    assert signal.getsignal(signal.SIGPIPE) == before
    os.close(write)


def test_connect_refuses_a_file_descriptor_that_is_no_pipe(tmp_path):
    file = os.open(tmp_path / "mine", os.O_WRONLY | os.O_CREAT)
    with pytest.raises(OSError, match="the launcher's pipe is not there"):
        heartbeats.connect(file, rank=0)
    os.close(file)
    with pytest.raises(OSError, match="Bad file descriptor"):
        heartbeats.connect(file, rank=0)
    assert (tmp_path / "mine").read_bytes() == b""


def test_reduce_metrics_sends_a_heartbeat(pipe):
    heartbeats.heartbeat("waiting for data")
    reduce_metrics({"loss": Metric(total=torch.tensor(6.0), weight=torch.tensor(2.0))})
    assert heartbeats.last_progress() == (2, "reduce_metrics")
