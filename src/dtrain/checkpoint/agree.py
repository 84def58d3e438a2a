"""Failures that ranks agree on: a block in which one rank fails, fails on all."""

from __future__ import annotations

from types import TracebackType

from dtrain.dist.collectives import GroupName, raise_together
from dtrain.errors import CheckpointError


class Agreed:
    """A block after which all ranks go on together, or all raise: ``with Agreed("save_sharded: write"): ...``.

    The ranks that failed raise their own error (an ``OSError`` as a ``CheckpointError`` with ``advice``), the others a
    ``PeerError`` that names the first of them. There must be no other collective in the block.

    Collective: one exchange of JSON on leaving, however the block ends (not for KeyboardInterrupt and its like).
    """

    def __init__(self, where: str, *, group: GroupName = "control", advice: str = "") -> None:
        self._where, self._group, self._advice = where, group, advice

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None and not isinstance(error, Exception):
            return
        if isinstance(error, OSError):
            error = CheckpointError(f"{self._where}: {error}{self._advice}").with_traceback(trace)
        raise_together(error, where=self._where, group=self._group)
