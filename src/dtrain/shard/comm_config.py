"""Configure prefetching and process groups of a sharded model's collectives: ``CommConfig``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from dtrain.arguments import check_choice, check_int
from dtrain.errors import ConfigError
from dtrain.shard.wrapping import WrapPlan

ReduceGroup = Literal["shared", "own"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommConfig:
    """Prefetching and process groups of a sharded model's collectives. Results do not depend on the configuration.

    FSDP2 frees memory in the order of the computation, so at most the prefetched units are unsharded besides the current unit.

    Args:
        forward_prefetch: units gathered ahead in forward. 0 starts each gather when the unit is called, which on a GPU is well
            before the computation. Raise the number if the host does not run ahead.
        backward_prefetch: units gathered ahead in backward. 1 is FSDP2's default, in reverse order of forward. 0 needs the
            least memory and waits for each unit. Larger numbers follow the order of modules in the model.
        reduce_group: ``"own"`` creates a process group for gradient reductions, which then overlap with gathers (torch 2.13 and
            newer).
        reduce_buffers: gradient buffers in flight; more than 1 keeps backward from waiting for the last reduction (torch 2.13
            and newer).
        symmetric_memory: if True, gather through NCCL's symmetric memory (CUDA only).

    Example:
        comm_config = dt.CommConfig(backward_prefetch=2, reduce_group="own")
        model = dt.shard_model(model, mesh, blocks=(Block,), comm_config=comm_config)

    Raises:
        ConfigError: a field has an invalid value.
    """

    forward_prefetch: int = 0
    backward_prefetch: int = 1
    reduce_group: ReduceGroup = "shared"
    reduce_buffers: int = 1
    symmetric_memory: bool = False

    def __post_init__(self) -> None:
        for name, least in (("forward_prefetch", 0), ("backward_prefetch", 0), ("reduce_buffers", 1)):
            check_int("CommConfig", name, getattr(self, name), minimum=least)
        check_choice("CommConfig", "reduce_group", self.reduce_group, get_args(ReduceGroup))
        check_choice("CommConfig", "symmetric_memory", self.symmetric_memory, (True, False))
        if self.symmetric_memory and self.reduce_buffers > 1:
            raise ConfigError("CommConfig: symmetric_memory has one buffer per reduction. Leave reduce_buffers at 1.")


def check_comm_config(comm_config: object, device_type: str) -> CommConfig:
    """Return ``comm_config``, or the default for None.

    Raises:
        ConfigError: a value of another type, or an option that this torch or device does not support.
    """
    if comm_config is None:
        return CommConfig()
    if not isinstance(comm_config, CommConfig):
        raise ConfigError(
            f"shard_model: comm_config must be a CommConfig or None, got {comm_config!r}. "
            "Pass for example dt.CommConfig(backward_prefetch=2)."
        )
    if comm_config.symmetric_memory and device_type != "cuda":
        raise ConfigError(f"shard_model: symmetric_memory needs CUDA, got a {device_type} mesh. Leave symmetric_memory out.")
    for used, method, name in (
        (comm_config.reduce_group == "own", "set_separate_reduce_scatter_group", "reduce_group='own'"),
        (comm_config.reduce_buffers > 1, "set_reduce_scatter_max_input_buffers", "reduce_buffers"),
        (comm_config.symmetric_memory, "set_symm_mem_for_comm", "symmetric_memory"),
    ):
        if used and not hasattr(FSDPModule, method):
            raise ConfigError(f"shard_model: torch {torch.__version__} has no {name}. Use a newer torch, or leave {name} out.")
    return comm_config


def apply_comm_config(model: nn.Module, wrap_plan: WrapPlan, comm_config: CommConfig) -> None:
    """Apply ``comm_config`` to the units of a sharded model.

    Mutates: FSDP2's units. Collective: with ``reduce_group="own"``, makes a process group.
    """
    assert isinstance(model, FSDPModule)
    units = _units_in_model_order(model, wrap_plan)
    forward, backward = comm_config.forward_prefetch, comm_config.backward_prefetch
    for index, unit in enumerate(units):
        if forward:
            unit.set_modules_to_forward_prefetch(units[index + 1 : index + 1 + forward])
        if backward == 0:
            # The unit itself is unsharded already. An empty list would select FSDP2's default.
            unit.set_modules_to_backward_prefetch([unit])
        elif backward > 1:
            unit.set_modules_to_backward_prefetch(units[max(0, index - backward) : index][::-1] or [unit])
        if comm_config.symmetric_memory:
            unit.set_symm_mem_for_comm()
    if comm_config.reduce_group == "own":
        model.set_separate_reduce_scatter_group()
    if comm_config.reduce_buffers > 1:
        model.set_reduce_scatter_max_input_buffers(comm_config.reduce_buffers)


def _units_in_model_order(model: nn.Module, wrap_plan: WrapPlan) -> list[FSDPModule]:
    """Return the first module of each unit in the order of the model, which is the order of most forwards."""
    unit_of = {id(module): index for index, modules in enumerate(wrap_plan.units) for module in modules}
    first: dict[int, FSDPModule] = {}
    for module in model.modules():
        if id(module) in unit_of and isinstance(module, FSDPModule):
            first.setdefault(unit_of[id(module)], module)
    return list(first.values())
