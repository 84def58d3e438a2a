"""Read rank, device, stop signals and store address from the environment of ``dtrain launch`` or torchrun."""

from __future__ import annotations

import os
import signal
import warnings

import torch
import torch.distributed as dist

from dtrain import launch_protocol
from dtrain.dist.rendezvous import StoreAddress
from dtrain.errors import ConfigError


def read_rank_from_env() -> dict[str, int]:
    """Return rank and sizes from the launcher's environment; without a launcher, a world of one."""
    env = os.environ
    if dist.is_initialized():
        return _rank_in_open_group()
    if launch_protocol.RANK not in env and launch_protocol.WORLD_SIZE not in env:
        return {"rank": 0, "world_size": 1, "local_rank": 0, "local_world_size": 1, "node_rank": 0}
    for name in (launch_protocol.RANK, launch_protocol.WORLD_SIZE):
        if name not in env:
            raise ConfigError(
                f"init_dist: RANK and WORLD_SIZE must be set together, but {name} is not set. "
                "Start the script with `dtrain launch`."
            )
    try:
        rank, world = int(env[launch_protocol.RANK]), int(env[launch_protocol.WORLD_SIZE])
        local_rank = int(env.get(launch_protocol.LOCAL_RANK, rank))
        local_world = int(env.get(launch_protocol.LOCAL_WORLD_SIZE, world))
        node = int(env.get(launch_protocol.NODE_RANK, "0"))
    except ValueError as error:
        raise ConfigError(
            f"init_dist: rank variables must be whole numbers ({error}). Unset the variable or use `dtrain launch`."
        ) from None
    if not 0 <= rank < world:
        raise ConfigError(f"init_dist: RANK must be from 0 to WORLD_SIZE - 1, got RANK={rank} WORLD_SIZE={world}")
    return {
        "rank": rank,
        "world_size": world,
        "local_rank": local_rank,
        "local_world_size": local_world,
        "node_rank": node,
    }


def _rank_in_open_group() -> dict[str, int]:
    """Return the rank in a default group that the user has opened. Refuse an environment that disagrees with the group."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for name, value in ((launch_protocol.RANK, rank), (launch_protocol.WORLD_SIZE, world)):
        if os.environ.get(name, str(value)) != str(value):
            raise ConfigError(
                f"init_dist: {name} must match the open process group ({value}), got {os.environ[name]}. Unset the variable."
            )
    local = (
        int(os.environ.get(name, value))
        for name, value in ((launch_protocol.LOCAL_RANK, rank), (launch_protocol.LOCAL_WORLD_SIZE, world))
    )
    local_sizes = dict(zip(("local_rank", "local_world_size"), local, strict=True))
    node_rank = int(os.environ.get(launch_protocol.NODE_RANK, "0"))
    return {"rank": rank, "world_size": world, **local_sizes, "node_rank": node_rank}


def read_stop_signals() -> list[int]:
    """Return the signals that ask a rank to save and stop: SIGTERM, and the signal chosen at launch.

    Raises:
        ConfigError: the variable is not the number of a signal that a process can handle.
    """
    text = os.environ.get(launch_protocol.STOP_SIGNAL)
    if text is None:
        return [signal.SIGTERM]
    number = int(text) if text.isascii() and text.isdecimal() else 0
    if number not in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        raise ConfigError(
            f"init_dist: {launch_protocol.STOP_SIGNAL} must be the number of a signal that a process can handle, got {text!r}. "
            f"Set {launch_protocol.STOP_SIGNAL}={signal.SIGUSR1:d} for SIGUSR1."
        )
    return [signal.SIGTERM, number]


def select_device(device: str | None, rank_info: dict[str, int]) -> torch.device:
    """Select the device of this rank: ``device`` if given, else CUDA if the node has a GPU for each of its ranks.

    Raises:
        ConfigError: ``device`` is CUDA, and the node has fewer GPUs than ranks.
    """
    # device_count() asks NVML. torch.cuda.is_available() would start CUDA, and a process with CUDA must not fork.
    ranks, gpus = rank_info["local_world_size"], torch.cuda.device_count()
    if device == "cuda" and gpus < ranks:
        raise ConfigError(f"init_dist: device='cuda' needs one GPU per rank, got {gpus} GPUs for {ranks} ranks on this node")
    if device == "cpu" or gpus == 0:
        return torch.device("cpu")
    if gpus < ranks:
        if rank_info["local_rank"] == 0:
            warnings.warn(f"init_dist: {ranks} ranks but {gpus} GPUs on this node: running on the CPU with gloo", stacklevel=3)
        return torch.device("cpu")
    chosen = torch.device("cuda", rank_info["local_rank"])
    torch.cuda.set_device(chosen)
    return chosen


def read_master_address(rank: int, world: int) -> StoreAddress | None:
    """Return the store address from the launcher's environment, or None for a world of one."""
    env = os.environ
    if world == 1:
        return None
    try:
        host, port = env[launch_protocol.MASTER_ADDR], int(env[launch_protocol.MASTER_PORT])
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"init_dist: {launch_protocol.MASTER_ADDR} and {launch_protocol.MASTER_PORT} must be set for {world} ranks "
            f"({error}). Use `dtrain launch`."
        ) from None
    launcher = env.get(launch_protocol.AGENT_STORE) == "True"
    loopback = env.get(launch_protocol.LOOPBACK) == "1"
    return StoreAddress(
        host=host, port=port, is_server=rank == 0 and not launcher, loopback_only=loopback, served_by_launcher=launcher
    )
