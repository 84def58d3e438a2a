"""Values of options, read from text. Each says in one line what came and what to write instead. Pure."""

from __future__ import annotations

import re
import signal

from dtrain.errors import ConfigError

_MOST_RESTARTS = 1000
_LONGEST_S = 7 * 86_400
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def parse_whole(option: str, text: str | None, *, advice: str) -> int:
    """The whole number given to ``option``; -1 when none was.

    Raises:
        ConfigError: no whole number.
    """
    if text is None or not text.strip():
        return -1
    if not re.fullmatch(r"[+-]?[0-9]{1,18}", text.strip()):
        raise ConfigError(f"launch: {option} must be a whole number, got {text!r}; {advice}")
    return int(text)


def parse_restarts(option: str, text: str | None) -> int:
    """How often to start the ranks again.

    Raises:
        ConfigError: no whole number, or out of range.
    """
    if text is None:
        return 0
    restarts = parse_whole(option, text, advice="3 is usual")
    if not 0 <= restarts <= _MOST_RESTARTS:
        raise ConfigError(f"launch: {option} must be from 0 to {_MOST_RESTARTS}, got {text!r}; 3 is usual")
    return restarts


def parse_duration(option: str, text: str | None, *, usual: int) -> float | None:
    """A number of seconds that is not 0; None when none was given.

    Raises:
        ConfigError: no number, or out of range.
    """
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        raise ConfigError(f"launch: {option} must be a number of seconds, got {text!r}; {usual} is usual") from None
    if not 0 < seconds <= _LONGEST_S:  # false for nan, too
        what = f"launch: {option} must be more than 0 and at most {_LONGEST_S} seconds, got {text!r}"
        raise ConfigError(f"{what}; {usual} is usual")
    return seconds


def parse_host(option: str, text: str | None) -> str:
    """A host's name or address; empty when none was given.

    Raises:
        ConfigError: with a port, a scheme, or white space.
    """
    host = (text or "").strip()
    if re.search(r"[\s/]", host) or re.fullmatch(r"[^:]*:[^:]*", host):
        raise ConfigError(f"launch: {option} must be a host, got {text!r}; name it as the nodes know it, and --master-port")
    return host


def parse_stop_signal(option: str, text: str | None) -> int | None:
    """The number of a signal given by name, with or without SIG, or by number.

    Raises:
        ConfigError: no signal, or one that means something else to a process.
    """
    if text is None:
        return None
    name = text.strip().upper()
    known = {str(int(number)): number for number in _STOP_SIGNALS} | {number.name: number for number in _STOP_SIGNALS}
    number = known.get(name) or known.get(f"SIG{name}")
    if number is None:
        raise ConfigError(f"launch: {option} must be TERM, USR1 or USR2, got {text!r}; USR1 is usual")
    return int(number)


def parse_modules(text: str | None, *, no_preload: bool) -> tuple[str, ...] | None:
    """The modules of ``--preload``; none at all with ``--no-preload``; None: to be found out.

    Raises:
        ConfigError: both are given, or something is no name of a module.
    """
    if text is None:
        return () if no_preload else None
    if no_preload:
        raise ConfigError("launch: --preload and --no-preload exclude each other; leave one out")
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            raise ConfigError(f"launch: --preload takes names of modules, as in torch,numpy; got {name!r}")
    return names
