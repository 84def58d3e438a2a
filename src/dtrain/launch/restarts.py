"""Whether failed ranks are started again, and when. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

_FIRST_DELAY_S = 1.0
_LONGEST_DELAY_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Restarts:
    """How often ranks were started again. ``fruitless``: those in a row after which no new checkpoint was committed."""

    most: int  # fruitless ones that are allowed
    done: int = 0
    fruitless: int = 0
    committed: int | None = None  # the newest step that a rank has reported

    @property
    def delay_s(self) -> float | None:
        """Seconds to wait before the next start, None when there is to be none.

        None at all before the first, then doubled with each fruitless one: what fails again at once is seldom cured by haste.
        """
        if self.fruitless >= self.most:
            return None
        return 0.0 if self.fruitless == 0 else min(_LONGEST_DELAY_S, _FIRST_DELAY_S * 2.0 ** (self.fruitless - 1))

    def begun(self) -> Restarts:
        """After another start."""
        return replace(self, done=self.done + 1, fruitless=self.fruitless + 1)

    def saw_commit(self, step: int) -> Restarts:
        """After a rank has reported a committed step; one that was saved again after going back is not new."""
        if self.committed is not None and step <= self.committed:
            return self
        return replace(self, committed=step, fruitless=0)

    def describe_next(self) -> str:
        """What is about to happen, for the user."""
        wait = f" in {self.delay_s:g} s" if self.delay_s else ""
        return f"starting all ranks again{wait} (restart {self.fruitless + 1} of at most {self.most} without a new checkpoint)"
