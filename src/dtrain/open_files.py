"""Raise this process's limit of open files to the number that a job needs. Imports no torch."""

from __future__ import annotations

import resource

from dtrain.errors import ConfigError

# A rank holds 22 files and 3 sockets per rank for gloo's groups, and a few for records. The rendezvous store and the launcher
# hold fewer.
_OPEN_FILES = 40
_OPEN_FILES_PER_RANK = 4
# Shards, checkpoints, loader workers, NCCL.
_SPARE_OPEN_FILES = 512


def raise_open_file_limit(caller: str, world_size: int) -> None:
    """Raise the soft limit of open files if a process of a job of ``world_size`` ranks may need more.

    Mutates: this process's limit of open files, which its children inherit.

    Raises:
        ConfigError: the hard limit is too low.
    """
    needed = _OPEN_FILES + _OPEN_FILES_PER_RANK * world_size
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limited = hard != resource.RLIM_INFINITY
    if limited and hard < needed:
        raise ConfigError(
            f"{caller}: the hard limit of open files must be at least {needed} for {world_size} ranks, got {hard}. "
            f"Run `ulimit -n {needed}` as root before the start, or use at most {max_ranks(hard)} ranks."
        )
    wanted = min(needed + _SPARE_OPEN_FILES, hard) if limited else needed + _SPARE_OPEN_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def max_ranks(hard_limit: int) -> int:
    """Return the number of ranks of the largest job that ``hard_limit`` open files allow, at least 1."""
    return max(1, (hard_limit - _OPEN_FILES) // _OPEN_FILES_PER_RANK)
