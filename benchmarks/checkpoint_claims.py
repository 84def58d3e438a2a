"""Claims about saving and loading, and the lines that compare them with a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from checkpoint_ranks import Timings
from measure import Figure, compare, typical, verdict

RAW, DIRECT = "raw write + fsync", "raw write past the page cache + fsync"


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Claim that a moment of one way comes within a multiple of the moment of another way.

    Args:
        what: text of the claim.
        of: way and moment.
        against: way and moment.
        at_most: the ratio that is promised; None where none is.
    """

    what: str
    of: tuple[str, str]
    against: tuple[str, str]
    at_most: float | None = None


OURS, OUR_STALL = ("dtrain", "done"), ("dtrain async", "held")
SMALL = {
    "save": (Claim(what="save against DCP", of=OURS, against=("DCP", "done"), at_most=1 / 20),),
    "load": (Claim(what="load against DCP", of=OURS, against=("DCP", "done"), at_most=1 / 20),),
}
LARGE = {
    "save": (
        Claim(what="save against raw write + fsync", of=OURS, against=(RAW, "done"), at_most=1 / 0.8),
        Claim(what="save against raw write past the page cache", of=OURS, against=(DIRECT, "done")),
        Claim(what="save against DCP, which has no digests", of=OURS, against=("DCP", "done"), at_most=1.0),
        Claim(
            what="save against the same without digests", of=OURS, against=("dtrain without digests", "done"), at_most=1 / 0.8
        ),
        Claim(what="async stall against a warm memcpy", of=OUR_STALL, against=("memcpy", "done"), at_most=1.2),
        Claim(what="async stall against the sync save", of=OUR_STALL, against=OURS, at_most=0.12),
        Claim(what="async stall against DCP's", of=OUR_STALL, against=("DCP async", "held")),
        Claim(what="the same, its stager reused", of=OUR_STALL, against=("DCP async, stager reused", "held")),
        Claim(what="async save, to the end, against DCP's", of=("dtrain async", "done"), against=("DCP async", "done")),
    ),
    "load": (
        Claim(what="load, verified, against DCP", of=OURS, against=("DCP", "done"), at_most=1.0),
        Claim(what="load, verified, against a raw read", of=OURS, against=("raw read", "done")),
    ),
}


def judged(figure: Figure, at_most: float | None) -> str:
    """``met``, ``missed by`` how much, or ``not resolved``; nothing where nothing was promised."""
    if at_most is None:
        return ""
    judgement = verdict(figure, at_most=at_most)
    return f"**missed by {figure.value / at_most - 1:.0%}**" if judgement == "not met" else judgement


def claim_row(claim: Claim, timings: Timings) -> str | None:
    """A line of the table of claims; None when a side was not measured."""
    try:
        a, b = (timings[way][moment] for way, moment in (claim.of, claim.against))
    except KeyError:
        return None
    comparison = compare(a, b)
    ratio, target = comparison.ratio, "" if claim.at_most is None else f"{claim.at_most:.3g}"
    band = f"{ratio.low:.3f} to {ratio.high:.3f}"
    times = f"{seconds(comparison.a_s)} / {seconds(comparison.b_s)}"
    return f"| {claim.what} | {times} | {ratio.value:.3f} | {band} | {target} | {judged(ratio, claim.at_most)} |"


def seconds(value: float) -> str:
    """A time in a unit that suits it."""
    return f"{value * 1e3:.0f} ms" if value < 1 else f"{value:.2f} s"


def time_rows(timings: Timings, nbytes: int) -> list[str]:
    """A line for each way: medians of its moments, the interval of the last, bytes a second."""
    rows = []
    for name, moments in timings.items():
        done, held = typical(moments["done"]), moments.get("held")
        stall = seconds(typical(held).value) if held else ""
        interval = f"{seconds(done.low)} to {seconds(done.high)}"
        rows.append(f"| {name} | {stall} | {seconds(done.value)} | {interval} | {nbytes / done.value / 1e9:.2f} |")
    return rows


def table(head: str, rows: Sequence[str]) -> None:
    """Print a Markdown table."""
    print("\n".join([f"| {head} |", "|" + "---|" * (head.count("|") + 1), *rows, ""]), flush=True)
