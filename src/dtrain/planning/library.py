"""Memory that dtrain and its backends hold beside the tensors of a step: ``library_memory``."""

from __future__ import annotations

from dataclasses import dataclass, fields

from dtrain.arguments import check_int
from dtrain.dist.control_protocol import Layout, peers_of
from dtrain.planning.size_search import MemoryEstimate

_MIB = 2**20
# Batches that ``build_loader`` prepares in advance, on the device and in each worker.
_PREFETCHED_BATCHES = 2
# Assumption: buffers of one NCCL communicator with its default channels, which NCCL allocates outside of torch.
_NCCL_BYTES_PER_GROUP = 256 * _MIB
# Channels of the control plane, and the largest read of a connection.
_CHANNELS, _READ_BYTES = 2, 2**16


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryMemory:
    """Bytes of one rank that are no part of ``MemoryEstimate.peak``.

    Args:
        device_batches: batches that ``build_loader(device=...)`` copies to the device in advance.
        device_collectives: buffers of NCCL. An assumption: 256 MiB for each group of the layout.
        host_staging: staging buffer of an asynchronous save, pinned on CUDA; the next save uses it again.
        host_batches: batches that loader workers, and the copy to the device, hold in advance.
        host_control: read buffers of the control plane's connections, at most.
    """

    device_batches: int
    device_collectives: int
    host_staging: int
    host_batches: int
    host_control: int

    @property
    def device(self) -> int:
        """Bytes on the device."""
        return self._total("device_")

    @property
    def host(self) -> int:
        """Bytes on the host."""
        return self._total("host_")

    def _total(self, prefix: str) -> int:
        return sum(getattr(self, each.name) for each in fields(self) if each.name.startswith(prefix))


def library_memory(estimate: MemoryEstimate, *, workers: int = 0, local_world_size: int = 8) -> LibraryMemory:
    """Return the memory that dtrain and its backends hold beside the tensors of a step.

    Not counted: the context of a device, Python and its modules (about 400 MB a process), and the order of an epoch (69 bytes a
    shard of the dataset).

    Args:
        estimate: result of ``estimate_memory``.
        workers: loader processes of the rank.
        local_world_size: ranks of a node.

    Example:
        estimate = dt.planning.estimate_memory(workload, world_size=64)
        dt.planning.library_memory(estimate, workers=4).host

    Raises:
        ConfigError: a number that is not an integer of at least 0 (``local_world_size``: 1).
    """
    check_int("library_memory", "workers", workers, minimum=0)
    check_int("library_memory", "local_world_size", local_world_size)
    config, held = estimate.config, estimate.at_rest
    on_cuda = config.device == "cuda"
    prefetched = _PREFETCHED_BATCHES * estimate.batch_bytes
    local = min(local_world_size, config.world_size)
    layout = Layout(0, config.world_size, local if config.world_size % local == 0 else 1)
    groups = {(each.group_size, each.stride) for each in estimate.traffic}
    return LibraryMemory(
        device_batches=prefetched if on_cuda else 0,
        device_collectives=_NCCL_BYTES_PER_GROUP * len(groups) if on_cuda else 0,
        host_staging=held.parameters + held.optimizer + held.transforms,
        host_batches=prefetched * (workers + on_cuda),
        host_control=_CHANNELS * _READ_BYTES * len(peers_of(layout)),
    )
