"""Asking another program something, for a limited time: a broken one is an answer, never an exception or a hang."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a program said: its exit code (None: it had not ended in time), and its two streams."""

    code: int | None
    out: str
    err: str

    @property
    def last_words(self) -> str:
        """The last line that it printed to stderr, or to stdout where that is empty: of a traceback, the error."""
        lines = [line.strip() for line in (self.err.strip() or self.out.strip()).splitlines()]
        return lines[-1] if lines else "it printed nothing"


def ask(command: Sequence[str]) -> subprocess.Popen[str]:
    """Start a program whose answer is wanted later.

    Raises:
        OSError: there is no such program.
    """
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, errors="replace")


def answer(process: subprocess.Popen[str], *, timeout_s: float) -> Answer:
    """The answer of a program that ``ask`` started; it is killed when it takes longer than ``timeout_s``."""
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()  # and not waited for: what hangs in a driver does not die
        return Answer(code=None, out="", err="")
    return Answer(code=process.returncode, out=out, err=err)
