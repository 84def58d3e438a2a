"""Open shards, and the threads that fetch shards."""

import threading

import pytest

from dtrain.data.stream.formats.shard_format import Shard
from dtrain.data.stream.open_shards import OpenShardCache, ShardPrefetcher
from dtrain.errors import DataError

LONG_S = 300


class Rows(Shard):
    """A shard of ten rows that knows whether it is open."""

    def __init__(self, number, log):
        self._number, self._log = number, log
        log.append(f"open {number}")

    def __len__(self):
        return 10

    def __getitem__(self, row):
        if row == 9:
            raise ValueError("nine\nis bad")
        return self._number, row

    def close(self):
        self._log.append(f"close {self._number}")


@pytest.fixture
def log():
    return []


@pytest.fixture
def opened(log):
    return OpenShardCache(
        lambda number: (Rows(number, log), 10 * number), lambda number: f"shard-{number}", max_open=2, max_bytes=40
    )


def test_shard_is_opened_once(opened, log):
    assert opened.read(1, [3, 1]) == [(1, 3), (1, 1)]
    assert opened.read(1, [0]) == [(1, 0)]
    assert log == ["open 1"]


def test_least_recently_used_shard_is_closed(opened, log):
    for number in (1, 2, 1, 0):
        opened.read(number, [0])
    assert log == ["open 1", "open 2", "close 2", "open 0"]


def test_open_shards_keep_bounded_bytes(opened, log):
    for number in (3, 2, 9):
        opened.read(number, [0])
    assert log == ["open 3", "open 2", "close 3", "open 9"] or log[:3] == ["open 3", "open 2", "close 3"]
    opened.read(1, [0])
    assert "close 9" in log


def test_undecodable_sample_is_named(opened):
    with pytest.raises(DataError, match=r"^shard-1: sample 9 cannot be decoded: ValueError: nine$"):
        opened.read(1, [0, 9])
    assert opened.read(1, [0]) == [(1, 0)]


def test_failed_open_is_tried_again(log):
    failures = [DataError("not yet")]

    def open_shard(number):
        if failures:
            raise failures.pop()
        return Rows(number, log), 0

    opened = OpenShardCache(open_shard, str, max_open=2, max_bytes=None)
    with pytest.raises(DataError, match=r"^not yet$"):
        opened.read(1, [0])
    assert opened.read(1, [0]) == [(1, 0)]


def test_close_closes_all_shards(opened, log):
    opened.read(1, [0])
    opened.close()
    assert log == ["open 1", "close 1"]
    assert opened.read(1, [0]) == [(1, 0)]


def test_shard_in_use_is_not_closed(log):
    reading, go_on = threading.Event(), threading.Event()

    class Slow(Rows):
        def __getitem__(self, row):
            reading.set()
            go_on.wait(LONG_S)
            self._log.append("read")
            return row

    opened = OpenShardCache(lambda number: (Slow(number, log), 0), str, max_open=1, max_bytes=None)
    thread = threading.Thread(target=opened.read, args=(1, [0]))
    thread.start()
    reading.wait(LONG_S)
    opened.close()
    go_on.set()
    thread.join(LONG_S)
    assert log == ["open 1", "read"]


def test_requests_are_fetched_in_order_and_once():
    fetched, begun, go_on = [], threading.Event(), threading.Event()

    def fetch(number, stopped):
        fetched.append(number)
        begun.set()
        go_on.wait(LONG_S)

    ahead = ShardPrefetcher(fetch, 1)
    ahead.request([4])
    begun.wait(LONG_S)
    ahead.request([4, 2, 3])  # 4 is under way
    ahead.request([3, 1])
    go_on.set()
    for thread in ahead._threads:
        thread.join(LONG_S)
    assert fetched == [4, 2, 3, 1]


def test_failed_fetch_is_left_to_the_reader():
    fetched = []

    def fetch(number, stopped):
        fetched.append(number)
        raise DataError("missing")

    ahead = ShardPrefetcher(fetch, 1)
    ahead.request([1, 2])
    for thread in ahead._threads:
        thread.join(LONG_S)
    assert fetched == [1, 2]


def test_close_stops_running_fetches():
    begun, ends = threading.Event(), []

    def fetch(number, stopped):
        begun.set()
        while not stopped():
            threading.Event().wait(0.01)
        ends.append(number)

    ahead = ShardPrefetcher(fetch, 2)
    ahead.request([1])
    begun.wait(LONG_S)
    ahead.close()
    assert ends == [1]
    ahead.request([2])
    assert not [thread for thread in ahead._threads if thread.is_alive()]
