"""The interpreter's own options (``python -O -X dev -W error -m dtrain launch``), which are the ranks' as well."""

from __future__ import annotations

import sys
from collections.abc import Sequence

_TAKES_A_VALUE = "WX"
_BEGINS_THE_PROGRAM = "cm"
_FOR_ONE_ONLY = "ix"  # a prompt after the script, and a first line that is no Python
_IGNORE_VARIABLES = {"-E", "-I"}


def flags_to_pass_on() -> list[str]:
    """The options that the interpreters of the ranks are started with: those of this one."""
    flags = flags_of(sys.orig_argv)
    # Where variables are ignored, so is PYTHONUNBUFFERED: what ranks print would come late, or never.
    return [*flags, "-u"] if _IGNORE_VARIABLES & set(flags) and "-u" not in flags else flags


def flags_of(command: Sequence[str]) -> list[str]:
    """The options in an interpreter's command line, in front of what it runs. Pure.

    >>> flags_of(["python", "-OB", "-Xdev", "-W", "error", "-m", "dtrain", "-W"])
    ['-O', '-B', '-X', 'dev', '-W', 'error']
    """
    flags: list[str] = []
    words = iter(command[1:])
    for word in words:
        if word == "--check-hash-based-pycs":
            flags += [word, next(words, "")]
            continue
        if len(word) < 2 or word[0] != "-" or word[1] == "-":
            break
        for place, letter in enumerate(word[1:], start=2):  # several may share a word, the last of them with its value
            if letter in _BEGINS_THE_PROGRAM:
                return flags
            if letter in _TAKES_A_VALUE:
                flags += [f"-{letter}", word[place:] or next(words, "")]
                break
            if letter not in _FOR_ONE_ONLY:
                flags.append(f"-{letter}")
    return flags
