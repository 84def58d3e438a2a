"""Small agreements between ranks: JSON and numbers on a gloo group, never pickle.

Each function is a collective: every rank must call it, in the same order. ``group`` names one of the two gloo groups of
``DistInfo``; without ``init_dist`` there is one rank, and each function returns at once.
"""

from __future__ import annotations

import json
from typing import Literal

import torch
import torch.distributed as dist

from dtrain.dist.init import DistInfo, current
from dtrain.errors import ConfigError, PeerError
from dtrain.types import Plain

GroupName = Literal["control", "background"]
MAX_BYTES = 64 * 2**20  # of one rank's JSON; what is larger belongs into a file


def all_gather_json(obj: Plain, *, group: GroupName = "control") -> list[Plain]:
    """Every rank's ``obj``, by rank, on every rank.

    Collective: two all-gathers (lengths, then padded bytes).

    Raises:
        ConfigError: ``obj`` is not plain data, or its JSON is larger than 64 MiB.
        PeerError: so on another rank.
    """
    text, error = _encoded(obj)
    texts = _all_gather_bytes(text, group)
    if error is not None:
        raise error
    values = [json.loads(line) for line in texts]
    for rank, value in enumerate(values):
        if "error" in value:
            raise PeerError(f"all_gather_json: rank {rank} failed: {value['error']}")
    return [value["obj"] for value in values]


def _encoded(obj: Plain) -> tuple[bytes, ConfigError | None]:
    """What to send for ``obj``: its JSON, or the reason why there is none, so that no other rank waits in vain."""
    error: ConfigError
    try:
        text = json.dumps({"obj": obj}, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as problem:
        error = ConfigError(f"all_gather_json: takes plain data only: {problem}")
    else:
        if len(text) <= MAX_BYTES:
            return text, None
        error = ConfigError(f"all_gather_json: {len(text)} bytes of JSON, at most {MAX_BYTES} are taken; put it into a file")
    return json.dumps({"error": _one_line(error)}).encode(), error


def _all_gather_bytes(text: bytes, group: GroupName) -> list[bytes]:
    info = current()
    if info.world_size == 1:
        return [text]
    process_group = _group(info, group)
    mine = torch.tensor([len(text)], dtype=torch.int64)
    lengths = [torch.empty_like(mine) for _ in range(info.world_size)]
    dist.all_gather(lengths, mine, group=process_group)
    room = int(max(lengths))
    padded = torch.frombuffer(bytearray(text.ljust(room)), dtype=torch.uint8)
    texts = [torch.empty_like(padded) for _ in range(info.world_size)]
    dist.all_gather(texts, padded, group=process_group)
    return [t.numpy()[: int(n)].tobytes() for t, n in zip(texts, lengths, strict=True)]


def all_gather_numbers(numbers: list[float], *, group: GroupName = "control") -> list[list[float]]:
    """Every rank's row of numbers, by rank, on every rank. The fast way for a record of fixed length (float64).

    Collective: one all-gather.
    """
    info = current()
    if info.world_size == 1:
        return [numbers]
    mine = torch.tensor(numbers, dtype=torch.float64)
    rows = [torch.empty_like(mine) for _ in range(info.world_size)]
    dist.all_gather(rows, mine, group=_group(info, group))
    return [row.tolist() for row in rows]


def broadcast_json(obj: Plain, *, src: int = 0, group: GroupName = "control") -> Plain:
    """The ``obj`` of rank ``src``, on every rank; what the other ranks pass is ignored.

    Collective: two all-gathers.
    """
    return all_gather_json(obj if current().rank == src else None, group=group)[src]


def raise_together(error: Exception | None, *, where: str, group: GroupName = "control") -> None:
    """Raise on every rank if any rank came with an ``error``: a failure that depends on the rank is agreed on first.

    The ranks that failed raise their own error, the others a ``PeerError`` that names the first of them.

    Collective: one exchange of JSON.
    """
    reports = all_gather_json(None if error is None else _one_line(error), group=group)
    if error is not None:
        raise error
    failed = [(rank, report) for rank, report in enumerate(reports) if report is not None]
    if failed:
        rank, report = failed[0]
        raise PeerError(f"{where}: rank {rank} failed ({len(failed)} of {len(reports)} ranks did): {report}")


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:2000]


def _group(info: DistInfo, name: GroupName) -> dist.ProcessGroup:
    group = info.control if name == "control" else info.background
    assert group is not None, "several ranks without groups: init_dist makes both"
    return group
