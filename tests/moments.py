"""Input for meters: moments of a run with known numbers, and spans that report given times."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from dtrain import spans
from dtrain.schedules.clock import Clock
from dtrain.spans import SpanTime


class Run:
    """States of one run, as far as meters look at them."""

    def __init__(self, *, device: str = "cpu") -> None:
        self._run_context = SimpleNamespace(lineage=SimpleNamespace(resumed_from=None))
        self.device = torch.device(device)

    def at(self, step: int, seconds: float = 0.0, *, samples: int = 0, tokens: int = 0, **clock: Any) -> Any:
        now = Clock(step=step, seconds=seconds, samples=samples, tokens=tokens, **clock)
        return SimpleNamespace(clock=now, _run_context=self._run_context, device=self.device, step=step)


class FakeSpans:
    """Seconds by span, which a test adds to."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def add(self, **seconds: float) -> None:
        for name, value in seconds.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + value

    def totals(self) -> dict[str, SpanTime]:
        return {name: SpanTime(1, seconds) for name, seconds in self.seconds.items()}


def fake_spans(monkeypatch: Any) -> FakeSpans:
    """Spans that a test fills; meters see no other spans."""
    made = FakeSpans()
    monkeypatch.setattr(spans, "totals", made.totals)
    return made
