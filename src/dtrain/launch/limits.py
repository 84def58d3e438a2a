"""How many files the launcher has to hold open, and whether it may."""

from __future__ import annotations

import resource

from dtrain.errors import ConfigError

_BASE = 24  # streams, pipes and sockets of the launcher's own, with some to spare
_PER_RANK = 4  # two pipes, and two log files or the other ends of the pipes


def allow_open_files(nproc: int) -> None:
    """Make sure that ``nproc`` ranks can be looked after, by raising the soft limit where that is needed.

    Mutates: this process's limit of open files, which its children inherit.

    Raises:
        ConfigError: the hard limit is below what is needed.
    """
    needed = _BASE + _PER_RANK * nproc
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        fewer = max(1, (hard - _BASE) // _PER_RANK)
        raise ConfigError(
            f"launch: -n {nproc} needs {needed} open files, but at most {hard} are allowed; `ulimit -n {needed}`, or -n {fewer}"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
