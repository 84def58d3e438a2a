"""The limit of open files: raised for the ranks of a job, or refused in one line."""

import resource

import pytest

from dtrain.errors import ConfigError
from dtrain.open_files import max_ranks, raise_open_file_limit


@pytest.fixture
def limits(monkeypatch):
    """A simulated limit, because a process cannot raise its hard limit again: ``limits[:] = [soft, hard]``."""
    values = [1024, 4096]
    monkeypatch.setattr(resource, "getrlimit", lambda kind: tuple(values))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, new: values.__setitem__(slice(None), new))
    return values


@pytest.mark.parametrize(
    ("world_size", "before", "after"),
    [
        (2, (1024, 4096), (1024, 4096)),
        (512, (1024, 4096), (2120, 4096)),
        (512, (1024, 2000), (2000, 2000)),
        (4096, (1024, resource.RLIM_INFINITY), (12884, resource.RLIM_INFINITY)),
        (4096, (resource.RLIM_INFINITY, resource.RLIM_INFINITY), (resource.RLIM_INFINITY, resource.RLIM_INFINITY)),
    ],
)
def test_soft_limit_is_raised_to_need_of_job(limits, world_size, before, after):
    limits[:] = before
    raise_open_file_limit("init_dist", world_size)
    assert tuple(limits) == after


def test_too_low_hard_limit_is_refused_with_numbers(limits):
    limits[:] = 1024, 1024
    with pytest.raises(ConfigError) as error:
        raise_open_file_limit("init_dist", 512)
    assert str(error.value) == (
        "init_dist: the hard limit of open files must be at least 1608 for 512 ranks, got 1024. "
        "Run `ulimit -n 1608` as root before the start, or use at most 317 ranks."
    )
    raise_open_file_limit("init_dist", 317)


def test_max_ranks_is_at_least_one():
    assert (max_ranks(1024), max_ranks(10)) == (317, 1)
