"""What a launch is to do, decided and checked before anything is started. Pure: reads no file, starts nothing."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from dtrain import wire
from dtrain.errors import ConfigError

MAX_RANKS = 256  # two pipes a rank: more would pass the usual limit of 1024 open files
MAX_GRACE_S = 86_400.0
DEFAULT_GRACE_S = 5.0
LOOPBACK_ADDRESS = "127.0.0.1"
LOOPBACK_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """One launch on this host.

    Raises:
        ConfigError: a number out of range, or a run folder that is not absolute.
    """

    nproc: int
    target: str  # path of a script, or name of a module
    is_module: bool
    args: tuple[str, ...]
    run_dir: Path
    grace_s: float = DEFAULT_GRACE_S  # between asking a process to end and killing it

    def __post_init__(self) -> None:
        _check_nproc(self.nproc)
        _check_seconds("--grace", self.grace_s)
        if not self.run_dir.is_absolute():
            raise ConfigError(f"launch: the run folder must be absolute, got {str(self.run_dir)!r}; a script may change folder")

    def failure_file(self, rank: int) -> Path:
        """Where ``rank`` records the exception that leaves its script."""
        return self.run_dir / "failures" / f"rank-{rank:05d}.json"


def parse_nproc(text: str) -> int:
    """The number of ranks asked for.

    Raises:
        ConfigError: not a whole number, or out of range.
    """
    if not re.fullmatch(r"[+-]?[0-9]{1,18}", text.strip()):
        raise ConfigError(f"launch: -n must be a whole number, got {text!r}; one rank per GPU is usual")
    return _check_nproc(int(text))


def parse_seconds(option: str, text: str) -> float:
    """The number of seconds given to ``option``.

    Raises:
        ConfigError: not a number, or out of range.
    """
    try:
        seconds = float(text)
    except ValueError:
        raise ConfigError(f"launch: {option} must be a number of seconds, got {text!r}; 5 is usual") from None
    return _check_seconds(option, seconds)


def _check_nproc(nproc: int) -> int:
    if not 1 <= nproc <= MAX_RANKS:
        raise ConfigError(f"launch: -n must be from 1 to {MAX_RANKS}, got {nproc}; one rank per GPU is usual")
    return nproc


def _check_seconds(option: str, seconds: float) -> float:
    if not 0 <= seconds <= MAX_GRACE_S:  # false for nan, too
        raise ConfigError(f"launch: {option} must be from 0 to {MAX_GRACE_S:.0f} seconds, got {seconds:g}; 5 is usual")
    return seconds


def default_nproc(device_names: Iterable[str], visible: str | None) -> int:
    """One rank per GPU, or 1 where there is none.

    Args:
        device_names: names found in ``/dev``; ``nvidia0``, ``nvidia1`` and so on are GPUs.
        visible: ``CUDA_VISIBLE_DEVICES``, or None. As in CUDA, the first entry that names no GPU ends the list.
    """
    gpus = sum(re.fullmatch(r"nvidia[0-9]+", name) is not None for name in device_names)
    if gpus and visible is not None:
        count = 0
        for entry in visible.split(","):
            entry = entry.strip()
            if not (entry.startswith(("GPU-", "MIG-")) or (entry.isdecimal() and int(entry) < gpus)):
                break
            count += 1
        gpus = count
    return max(1, gpus)


def rank_environment(plan: LaunchPlan, rank: int, *, port: int, cores: int, inherited: Mapping[str, str]) -> dict[str, str]:
    """The whole environment of one rank: what the launcher inherited, without what an outer launch left, and our own.

    ``OMP_NUM_THREADS`` is kept when given; otherwise the ranks share the cores.
    """
    kept = {name: value for name, value in inherited.items() if not name.startswith(wire.OWNED_PREFIXES)}
    ours = {
        wire.RUN_ID: plan.run_dir.name or "run",
        wire.RESTART_COUNT: "0",
        wire.MAX_RESTARTS: "0",
        wire.RUN_DIR: os.fspath(plan.run_dir),
        wire.FAILURE_FILE: os.fspath(plan.failure_file(rank)),
        wire.LOOPBACK: "1",
        wire.GLOO_INTERFACE: LOOPBACK_INTERFACE,
        wire.THREADS: inherited.get(wire.THREADS) or str(max(1, cores // plan.nproc)),
        "PYTHONUNBUFFERED": "1",
    }
    who = wire.rank_environment(
        rank=rank,
        world_size=plan.nproc,
        local_rank=rank,
        local_world_size=plan.nproc,
        node_rank=0,
        nodes=1,
        addr=LOOPBACK_ADDRESS,
        port=port,
    )
    return {**kept, **ours, **who}


def rank_command(plan: LaunchPlan) -> list[str]:
    """The command line of every rank: this interpreter, the bootstrap, and the script with its arguments.

    The bootstrap is named by its file: ``-m`` would put the current folder in front of the standard library, which
    ``python script.py`` does not do.
    """
    bootstrap = Path(__file__).with_name("rank.py")
    return [sys.executable, os.fspath(bootstrap), "module" if plan.is_module else "script", plan.target, *plan.args]
