"""A world of ranks that are not there: this process is the first of them, and collectives do nothing."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dtrain.dist.init import DistInfo, standing_in
from dtrain.dist.mesh import build_mesh
from dtrain.dist.rng import rng_state, set_rng_state
from dtrain.errors import ConfigError

LARGEST_WORLD = 4096
"""Ranks that a plan may have: tests hold it to this number."""


@contextmanager
def pretended_world(world_size: int, *, dp_replicate: int = 1) -> Iterator[DeviceMesh]:
    """The mesh of ``world_size`` ranks, of which this process is the first, while the block runs.

    Agreements of the control group are made by this rank alone: the others would come with the same. What is sent on the mesh
    goes nowhere, and nothing comes.

    Mutates: the process groups of this process, which has none before and after. The global RNG is left as it was.

    Raises:
        ConfigError: there are process groups, or the numbers do not fit.
    """
    if dist.is_initialized():
        raise ConfigError(
            "plan: this process has process groups, and a plan needs pretended ones; make it before dt.init_dist(), or in "
            "another process"
        )
    if type(world_size) is not int or not 1 <= world_size <= LARGEST_WORLD:
        raise ConfigError(f"plan: world_size must be a whole number from 1 to {LARGEST_WORLD}, got {world_size!r}")
    # Registers the backend; the only place of torch that has it.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    random = rng_state()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they are about results and time-outs, and the run itself will say them
            groups = {"control": dist.group.WORLD, "background": dist.group.WORLD, "backend": "fake"}
            with standing_in(DistInfo(world_size=world_size, **groups)):  # type: ignore[arg-type]
                mesh = build_mesh(dp_replicate=dp_replicate, dp_shard=-1)
            with standing_in(DistInfo(**groups)):  # type: ignore[arg-type]
                yield mesh
    finally:
        dist.destroy_process_group()
        set_rng_state(random)
