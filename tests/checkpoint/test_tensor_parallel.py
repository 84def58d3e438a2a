"""States cut by tensor parallelism and FSDP2 at once: every layout loads into every other, bit for bit, and trains on so."""

import hashlib
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from checkpoint.filled import full
from dtrain.checkpoint.load import load_sharded
from dtrain.checkpoint.reader import verify
from dtrain.checkpoint.save import save_sharded
from dtrain.dist.mesh import build_mesh, data_rank
from dtrain.dist.rng import seed_all
from dtrain.shard.fsdp import shard_model
from dtrain.state import TrainState
from dtrain.step.compose import compose_step
from dtrain.transforms.weights.averaging import ema
from dtrain.typing import LossSum

WRITERS = {
    "full_shard tp": ("full_shard", {"tp": 2}),
    "hybrid_shard tp": ("hybrid_shard", {"dp_replicate": 2, "tp": 2}),
    "replicate tp": ("replicate", {"tp": 2}),
    "tp alone": ("full_shard", {"tp": 4}),
    "full_shard": ("full_shard", {}),
}
"""Strategy and degrees on four ranks."""
READERS = {
    1: {"plain": ("none", {}), "full_shard": ("full_shard", {})},
    2: {"full_shard": ("full_shard", {}), "tp alone": ("full_shard", {"tp": 2})},
    3: {"full_shard": ("full_shard", {}), "replicate": ("replicate", {})},
    4: WRITERS,
}
BATCH = torch.arange(24, dtype=torch.float32).reshape(4, 6) / 24


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """A tied weight, a norm that only FSDP2 cuts, a bias of each kind, dropout; three rows a rank are cut unevenly again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = Mlp(), nn.LayerNorm(6), Mlp()
        self.last.up.weight = self.first.up.weight
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(nn.functional.dropout(self.norm(self.first(x)), 0.2, self.training)) * self.scale


PLAN = {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()}


def squared(net: nn.Module, x: torch.Tensor) -> LossSum:
    return LossSum(total=net(x).square().sum(), weight=float(len(x)))


step = compose_step(squared, [ema(0.9)])


def begun(strategy: str, degrees: dict, *, seed: int) -> TrainState:
    torch.manual_seed(seed)
    net = Net()
    if strategy != "none":
        mesh = build_mesh(**degrees)
        net = shard_model(net, mesh, strategy=strategy, blocks=(Mlp,), tp_plan=PLAN if degrees.get("tp") else None)
        seed_all(seed, data_rank(mesh)[0])
    return step.init(net, torch.optim.AdamW(net.parameters(), lr=0.1))


def trained(state: TrainState, steps: int) -> TrainState:
    place, count = state.spec.data_rank, state.spec.data_ranks
    for _ in range(steps):
        state, _ = step(state, BATCH[place * len(BATCH) // count : (place + 1) * len(BATCH) // count])
    return state


def contents(state: TrainState) -> dict[str, str]:
    """Digests of all tensors of the run, put together by torch's own ``full_tensor``."""
    digests = {}
    for name, param in state.params.items():
        held = {**state.optimizer.state[param], "param": param.detach(), "ema": state.transform_states["ema"]["params"][name]}
        digests |= {f"{name} {key}": hashlib.sha256(full(tensor).numpy().tobytes()).hexdigest() for key, tensor in held.items()}
    return digests


def save_all(root: str, writers: list[str]) -> dict:
    digests = {}
    for name in writers:
        state = trained(begun(*WRITERS[name], seed=0), 2)
        save_sharded(Path(root) / name, state)
        digests[name] = [contents(state), contents(trained(state, 2))]
    return digests


def load_all(root: str, names: list[str], strategy: str, degrees: dict) -> dict:
    return {name: contents(load_sharded(Path(root) / name, begun(strategy, degrees, seed=1))) for name in names}


def write(root: Path, ranks, writers: list[str]) -> tuple[Path, dict]:
    first, *others = ranks(4).run(save_all, str(root), writers)
    assert all(other == first for other in others)
    return root, first


@pytest.fixture(scope="module")
def written(tmp_path_factory, ranks) -> tuple[Path, dict]:
    return write(tmp_path_factory.mktemp("parallel"), ranks, ["full_shard tp", "hybrid_shard tp"])


@pytest.fixture(scope="module")
def all_written(tmp_path_factory, ranks) -> tuple[Path, dict]:
    return write(tmp_path_factory.mktemp("parallel"), ranks, list(WRITERS))


def check_loads(written: tuple[Path, dict], ranks, world: int, strategy: str, degrees: dict) -> None:
    root, digests = written
    for results in ranks(world).run(load_all, str(root), list(digests), strategy, degrees):
        assert results == {name: before for name, (before, _) in digests.items()}


@pytest.mark.costly
@pytest.mark.parametrize(("world", "layout"), [(1, "plain"), (2, "tp alone"), (3, "full_shard"), (4, "replicate tp")])
def test_tensor_parallel_checkpoint_loads_into_other_layouts(written, ranks, world, layout):
    check_loads(written, ranks, world, *READERS[world][layout])


@pytest.mark.slow
@pytest.mark.parametrize(("world", "layout"), [(world, layout) for world in READERS for layout in READERS[world]])
def test_every_layout_loads_into_every_other(all_written, ranks, world, layout):
    check_loads(all_written, ranks, world, *READERS[world][layout])


def test_each_shard_is_written_once(written):
    root, digests = written
    sizes = []
    for name in digests:
        (folder,) = (root / name).glob("step-*")
        verify(folder)
        sizes.append(sum(path.stat().st_size for path in folder.glob("*.safetensors")))
    numbers = sum(param.numel() for param in Net().parameters())
    values = 4 * 4 * numbers  # float32: parameter, two moments, average
    random_states = 4 * (5_056 + 8 * 624 + 8 * 625)  # of torch in bytes; of NumPy and Python in integers of 8 bytes
    # Beside them headers and alignment.
    assert all(values + random_states < size < values + random_states + 4 * 6_144 for size in sizes), (
        sizes,
        values,
        random_states,
    )


def resumed(root: str, names: list[str]) -> dict:
    return {name: contents(trained(load_sharded(Path(root) / name, begun(*WRITERS[name], seed=1)), 2)) for name in names}


def test_resumed_run_continues_exactly(written, ranks):
    root, digests = written
    for result in ranks(4).run(resumed, str(root), list(digests)):
        assert result == {name: after for name, (_, after) in digests.items()}


def save_again(root: str, again: str, strategy: str, degrees: dict) -> None:
    save_sharded(again, load_sharded(root, begun(strategy, degrees, seed=1)))


@pytest.mark.parametrize("world", [1, 3])
def test_checkpoint_round_trips_through_other_layout(written, ranks, tmp_path, world):
    root, digests = written
    ranks(world).run(save_again, str(root / "full_shard tp"), str(tmp_path / "again"), "full_shard", {})
    for result in ranks(4).run(load_all, str(tmp_path), ["again"], "full_shard", {"tp": 2}):
        assert result["again"] == digests["full_shard tp"][0]


def drawn_after(root: str, strategy: str, degrees: dict) -> float:
    load_sharded(Path(root) / "hybrid_shard tp", begun(strategy, degrees, seed=3))
    return torch.rand(()).item()


def test_resume_on_other_mesh_seeds_generators_per_data_rank(written, ranks):
    drawn = ranks(4).run(drawn_after, str(written[0]), "full_shard", {"tp": 4})
    assert len(set(drawn)) == 1
    drawn = ranks(4).run(drawn_after, str(written[0]), "full_shard", {})
    assert len(set(drawn)) == 4
