"""The buffer of a rollout: one order for every number of ranks, and a position that a kill at any place leaves exact."""

from __future__ import annotations

import contextlib
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor, nn

import dtrain as dt
from dtrain.errors import CheckpointMismatchError, ConfigError

SAMPLES, UPDATES = 10, 14


def filled(size: int = 7, **options: Any) -> dt.data.RolloutBuffer:
    buffer = dt.data.RolloutBuffer(**{"global_batch_size": 3, "seed": 0, "epochs": 2, **options})
    buffer.fill({"x": torch.arange(size)})
    return buffer


def test_each_pass_has_each_sample_once_in_an_order_of_its_own():
    buffer, passes = filled(), []
    for size in (7, 4):
        if size == 4:
            buffer.fill({"x": torch.arange(size)})
        dealt = [batch["x"].tolist() for batch in buffer]
        whole = [sample for batch in dealt for sample in batch]
        passes += [whole[:size], whole[size:]]
        assert [sorted(part) for part in passes[-2:]] == [list(range(size))] * 2
    assert passes[0] != passes[1]
    assert passes[2] != passes[3]
    assert (buffer.rollouts, buffer.policy_version, buffer.rollout_version) == (2, 6 + 4, 6)
    plain = [batch["x"].tolist() for batch in filled(4, shuffle=False, epochs=1)]
    assert plain == [[0, 1, 2], [3]]


def test_rows_keep_their_structure_and_dtype():
    buffer = dt.data.RolloutBuffer(global_batch_size=2, seed=0, shuffle=False)
    nested = TensorDict({"a": {"b": torch.ones(3, 2, dtype=torch.bfloat16)}, "mask": torch.ones(3, dtype=torch.bool)}, [3])
    buffer.fill(nested, order=torch.tensor([2, 0, 1]))
    other = dt.data.RolloutBuffer(global_batch_size=2, seed=0, shuffle=False)
    other.load_state_dict(buffer.state_dict())
    for batch in (next(iter(buffer)), next(iter(other))):
        assert isinstance(batch, TensorDict)
        assert batch["a", "b"].dtype is torch.bfloat16
        assert batch["mask"].tolist() == [True, True]


def test_state_holds_the_rollout_until_its_last_update():
    buffer = filled(6)
    assert buffer.state_dict()["rows"]["x"].tolist() == list(range(6))
    assert len(list(buffer)) == 4
    assert buffer.state_dict()["rows"] is None
    again = dt.data.RolloutBuffer(global_batch_size=3, seed=0, epochs=5)
    again.load_state_dict(buffer.state_dict())
    assert again.is_finished
    assert again.rows is None
    again.fill({"x": torch.arange(6)})
    assert len(list(again)) == 10
    with pytest.raises(CheckpointMismatchError, match="seed=0, this one has seed=1"):
        dt.data.RolloutBuffer(global_batch_size=3, seed=1).load_state_dict(buffer.state_dict())
    with pytest.raises(CheckpointMismatchError, match="RolloutBuffer: the saved state has format version 9"):
        again.load_state_dict({"version": 9})


def test_refused():
    with pytest.raises(ConfigError, match="RolloutBuffer: epochs must be"):
        dt.data.RolloutBuffer(global_batch_size=1, seed=0, epochs=0)
    empty = dt.data.RolloutBuffer(global_batch_size=1, seed=0)
    with pytest.raises(ConfigError, match=r"must begin with a rollout, got none left after 0\. Call fill if"):
        iter(empty)
    with pytest.raises(ConfigError, match="fill: rows must hold at least one sample"):
        empty.fill({"x": torch.ones(0, 2)})
    with pytest.raises(ConfigError, match="fill: rows must be a mapping of tensors, got Tensor"):
        empty.fill(torch.ones(3))
    buffer = filled()
    next(iter(buffer))
    with pytest.raises(ConfigError, match=r"fill: the rollout must have no minibatch left, got 5\. Iterate"):
        buffer.fill({"x": torch.arange(2)})


def test_discard_ends_the_loop_and_the_rollout():
    buffer, seen = filled(), 0
    for _ in buffer:
        seen += 1
        if seen == 4:
            buffer.discard()
    assert (seen, buffer.is_finished, buffer.policy_version) == (4, True, 4)
    buffer.fill({"x": torch.arange(3)})
    assert [len(batch) for batch in buffer] == [3, 3]


class Killed(Exception):
    pass


def loss_fn(model: nn.Module, batch: Any) -> dt.LossSum:
    return dt.sum_loss((model(batch["x"])[:, 0] - batch["y"]).square())


class Run:
    """A loop that rolls out with its own model, and is killed behind a fill or an update."""

    def __init__(self, root: Path, *, prompts: bool = False) -> None:
        torch.manual_seed(0)
        self.mesh = dt.build_mesh()
        model = dt.shard_model(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)).double(), self.mesh, blocks=(nn.Linear,))
        self.buffer = dt.data.RolloutBuffer(mesh=self.mesh, global_batch_size=4, seed=1, epochs=2)
        self.prompts = (
            dt.build_loader(torch.arange(100), mesh=self.mesh, global_batch_size=SAMPLES, seed=2) if prompts else None
        )
        objects = {"loader": self.prompts or self.buffer} | ({"stateful": {"rollouts": self.buffer}} if prompts else {})
        self.step = dt.compose_step(loss_fn, [dt.transforms.clip_by_norm(1.0)])
        state = self.step.init(model, torch.optim.AdamW(model.parameters(), lr=0.1), **objects)
        self.checkpoints = dt.Checkpointer(root, keep_last=2)
        self.state = self.checkpoints.load(state, missing_ok=True)
        self.seen: list[Any] = []

    def roll_out(self, numbers: Tensor) -> dict[str, Tensor]:
        seeds = [(7, self.buffer.rollouts, number) for number in numbers.tolist()]
        x = torch.stack([torch.randn(3, generator=dt.dist.generator("cpu", *seed)) for seed in seeds]).double()
        with dt.eval_mode(self.state.model):
            return {"x": x, "y": self.state.model(x)[:, 0].sin() + x[:, 0], "number": numbers}

    def run(self, killed_after: int | None = None) -> None:
        """Train to the end, or to the save of this number."""
        index, count = dt.dist.data_rank(self.mesh)
        stream = None if self.prompts is None else self.prompts.until("100ep")
        saves = 0
        while self.state.step < UPDATES:
            if self.buffer.is_finished:
                numbers = torch.arange(SAMPLES)[index::count] if stream is None else next(stream)
                self.buffer.fill(self.roll_out(numbers), order=numbers)
                saves = self.save(saves, killed_after)
            for batch in self.buffer:
                self.state, _ = self.step(self.state, batch)
                self.seen.append((self.state.step, self.buffer.rollouts, sorted(batch["number"].tolist())))
                saves = self.save(saves, killed_after)
                if self.state.step == UPDATES:
                    break

    def save(self, saves: int, killed_after: int | None) -> int:
        # The step before is saved, too: a fill between both saves changes the checkpoint of one step.
        if killed_after is not None and saves >= killed_after - 1:
            self.checkpoints.save(self.state)
        if saves == killed_after:
            raise Killed
        return saves + 1

    def result(self) -> tuple[dict[str, list[float]], list[Any], list[int]]:
        with dt.shard.unshard_params(self.state.model):
            weights = {name: param.flatten().tolist() for name, param in self.state.model.named_parameters()}
        return weights, self.seen, [self.buffer.rollouts, self.buffer.policy_version, self.buffer.rollout_version]


def train(root: str, killed_after: int | None = None, prompts: bool = False) -> Any:
    run = Run(Path(root), prompts=prompts)
    with contextlib.suppress(Killed):
        run.run(killed_after)
    return run.result()


# Behind the first fill, inside, behind the last update of a rollout, behind the second fill, inside.
PLACES = (0, 3, 6, 7, 9)


def killed_everywhere(root: str, prompts: bool) -> Any:
    whole = train(f"{root}/whole", None, prompts)
    for place in PLACES:
        for name in ("killed", "elastic"):
            train(f"{root}/{name}{place}", place, prompts)
        resumed = train(f"{root}/killed{place}", None, prompts)
        assert resumed[0] == whole[0], place
        assert resumed[1] == whole[1][-len(resumed[1]) :], place
        assert len(resumed[1]) < UPDATES or place == 0
        assert resumed[2] == whole[2], place
    return whole


def resumed_everywhere(root: str, prompts: bool) -> Any:
    return [train(f"{root}/elastic{place}", None, prompts) for place in PLACES]


@pytest.mark.costly
@pytest.mark.parametrize("prompts", [False, True])
def test_killed_run_ends_bit_equal_and_alike_on_other_ranks(tmp_path, ranks, prompts):
    whole = ranks(2).run(killed_everywhere, str(tmp_path), prompts)[0]
    assert whole[2] == [3, UPDATES, 12]
    for other in ranks(1).run(resumed_everywhere, str(tmp_path), prompts)[0]:
        for name, weight in other[0].items():
            assert weight == pytest.approx(whole[0][name], rel=0, abs=1e-12)


def test_save_without_the_buffer_is_refused(tmp_path):
    step = dt.compose_step(loss_fn)
    model = nn.Linear(3, 1)
    state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1))
    buffer = dt.data.RolloutBuffer(global_batch_size=2, seed=0)
    buffer.fill({"x": torch.ones(2, 3), "y": torch.ones(2)})
    for batch in buffer:
        state, _ = step(state, batch)
    with pytest.raises(ConfigError, match=r"the state must hold the position of RolloutBuffer\(rollouts=1"):
        dt.save_sharded(tmp_path, state)


def shares() -> list[list[int]]:
    mesh = dt.build_mesh()
    buffer = dt.data.RolloutBuffer(mesh=mesh, global_batch_size=4, seed=0, epochs=2)
    numbers = torch.arange(9)[dist.get_rank() :: dist.get_world_size()]
    buffer.fill({"x": numbers}, order=numbers)
    assert buffer.rows["x"].tolist() == list(range(9))
    return [batch["x"].tolist() for batch in buffer]


def test_minibatches_are_the_same_on_every_number_of_ranks(ranks):
    (one,) = ranks(1).run(shares)
    parts = ranks(3).run(shares)
    assert [[*chain(*batch)] for batch in zip(*parts, strict=True)] == one
    assert one[2] == one[2][:1], "the last minibatch of a pass has one sample, so two ranks have none"
