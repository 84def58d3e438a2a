"""The watch over one start of the ranks, and the questions when they hang, as the supervisor's loop drives them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dtrain.launch.hang.asking import announce, withdraw
from dtrain.launch.hang.inspect import Inspection, Suspects, begin, tidy
from dtrain.launch.hang.watch import Watch
from dtrain.pulse import Pulse


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What was found out about the ranks: because they ``hang``, or because somebody has asked."""

    lines: list[str]
    hang: bool


class Guard:
    """Notices that the ranks hang, asks them what they are doing, and says so. Close it when the ranks have ended.

    Args:
        run_dir: the folder of this launch.
        world_size: ranks of the whole job.
        timeout_s: without progress for so long, the ranks hang; None: they never do, but somebody may ask.
        node_rank: of this launcher.
        ranks: those of this node.

    Mutates: the run folder, in which it says where it can be asked.
    """

    def __init__(self, *, run_dir: Path, world_size: int, timeout_s: float | None, node_rank: int, ranks: range) -> None:
        self._run_dir, self._world_size, self._node_rank, self._ranks = run_dir, world_size, node_rank, ranks
        self._watch = Watch(timeout_s)
        self._inspection: Inspection | None = None
        self._by_hand, self._wanted = False, False
        self._look_at: float | None = None
        self.ask_fd, self._ask = os.pipe()
        announce(run_dir, node_rank, alone=len(ranks) == world_size)

    def feed(self, record: Pulse) -> None:
        """Take note of what a rank reports. Mutates: this guard."""
        self._watch.feed(record)

    def ask(self) -> None:
        """Find out what the ranks do, although they may be well; ``step`` does it. Mutates: this guard."""
        self._wanted = True

    @property
    def asking(self) -> bool:
        """Whether the ranks are known to hang, and have been asked."""
        return self._inspection is not None and not self._by_hand

    def deadline(self) -> float | None:
        """When to call ``step`` again, at the latest."""
        return self._look_at if self._inspection is not None else self._watch.deadline()

    def step(self, now: float, *, pids: Mapping[int, int], ended: Mapping[int, int]) -> Answer | None:
        """Take the step that is due; the message once the ranks have been looked into.

        Args:
            now: seconds of the monotonic clock.
            pids: of the ranks that run.
            ended: exit codes of those that do not.

        Mutates: this guard; sends signals to the ranks of a job that hangs.
        """
        for rank in ended:
            self._watch.ended(rank, now)
        if self._inspection is None and pids:
            self._begin(now, pids=pids, ended=ended)
        if self._inspection is None:
            return None
        self._look_at = self._inspection.look(now, ended=ended)
        if self._look_at is not None:
            return None
        answer = Answer(lines=self._inspection.finish(), hang=not self._by_hand)
        self._wanted = False
        if self._by_hand:
            self._inspection, self._by_hand = None, False
        return answer

    def _begin(self, now: float, *, pids: Mapping[int, int], ended: Mapping[int, int]) -> None:
        hang = self._watch.due(now)
        if not hang and not self._wanted:
            return
        suspects = Suspects(
            run_dir=self._run_dir,
            world_size=self._world_size,
            timeout_s=self._watch.timeout_s if hang else None,
            pids=pids,
            ended=ended,
            seen=self._watch.seen,
            node_rank=self._node_rank,
        )
        self._by_hand = not hang
        self._inspection = begin(suspects, ask=self._ask, now=now)

    def close(self) -> None:
        """Close the pipe by which ranks are asked, and remove what was prepared for nothing. Mutates: the run folder."""
        os.close(self.ask_fd)
        os.close(self._ask)
        withdraw(self._run_dir, self._node_rank)
        tidy(self._run_dir, self._ranks)
