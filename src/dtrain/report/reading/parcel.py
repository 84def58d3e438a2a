"""A ledger that was read, as text for another process: without pickle, which would run what it is told to."""

from __future__ import annotations

import json
from array import array
from base64 import b64decode, b64encode
from typing import Any

from dtrain.report.reading.curve import Curve
from dtrain.report.reading.ledger import RankAttemptLines, RankLedger


def packed(ledger: RankLedger, unreadable: int, failed: list[str]) -> str:
    """One line of text."""
    attempts = []
    for lines in ledger.attempts.values():
        lines.settle()
        attempts.append(vars(lines))
    facts = {"rank": ledger.rank, "malformed": ledger.malformed, "strange": ledger.strange, "mixed": ledger.mixed}
    return json.dumps(facts | {"attempts": attempts, "unreadable": unreadable, "failed": failed}, default=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, array):
        return b64encode(value.tobytes()).decode()
    if isinstance(value, Curve):
        return {"at": value.at, "step": value.step, "rows": value.rows}
    return sorted(value)  # a set


def unpacked(text: str) -> tuple[RankLedger, int, list[str]]:
    """What ``packed`` was given."""
    facts = json.loads(text)
    ledger = RankLedger(facts["rank"])
    ledger.malformed, ledger.strange, ledger.mixed = facts["malformed"], facts["strange"], set(facts["mixed"])
    for each in facts["attempts"]:
        lines = ledger.attempts[each["number"]] = RankAttemptLines(each["number"])
        for name, known in list(vars(lines).items()):
            setattr(lines, name, _like(known, each[name]))
        lines.take_gauges({name: _numbers(value) for name, value in each["_gauges"].items()})
    return ledger, facts["unreadable"], facts["failed"]


def _like(known: Any, value: Any) -> Any:
    """A value in the type that the attribute has."""
    if isinstance(known, array):
        return _numbers(value)
    if isinstance(known, Curve):
        curve = Curve()
        curve.at, curve.step, curve.rows = (_numbers(value[name]) for name in ("at", "step", "rows"))
        return curve
    return type(known)(value) if isinstance(known, set | tuple) else value


def _numbers(text: str) -> array[float]:
    numbers = array("d")
    numbers.frombytes(b64decode(text))
    return numbers
