"""For tests of distributed code: real ranks, on one machine, that never hang."""

from dtrain.testing.ranks import Ranks, run_ranks

__all__ = ["Ranks", "run_ranks"]
