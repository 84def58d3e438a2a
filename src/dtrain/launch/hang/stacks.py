"""Python stacks on a signal: runs in a rank, before its script."""

from __future__ import annotations

import faulthandler
import os
from pathlib import Path

from dtrain import wire


def register_stacks(path: Path) -> None:
    """Have ``wire.STACKS_SIGNAL`` write the Python stacks of all threads to ``path``.

    The signal's handler is C and takes no lock, so it also answers while something holds the interpreter (the GIL). It can open
    no file, so the file is there from now on, empty; ``tidy`` removes it when nobody has asked.

    Mutates: this process's handler of the signal, which its forks inherit. The file stays open for good.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o666)
    except OSError:
        return  # a full disk or a read-only folder costs the stacks of a hang, not the rank
    faulthandler.register(wire.STACKS_SIGNAL, file=file, all_threads=True, chain=False)
