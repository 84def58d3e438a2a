"""How lost output is counted and explained."""

from __future__ import annotations


def count_lines(data: bytes) -> int:
    """Lines in ``data``; a part of one counts as one when there is nothing else."""
    return data.count(b"\n") or (1 if data else 0)


def describe(error: OSError) -> str:
    """Why a write failed, in the system's words."""
    return error.strerror or "it cannot be written"
