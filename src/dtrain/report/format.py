"""Format durations, counts and lists for lines of text."""

from __future__ import annotations


def format_duration(seconds: float) -> str:
    """Format a duration: ``"17 ms"``, ``"0.4 s"``, ``"12 s"``, ``"5 m 20 s"``, ``"3 h 05 m"``, ``"2 d 04 h"``."""
    if 0.0005 <= seconds < 0.095:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    for unit, size, part, smaller in (("m", 60, "s", 1), ("h", 3600, "m", 60)):
        if whole < size * (60 if unit == "m" else 24):
            return f"{whole // size} {unit} {whole % size // smaller:02d} {part}"
    return f"{whole // 86400} d {whole % 86400 // 3600:02d} h"


def format_count(number: int, one: str, several: str = "") -> str:
    """Format a count with a noun: ``"1 line"``, ``"2 lines"``."""
    return f"{number:,} {one if number == 1 else several or one + 's'}"


def format_list(numbers: list[int], most: int = 8) -> str:
    """Format a list of numbers: ``"1, 2, 3 and 9 more"``."""
    text = ", ".join(map(str, numbers[:most]))
    return text if len(numbers) <= most else f"{text} and {len(numbers) - most} more"
