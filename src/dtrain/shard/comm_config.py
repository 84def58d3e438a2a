"""``CommConfig``: how far ahead a sharded model gathers, and through what it sends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from dtrain.errors import ConfigError
from dtrain.shard.wrapping import WrapPlan

ReduceGroup = Literal["shared", "own"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommConfig:
    """How a sharded model's collectives overlap its computation: memory against waiting. Results are the same with any.

    There is no limit of gathers to set: FSDP2 frees memory in the order of the computation, so at most the units named here
    are gathered besides the one that computes.

    Args:
        forward_prefetch: units gathered ahead of the one that runs in forward. 0 begins each gather when the unit is called,
            which on a GPU is well before it computes; more is for a host that does not keep ahead.
        backward_prefetch: the same in backward. 1 is FSDP2's own way, in the order in which the forward ran; 0 takes the least
            memory, and waits for each unit; more goes by the order in which the model holds its modules.
        reduce_group: ``"own"`` gives reductions of gradients a process group of their own, so that they run beside gathers,
            where the network can take it (torch 2.13 and newer).
        reduce_buffers: buffers of gradients that may be on their way at once; more than 1 keeps backward from waiting for the
            last reduction (torch 2.13 and newer).
        symmetric_memory: gather through NCCL's symmetric memory. CUDA only.
    """

    forward_prefetch: int = 0
    backward_prefetch: int = 1
    reduce_group: ReduceGroup = "shared"
    reduce_buffers: int = 1
    symmetric_memory: bool = False

    def __post_init__(self) -> None:
        for name, least in (("forward_prefetch", 0), ("backward_prefetch", 0), ("reduce_buffers", 1)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ConfigError(f"Communication: {name} must be a whole number of at least {least}, got {value!r}")
        if self.reduce_group not in get_args(ReduceGroup):
            raise ConfigError(f"Communication: reduce_group must be 'shared' or 'own', got {self.reduce_group!r}")
        if type(self.symmetric_memory) is not bool:
            raise ConfigError(f"Communication: symmetric_memory must be True or False, got {self.symmetric_memory!r}")
        if self.symmetric_memory and self.reduce_buffers > 1:
            raise ConfigError("Communication: symmetric_memory has one buffer per reduction; leave reduce_buffers at 1")


def check_comm_config(comm_config: object, device_type: str) -> CommConfig:
    """``comm_config``, or the default for None.

    Raises:
        ConfigError: something else, or an option that this torch or device does not have.
    """
    if comm_config is None:
        return CommConfig()
    if not isinstance(comm_config, CommConfig):
        raise ConfigError(
            f"shard_model: communication must be a Communication or None, got {comm_config!r}; as in "
            "dt.CommConfig(backward_prefetch=2)"
        )
    if comm_config.symmetric_memory and device_type != "cuda":
        raise ConfigError(f"shard_model: symmetric_memory needs CUDA, and this mesh is of {device_type}; leave it out")
    for used, call, name in (
        (comm_config.reduce_group == "own", "set_separate_reduce_scatter_group", "reduce_group='own'"),
        (comm_config.reduce_buffers > 1, "set_reduce_scatter_max_input_buffers", "reduce_buffers"),
        (comm_config.symmetric_memory, "set_symm_mem_for_comm", "symmetric_memory"),
    ):
        if used and not hasattr(FSDPModule, call):
            raise ConfigError(f"shard_model: torch {torch.__version__} has no {name}; use a newer one, or leave it out")
    return comm_config


def apply_comm_config(model: nn.Module, layout: WrapPlan, comm_config: CommConfig) -> None:
    """Set it on the units of a model that was cut by ``layout``.

    Mutates: FSDP2's units. Collective: with ``reduce_group="own"``, makes a process group.
    """
    assert isinstance(model, FSDPModule)
    units = _units_in_model_order(model, layout)
    forward, backward = comm_config.forward_prefetch, comm_config.backward_prefetch
    for at, unit in enumerate(units):
        if forward:
            unit.set_modules_to_forward_prefetch(units[at + 1 : at + 1 + forward])
        if backward == 0:
            unit.set_modules_to_backward_prefetch([unit])  # it is there already; nothing named would mean FSDP2's own way
        elif backward > 1:
            unit.set_modules_to_backward_prefetch(units[max(0, at - backward) : at][::-1] or [unit])
        if comm_config.symmetric_memory:
            unit.set_symm_mem_for_comm()
    if comm_config.reduce_group == "own":
        model.set_separate_reduce_scatter_group()
    if comm_config.reduce_buffers > 1:
        model.set_reduce_scatter_max_input_buffers(comm_config.reduce_buffers)


def _units_in_model_order(model: nn.Module, layout: WrapPlan) -> list[FSDPModule]:
    """The first module of each unit, in the order in which the model holds them: that of most forwards."""
    unit_of = {id(module): index for index, modules in enumerate(layout.units) for module in modules}
    first: dict[int, FSDPModule] = {}
    for module in model.modules():
        if id(module) in unit_of and isinstance(module, FSDPModule):
            first.setdefault(unit_of[id(module)], module)
    return list(first.values())
