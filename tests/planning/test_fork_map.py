"""Results from forked processes: their order, errors, and children that are killed."""

import multiprocessing
import os
import signal

import pytest

from dtrain.errors import ConfigError, StepError
from dtrain.planning.estimate import fork_map


@pytest.mark.parametrize("processes", [1, 2, 8])
def test_results_have_the_number_of_their_item(processes):
    parts = [lambda n=n: n * n for n in range(5)]  # not picklable
    found = dict(fork_map(lambda part: (part(), os.getpid()), parts, processes=processes))
    assert [found[number][0] for number in range(5)] == [0, 1, 4, 9, 16]
    pids = {pid for _, pid in found.values()}
    assert pids == {os.getpid()} if processes == 1 else len(pids) == 5


def test_large_results_do_not_block():
    found = dict(fork_map(lambda n: bytes(n), [2**20, 2**21], processes=2))
    assert [len(found[number]) for number in (0, 1)] == [2**20, 2**21]


def fail(error):
    raise error


def killed(_):
    os.kill(os.getpid(), signal.SIGKILL)


FAILURES = {
    "own error": (lambda n: fail(StepError("it fails")), StepError, "^it fails$"),
    "other error": (lambda n: fail(ValueError("a\nb")), ConfigError, r"plan: ValueError: a b\. Run with --processes 1"),
    "killed": (killed, ConfigError, r"a process of the search ended with exit code -9\. Free memory"),
}


@pytest.mark.parametrize(("function", "error", "message"), FAILURES.values(), ids=FAILURES)
def test_failure_in_a_child_is_raised(function, error, message):
    with pytest.raises(error, match=message):
        list(fork_map(function, [0, 1], processes=2))


def test_children_end_if_the_caller_stops():
    before = set(multiprocessing.active_children())
    results = fork_map(lambda n: n if n == 0 else signal.pause(), [0, 1, 2], processes=3)
    assert next(results) == (0, 0)
    assert len(set(multiprocessing.active_children()) - before) == 2
    results.close()
    assert set(multiprocessing.active_children()) <= before
