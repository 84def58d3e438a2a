"""Raise this process's limit of open files to the number that a job needs. Imports no torch."""

from __future__ import annotations

import resource

from dtrain.errors import ConfigError

# A rank holds N + 4 files for gloo's training group, the connections of the control plane, and a few of Python's. The process
# that serves the rendezvous store holds a connection of each rank, and a second one while the ranks report a failure.
_OPEN_FILES = 36
_OPEN_FILES_PER_RANK = 3
# Two channels of the control plane, each with two connections for each bit of the number of ranks.
_OPEN_FILES_PER_BIT = 4
# Shards, checkpoints, loader workers, NCCL.
_SPARE_OPEN_FILES = 512


def open_files_needed(world_size: int) -> int:
    """Return the most files that a process of a job of ``world_size`` ranks opens, besides data and checkpoints."""
    bits = (world_size - 1).bit_length()
    return _OPEN_FILES + _OPEN_FILES_PER_RANK * world_size + _OPEN_FILES_PER_BIT * bits


def raise_open_file_limit(caller: str, world_size: int) -> None:
    """Raise the soft limit of open files if a process of a job of ``world_size`` ranks may need more.

    Mutates: this process's limit of open files, which its children inherit.

    Raises:
        ConfigError: the hard limit is too low.
    """
    needed = open_files_needed(world_size)
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
    ranks = max(1, (hard_limit - _OPEN_FILES) // _OPEN_FILES_PER_RANK)
    while ranks > 1 and open_files_needed(ranks) > hard_limit:
        ranks -= 1
    return ranks
