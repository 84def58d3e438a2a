"""The last word when not even the smallest microbatch fits: what was missing, where, and what to try."""

from __future__ import annotations

from typing import NoReturn, cast

import torch

from dtrain.dist.collectives import all_gather_json
from dtrain.dist.init import current
from dtrain.errors import DoesNotFitError
from dtrain.memory.gauge import gauge_for
from dtrain.types import Plain

# In the order of what they cost.
_REMEDIES = (
    ("strategy='shard_grad_op'", ("none", "replicate")),
    ("strategy='full_shard'", ("none", "replicate", "shard_grad_op", "hybrid_shard")),
    ("activation checkpointing (dt.checkpoint_activations)", ()),
    ("CPU offload (shard_model(offload='params'))", ()),
    ("a smaller model", ()),
)


def raise_hopeless(where: str, *, device: torch.device, strategy: str, asked: str, what: str) -> NoReturn:
    """Raise on every rank alike; each must come here.

    Args:
        where: begins the message.
        device: whose memory it is.
        strategy: what may still be tried depends on it.
        asked: what this rank's allocator said when it refused; empty on a rank that did not run out.
        what: that does not fit, for the message.

    Collective: one exchange of JSON.

    Raises:
        DoesNotFitError: always.
    """
    gauge = gauge_for(device)
    reading = gauge.read() if gauge is not None else None
    mine: dict[str, Plain] = {"asked": " ".join(asked.split())[:300]}
    if reading is not None:
        mine |= {"capacity": reading.capacity, "live": reading.live, "free": reading.free, "others": reading.others}
    reports = cast("list[dict[str, Plain]]", all_gather_json(mine, where=where.partition(":")[0]))
    rank = next((rank for rank, report in enumerate(reports) if report["asked"]), current().rank)
    report = reports[rank]
    known = (
        f" (of {_size(report['capacity'])}, {_size(report['live'])} held and {_size(report['free'])} free without it, "
        f"{_size(report['others'])} held by others)"
        if "capacity" in report
        else ""
    )
    said = str(report["asked"]).rstrip(".")
    remedies = [text for text, instead_of in _REMEDIES if not instead_of or strategy in instead_of]
    raise DoesNotFitError(
        f"{where} {what} does not fit on rank {rank}: {said or 'out of memory'}{known}; "
        f"try, in this order: {', '.join(remedies)}"
    )


def _size(value: Plain) -> str:
    return f"{float(cast('int', value)) / 2**20:,.1f} MiB"
