"""The exceptions of all ranks, each shown once, with its frames folded."""

from __future__ import annotations

import pytest

from dtrain.launch.result import format_exceptions, group_exceptions
from dtrain.launch_protocol import RankFailure


def failure(rank, *, when=0.0, message="boo", place="a.py", line=1, kind="ValueError", in_collective=False):
    frames = f'Traceback (most recent call last):\n  File "{place}", line {line}, in <module>\n{kind}: {message}\n'
    return RankFailure(
        rank=rank,
        at=when,
        error_type=kind,
        message=message,
        traceback_text=frames,
        exit_code=1,
        in_collective=in_collective,
        short_traceback=frames,
    )


def grouped(*failures, first=None):
    return [mistake.ranks for mistake in group_exceptions(failures, first or failures[0])]


class TestMistakes:
    def test_failures_with_same_place_and_message_are_grouped(self):
        assert grouped(failure(2), failure(0), failure(1)) == [[0, 1, 2]]

    def test_numbers_in_messages_are_ignored_when_grouping(self):
        assert grouped(failure(0, message="rank 0 has 3 rows at 0x7f"), failure(1, message="rank 1 has 17 rows at 0xab")) == [
            [0, 1]
        ]

    @pytest.mark.parametrize("other", [{"message": "bar"}, {"line": 2}, {"place": "b.py"}, {"kind": "KeyError"}])
    def test_failures_with_different_message_place_or_kind_are_separate(self, other):
        assert grouped(failure(0), failure(1, **other)) == [[0], [1]]

    def test_first_failure_is_listed_first_and_others_by_time(self):
        first = failure(1, when=5.0)
        others = [failure(2, when=9.0, line=2), failure(0, when=4.0, line=3)]
        assert grouped(*others, first, first=first) == [[1], [0], [2]]

    def test_lost_peer_is_omitted_unless_it_is_first_failure(self):
        lost = failure(0, kind="RuntimeError", message="Connection closed by peer", in_collective=True)
        own = failure(1)
        assert grouped(lost, own, first=own) == [[1]]
        assert grouped(lost, own, first=lost) == [[0], [1]]
        assert group_exceptions([lost], None) == []

    def test_differing_messages_of_a_group_are_listed(self):
        (mistake,) = group_exceptions(
            [failure(0, message="3 rows"), failure(1, message="4 rows"), failure(2, message="3 rows")], None
        )
        assert mistake.format_lines(full=False)[-2:] == [(0, "ValueError: 3 rows"), (1, "ValueError: 4 rows")]

    def test_excess_failures_and_messages_are_counted(self):
        many = group_exceptions([failure(rank, line=rank) for rank in range(9)], None)
        lines = format_exceptions(many, full=False)
        assert sum("Traceback" in text for _, text in lines) == 4
        assert lines[-1][1].startswith("... and 5 more mistakes")
        one = group_exceptions([failure(rank, message=f"{rank} rows") for rank in range(20)], None)
        assert format_exceptions(one, full=False)[-1][1].startswith("... and 11 more ranks")


TOGETHER = """
    import os, sys, time
    from pathlib import Path

    def wait_for_all_nodes():
        # No rank fails before all are about to, and none is ended by the launcher before it has failed.
        import signal
        signal.signal(signal.SIGTERM, lambda *_: None)
        Path(os.environ["FOLDER"], "up" + os.environ["RANK"]).touch()
        while len(list(Path(os.environ["FOLDER"]).glob("up*"))) < int(os.environ["WORLD_SIZE"]):
            time.sleep(0.001)

    rank = int(os.environ["RANK"])
"""


def tracebacks(result):
    return [line for line in result.err.splitlines() if "Traceback (most recent call last):" in line]


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("shown", ["all", None, "none"])
def test_failure_of_all_ranks_is_shown_once_before_summary(run, tmp_path, n, shown):
    source = TOGETHER + "    wait_for_all_nodes()\n    raise KeyError('learning_rate')\n"
    result = run(source, n=n, shown=shown)
    assert result.code == 1
    assert len(tracebacks(result)) == 1, result.err
    assert result.err.count("KeyError: 'learning_rate'") == 2  # the traceback's and the launcher's
    last = result.err.splitlines()[-1]
    assert result.summary == [last]
    assert (" failed alike" in last) == (n > 1), last
    for rank in range(n):  # the files have the whole
        (log,) = tmp_path.glob(f"runs/*/logs/rank-{rank:05d}.stderr")
        assert log.read_text().count("Traceback (most recent call last):") == 1
        assert log.read_text().endswith("KeyError: 'learning_rate'\n")


@pytest.mark.parametrize("n", [2, 4])
def test_different_failures_are_shown_separately(run, n):
    source = TOGETHER + (
        "    wait_for_all_nodes()\n"
        "    if rank == 0: raise KeyError('learning_rate')\n"
        "    raise ValueError(f'no file for rank {rank}')\n"
    )
    result = run(source, n=n, shown=None)
    assert len(tracebacks(result)) == 2, result.err
    assert "KeyError: 'learning_rate'" in result.err
    for rank in range(1, n):
        assert f"ValueError: no file for rank {rank}" in result.err


LIBRARIES = (
    TOGETHER
    + """
    import torch
    import dtrain as dt

    class Model(torch.nn.Module):
        def forward(self, x):
            return self.inner(x)

        def inner(self, x):
            return torch.nn.functional.linear(x, torch.zeros(3, 4))

    def work():
        wait_for_all_nodes()
        model = torch.nn.Sequential(torch.nn.Identity(), Model())
        try:
            model(torch.zeros(2, 5))
        except RuntimeError as error:
            raise LookupError("the model is broken") from error

    def refused():
        wait_for_all_nodes()
        dt.init_dist(timeout_s=-1)
"""
)


@pytest.fixture(scope="module")
def ours():
    import os

    import torch

    import dtrain

    return [os.path.dirname(dtrain.__file__), os.path.dirname(torch.__file__)]


@pytest.mark.parametrize("options", [[], ["--full-traceback"]], ids=["folded", "full"])
def test_library_frames_are_folded_in_chained_exceptions(run, ours, options):
    result = run(LIBRARIES + "    work()\n", n=2, shown=None, options=options)
    text = result.err
    assert text.count("LookupError: the model is broken") == 2
    assert text.count("RuntimeError: mat1 and mat2 shapes cannot be multiplied") == 1
    assert "The above exception was the direct cause" in text
    assert [f"in {name}" in text for name in ("work", "forward", "inner", "<module>")] == [True] * 4
    assert any(folder in text for folder in ours) == bool(options)
    assert ("of torch (--full-traceback shows them)" in text) == (not options)


def test_exception_inside_dtrain_shows_user_frame_and_message(run, ours):
    result = run(LIBRARIES + "    refused()\n", n=2, shown=None)
    assert len(tracebacks(result)) == 1
    assert "in refused" in result.err
    assert "frames of dtrain (--full-traceback shows them)" in result.err
    assert "dtrain.errors.ConfigError: init_dist: timeout_s must be" in result.err
    assert not any(folder in result.err for folder in ours)


def test_lost_peer_after_failure_prints_no_second_traceback(run):
    source = """
    import dtrain as dt
    import torch
    with dt.init_dist() as info:
        if info.rank == 1:
            raise ZeroDivisionError("only here")
        torch.distributed.all_reduce(torch.zeros(1))
    """
    result = run(source, shown=None)
    assert len(tracebacks(result)) == 1, result.err
    assert "ZeroDivisionError: only here" in result.summary[-1]


def test_excepthook_of_script_replaces_traceback_of_shown_ranks(run):
    source = TOGETHER + (
        "    sys.excepthook = lambda kind, error, trace: print('hook:', error, file=sys.stderr)\n"
        "    wait_for_all_nodes()\n"
        "    raise ValueError('why')\n"
    )
    result = run(source, shown="all")
    assert tracebacks(result) == []
    assert sorted(line for line in result.err.splitlines() if "hook:" in line) == ["[rank 0] hook: why", "[rank 1] hook: why"]
