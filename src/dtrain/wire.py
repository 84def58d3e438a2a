"""What the launcher and its ranks say to each other: environment variables and failure records. Imports no torch.

The launcher writes the variables (``rank_environment``), ``dist/init`` reads them, and nobody else does. The names
without the ``DTRAIN_`` prefix are those of torchrun, so a script that knows torchrun's environment runs unchanged.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

RANK, WORLD_SIZE = "RANK", "WORLD_SIZE"
LOCAL_RANK, LOCAL_WORLD_SIZE = "LOCAL_RANK", "LOCAL_WORLD_SIZE"
NODE_RANK = "GROUP_RANK"
MASTER_ADDR, MASTER_PORT = "MASTER_ADDR", "MASTER_PORT"
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"  # "True": somebody else serves the store, rank 0 is a client too
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
THREADS = "OMP_NUM_THREADS"
RUN_DIR = "DTRAIN_RUN_DIR"  # folder of this launch, for what belongs to the launch and not to the training run
LOOPBACK = "DTRAIN_LOOPBACK"  # "1": all ranks are on this host, so nothing may listen beyond loopback
FAILURE_FILE = "DTRAIN_FAILURE_FILE"  # where a rank records the exception that leaves its script


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The exception that left a rank's script. ``at`` is seconds of the host's monotonic clock: comparable on one host."""

    rank: int
    at: float
    kind: str
    message: str
    frames: str

    @classmethod
    def of(cls, rank: int, error: BaseException) -> Failure:
        return cls(
            rank=rank,
            at=time.monotonic(),
            kind=type(error).__name__,
            message=str(error),
            frames="".join(traceback.format_exception(error)),
        )

    def write(self, path: Path) -> None:
        """Write atomically, so that the launcher never reads half a record."""
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(self)), encoding="utf-8")
        os.replace(partial, path)

    @classmethod
    def read(cls, path: Path) -> Failure | None:
        """The record at ``path``, or None when the rank left none."""
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None


def rank_environment(
    *, rank: int, world_size: int, local_rank: int, local_world_size: int, node_rank: int, nodes: int, addr: str, port: int
) -> Mapping[str, str]:
    """The variables that tell a process which rank it is, as torchrun sets them."""
    return {
        RANK: str(rank),
        WORLD_SIZE: str(world_size),
        LOCAL_RANK: str(local_rank),
        LOCAL_WORLD_SIZE: str(local_world_size),
        NODE_RANK: str(node_rank),
        "GROUP_WORLD_SIZE": str(nodes),
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(world_size),
        "ROLE_NAME": "default",
        MASTER_ADDR: addr,
        MASTER_PORT: str(port),
    }
