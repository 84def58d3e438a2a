"""``estimate_memory``: what one rank of a run would hold and send, part by part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypedDict, Unpack

from dtrain.planning.ledger import Parts, Phase
from dtrain.planning.rehearsal import Keep, Kind, Setting, Trace, rehearsing
from dtrain.planning.traffic import Traffic
from dtrain.planning.workload import Workload
from dtrain.shard.precision import Precision
from dtrain.state import Accumulate


class Options(TypedDict, total=False):
    """The arguments of ``Setting`` that have a default."""

    dp_replicate: int
    precision: Precision | None
    accumulate: Accumulate
    checkpoint: Keep | None
    device: Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """What the fullest rank of a run holds and sends in one step. Sizes are in bytes.

    Args:
        setting: how the model is laid out.
        microbatch_size: samples per forward and backward of a rank.
        microbatches: how many of those make a step of a rank.
        parameter_count: elements of all parameters, over all ranks.
        peak: the most bytes that are held at once.
        peak_in: the phase in which that is: ``"forward"``, ``"backward"`` or ``"update"``.
        peaks: the most in each phase.
        at_peak: what the peak is made of; its parts add up to it.
        most: the most of each part, which need not be at the peak.
        traffic: collectives by kind, those that send most first.
    """

    setting: Setting
    microbatch_size: int
    microbatches: int
    parameter_count: int
    peak: int
    peak_in: Phase
    peaks: Mapping[Phase, int]
    at_peak: Parts
    most: Parts
    traffic: tuple[Traffic, ...]

    @property
    def sent(self) -> int:
        """Bytes that a rank sends in a step, for all collectives together."""
        return sum(each.sent for each in self.traffic)


def estimate_memory(
    workload: Workload,
    *,
    world_size: int,
    strategy: str = "full_shard",
    microbatch_size: int = 1,
    microbatches: int = 1,
    **options: Unpack[Options],
) -> MemoryEstimate:
    """What a rank would hold and send, without its device, the other ranks, or memory for the model.

    A step of the first rank, which has the largest shards, is run on fake tensors in a pretended world: the code of
    ``shard_model``, ``microbatch_step``, the transforms and the optimizer, so that the plan follows it. Storages are counted.
    What no tensor holds is not in it: the context of a device (about half a GiB on CUDA), buffers of NCCL and workspaces of
    cuBLAS, and what the allocator cannot use between blocks. The batch counts, as if it were on the device.

    Args:
        workload: the model, and what its loop does.
        world_size: ranks, from 1 to 4,096.
        strategy: as for ``shard_model``.
        microbatch_size: samples per forward and backward of a rank.
        microbatches: how many of those make a step of a rank.
        options: ``dp_replicate``, ``precision`` and ``accumulate`` as for ``build_mesh`` and ``shard_model``; ``checkpoint``:
            None, or what checkpointed blocks keep (``"nothing"``, ``"matmuls"``); ``device``: ``"cuda"`` (the default) or
            ``"cpu"``, on which optimizers work otherwise.

    Mutates: nothing that stays. There must be no process groups: it makes pretended ones for the time of the call.

    Raises:
        ConfigError: numbers that do not fit, what ``shard_model`` refuses, process groups that are open, or a model whose
            shapes depend on values.
    """
    setting = Setting(world_size=world_size, strategy=strategy, **options)
    with rehearsing(workload, setting) as rehearsal:
        trace = rehearsal.step(microbatch_size, microbatches)
        return estimate_of(setting, microbatch_size, microbatches, rehearsal.parameter_count, trace)


def estimate_of(
    setting: Setting, microbatch_size: int, microbatches: int, parameter_count: int, trace: Trace
) -> MemoryEstimate:
    """The estimate that a rehearsed step comes to."""
    peaks = trace.page.peaks
    where = max(peaks, key=lambda phase: peaks[phase])
    return MemoryEstimate(
        setting=setting,
        microbatch_size=microbatch_size,
        microbatches=microbatches,
        parameter_count=parameter_count,
        peak=peaks[where],
        peak_in=where,
        peaks=peaks,
        at_peak=trace.page.at_peak,
        most=trace.page.most,
        traffic=trace.traffic,
    )
