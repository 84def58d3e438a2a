"""The watch over one start of the ranks, and the questions when they hang, as the supervisor's loop drives them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from dtrain.launch.hang.inspect import Inspection, Suspects, begin, tidy
from dtrain.launch.hang.watch import Watch
from dtrain.pulse import Pulse


class Guard:
    """Notices that the ranks hang, asks them what they are doing, and says so. Close it when the ranks have ended."""

    def __init__(self, *, run_dir: Path, world_size: int, timeout_s: float) -> None:
        self._run_dir, self._world_size = run_dir, world_size
        self._watch = Watch(timeout_s)
        self._inspection: Inspection | None = None
        self._look_at: float | None = None
        self.ask_fd, self._ask = os.pipe()

    def feed(self, record: Pulse) -> None:
        """Take note of what a rank reports. Mutates: this guard."""
        self._watch.feed(record)

    @property
    def asking(self) -> bool:
        """Whether the ranks are known to hang, and have been asked."""
        return self._inspection is not None

    def deadline(self) -> float | None:
        """When to call ``step`` again, at the latest."""
        return self._look_at if self._inspection is not None else self._watch.deadline()

    def step(self, now: float, *, pids: Mapping[int, int], ended: Mapping[int, int]) -> list[str] | None:
        """Take the step that is due; the message once a hang has been looked into.

        Args:
            now: seconds of the monotonic clock.
            pids: of the ranks that run.
            ended: exit codes of those that do not.

        Mutates: this guard; sends signals to the ranks of a job that hangs.
        """
        for rank in ended:
            self._watch.ended(rank)
        if self._inspection is None and pids and self._watch.due(now):
            suspects = Suspects(
                run_dir=self._run_dir,
                world_size=self._world_size,
                timeout_s=self._watch.timeout_s,
                pids=pids,
                ended=ended,
                seen=self._watch.seen,
            )
            self._inspection = begin(suspects, ask=self._ask, now=now)
        if self._inspection is None:
            return None
        self._look_at = self._inspection.look(now, ended=ended)
        return None if self._look_at is not None else self._inspection.finish()

    def close(self) -> None:
        """Close the pipe by which ranks are asked, and remove what was prepared for nothing. Mutates: the run folder."""
        os.close(self.ask_fd)
        os.close(self._ask)
        tidy(self._run_dir)
