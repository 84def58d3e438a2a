"""Parse the values of ``dtrain launch``'s options, and complete paths for the shell."""

from __future__ import annotations

import os
import re
import signal

from dtrain.cli.parameters import ValueType, integer
from dtrain.errors import ConfigError
from dtrain.launch.launch_plan import MAX_RANKS

_MAX_DURATION_S = 7 * 86_400
_OMIT_ADVICE = "Remove the option to infer it."
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def integer_or_unset(minimum: int, maximum: int, *, advice: str) -> ValueType:
    """Return the type of integers within the limits; blank text and -1 mean the same as no option."""
    parse = integer(minimum, maximum, advice=advice)
    return lambda command, name, text: None if text.strip() in ("", "-1") else parse(command, name, text)


def parse_host(command: str, name: str, text: str) -> str:
    """Parse a host name or address.

    Raises:
        ConfigError: the text has a port, a scheme, or white space.
    """
    host = text.strip()
    if re.search(r"[\s/]", host) or re.fullmatch(r"[^:]*:[^:]*", host):
        raise ConfigError(
            f"{command}: {name} must be a host, got {text!r}. Pass the name that the nodes know, and the port as --master-port."
        )
    return host


def parse_stop_signal(command: str, name: str, text: str) -> int:
    """Parse a signal's name, with or without SIG, or its number.

    Raises:
        ConfigError: an unknown signal, or a signal with another meaning.
    """
    word = text.strip().upper()
    for stop_signal in _STOP_SIGNALS:
        if word in (str(int(stop_signal)), stop_signal.name, stop_signal.name.removeprefix("SIG")):
            return int(stop_signal)
    raise ConfigError(f"{command}: {name} must be TERM, USR1 or USR2, got {text!r}. Use USR1, for example.")


def parse_nproc(text: str | None, *, gpus: int) -> int | None:
    """Parse the number of ranks; None if unset.

    Args:
        text: the value of ``-n``: a number, or torchrun's ``auto``, ``gpu`` or ``cpu``.
        gpus: number of GPUs of this node.

    Raises:
        ConfigError: not an integer, out of range, or ``gpu`` on a node without GPUs.
    """
    word = "auto" if text is None else text.strip().lower()
    if word == "gpu" and gpus == 0:
        raise ConfigError("launch: -n must not be gpu on a node without a GPU. Pass a number, or cpu.")
    known = {"auto": None, "gpu": gpus, "cpu": min(MAX_RANKS, os.cpu_count() or 1)}
    if word in known:
        return known[word]
    nproc: int = integer(1, MAX_RANKS, advice="Use one rank per GPU.")("launch", "-n", text or "")
    return nproc


def parse_modules(text: str | None, *, no_preload: bool) -> tuple[str, ...] | None:
    """Parse the modules of ``--preload``; () with ``--no-preload``, None if both are unset.

    Raises:
        ConfigError: both are set, or a name is not a module name.
    """
    if text is None:
        return () if no_preload else None
    if no_preload:
        raise ConfigError("launch: --preload and --no-preload exclude each other. Remove one of them.")
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            raise ConfigError(f"launch: --preload must be names of modules, as in torch,numpy, got {name!r}. Correct the name.")
    return names


_RANK_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")


def parse_log_ranks(text: str, world_size: int) -> frozenset[int]:
    """Parse the global ranks of ``0,8-15``, ``all`` or ``none``.

    Raises:
        ConfigError: another text, or a rank that the job does not have.
    """
    if text.strip() in ("all", "none"):
        return frozenset(range(world_size) if text.strip() == "all" else ())
    ranks: set[int] = set()
    for part in text.split(","):
        match = _RANK_RANGE.fullmatch(part.strip())
        if match is None:
            raise ConfigError(
                f"launch: --log-ranks must be ranks as in 0,8-15, or all, or none, got {text!r}. Correct {part!r}."
            )
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ConfigError(f"launch: --log-ranks {text!r}: {part.strip()} goes backwards. Write {last}-{first}.")
        if last >= world_size:
            raise ConfigError(f"launch: --log-ranks {text!r}: there is no rank {last}. Use ranks from 0 to {world_size - 1}.")
        ranks.update(range(first, last + 1))
    return frozenset(ranks)


def complete_script(incomplete: str) -> list[str]:
    """Complete the names of Python files and folders for the shell."""
    folder, begin = os.path.split(incomplete)
    try:
        entries = [entry for entry in os.scandir(folder or ".") if entry.name.startswith(begin)]
    except OSError:
        return []
    names = [entry.name + "/" if entry.is_dir() else entry.name for entry in entries if begin or entry.name[0] != "."]
    return sorted(os.path.join(folder, name) for name in names if name.endswith((".py", "/")))
