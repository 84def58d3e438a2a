"""A load needs the memory of missing tensors of the state (the optimizer's in a new run), and of a few buffers."""

import ctypes
import gc
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from dtrain.checkpoint.load import load_sharded
from dtrain.checkpoint.save import save_sharded
from dtrain.dist.dtensor import to_local
from dtrain.dist.init import get_dist_info
from dtrain.state import TrainState, init_state

SIDE, COUNT = 2048, 5  # 80 MiB of parameters, 240 with the optimizer's state
# Of the rank's own shards: two thirds are the moments of AdamW, which a new state lacks.
ALLOWED = {"new": 2 / 3 + 0.2, "stepped": 0.2}
PLACEMENTS = {"rows": Shard(0), "columns": Shard(1), "whole": Replicate()}


def sharded(placement: str | None, *, stepped: bool) -> TrainState:
    model = nn.Module()
    mesh = None if placement is None else init_device_mesh("cpu", (get_dist_info().world_size,))
    for number in range(COUNT):
        value = torch.full((SIDE, SIDE), float(number))
        placed = value if mesh is None else distribute_tensor(value, mesh, [PLACEMENTS[placement]])
        model.register_parameter(f"w{number}", nn.Parameter(placed))
    state = init_state(model, torch.optim.AdamW(model.parameters()))
    if stepped:
        for number, param in enumerate(state.params.values()):
            moments = {key: torch.full_like(param.detach(), 100.0 + number) for key in ("exp_avg", "exp_avg_sq")}
            state.optimizer.state[param] = {"step": torch.tensor(1.0), **moments}
    return state


def resident(what: str) -> int:
    """Bytes: ``VmRSS``, now, or ``VmHWM``, the most since it was reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(f"{what}:")))


def load_and_measure(path: str, placement: str, age: str) -> list[float]:
    state = sharded(placement, stepped=age == "stepped")
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # memory that earlier tests have freed would hide the need of the load
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    state = load_sharded(path, state)
    above = resident("VmHWM") - before
    param = state.params["w3"]
    content = state.optimizer.state[param]
    right = bool((to_local(param) == 3).all()) and bool((to_local(content["exp_avg"]) == 103).all())
    own = sum(3 * to_local(p).nbytes for p in state.params.values())
    return [above / own, own / 2**20, float(right)]


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the kernel does not tell the most memory that was held")
@pytest.mark.parametrize("age", ALLOWED)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_resharding_load_uses_memory_of_missing_tensors_only(tmp_path, ranks, placement, age):
    path = save_sharded(tmp_path, sharded(None, stepped=True)).path
    for above, own, right in ranks(2).run(load_and_measure, str(path), placement, age):
        assert right
        assert own == (240 if placement == "whole" else 120)
        assert above <= ALLOWED[age], above
        assert above > 0.5 or age == "stepped", "the measurement sees the new tensors"
