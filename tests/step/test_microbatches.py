"""Batches of any kind: cut and counted by the caller; an invalid batch is an error on all ranks, not a hang."""

import numpy as np
import pytest
import torch
from torch import nn

from dtrain.data.batch import batch_spec
from dtrain.dist.init import get_dist_info
from dtrain.dist.mesh import build_mesh
from dtrain.errors import ConfigError, DtrainError
from dtrain.shard.fsdp import shard_model
from dtrain.state import TrainState
from dtrain.step.microbatch_step import microbatch_step
from dtrain.step.optimizer import optimizer_step
from dtrain.typing import LossSum
from step.states import state_of


class Graphs:
    """A batch that is no tensor: graphs of different sizes."""

    def __init__(self, graphs: list[torch.Tensor]) -> None:
        self.graphs = graphs


def some(count: int) -> Graphs:
    return Graphs([torch.full((n + 1, 3), float(n)) for n in range(count)])


def split(batch: Graphs, size: int) -> list[Graphs]:
    return [Graphs(batch.graphs[start : start + size]) for start in range(0, len(batch.graphs), size)]


def count(batch: Graphs) -> tuple[int, int]:
    return len(batch.graphs), sum(len(g) for g in batch.graphs)


def loss_fn(net: nn.Module, batch: Graphs) -> LossSum:
    total = torch.stack([net(graph).mean(0).square().sum() for graph in batch.graphs]).sum()
    return LossSum(total=total, weight=len(batch.graphs))


def plain() -> TrainState:
    torch.manual_seed(0)
    return state_of(nn.Linear(3, 2))


def gradient(state: TrainState) -> list:
    return torch.cat([p.grad.flatten() for p in state.params.values()]).tolist()


@pytest.mark.parametrize("size", [1, 2, 5, None])
def test_custom_batch_uses_caller_split_and_count(size):
    state = plain()
    after, _ = microbatch_step(
        state, some(5), loss_fn=loss_fn, microbatch_size=size, batch_spec=batch_spec(split=split, count=count)
    )
    whole = plain()
    loss = loss_fn(whole.model, some(5))
    (loss.total / loss.weight).backward()
    assert gradient(state) == pytest.approx(gradient(whole), rel=1e-5)
    after, _ = optimizer_step(after, {})
    assert (after.clock.samples, after.clock.tokens) == (5, 15)


def test_count_alone_suffices_without_microbatches():
    state = plain()
    after, _ = microbatch_step(state, some(2), loss_fn=loss_fn, batch_spec=batch_spec(count=lambda batch: len(batch.graphs)))
    assert after._step_counts.samples == 2


def test_unknown_batch_type_error_suggests_batch_spec_and_split():
    with pytest.raises(ConfigError, match=r"found no tensor to split in a Graphs. .* dt.batch_spec\(count=..., split=...\)"):
        microbatch_step(plain(), some(2), loss_fn=loss_fn)


def test_empty_split_result_is_refused():
    with pytest.raises(ConfigError, match="split must return at least one microbatch for 2 samples"):
        microbatch_step(
            plain(),
            some(2),
            loss_fn=loss_fn,
            microbatch_size=1,
            batch_spec=batch_spec(split=lambda batch, size: [], count=count),
        )


def bad_batch_on_rank_1(where: str) -> list[str]:
    state = state_of(shard_model(nn.Linear(3, 2), build_mesh()))

    def broken(*args):
        if get_dist_info().rank == 1:
            raise ValueError(f"{where} of rank 1")
        return split(*args) if where == "split" else count(*args) if where == "count" else 5.0

    functions = {"split": split, "count": count}
    options = {"loss_fn": loss_fn, "microbatch_size": 2}
    try:
        microbatch_step(state, some(5), batch_spec=batch_spec(**{**functions, where: broken}), **options)
    except (DtrainError, ValueError) as error:
        microbatch_step(state, some(5), batch_spec=batch_spec(**functions), **options)  # all ranks continue
        return [type(error).__name__, str(error)]
    return ["no error"]


@pytest.mark.parametrize("where", ["split", "count", "weight"])
def test_unusable_batch_on_one_rank_raises_on_all_ranks(ranks, where):
    first, second = ranks(2).run(bad_batch_on_rank_1, where)
    assert second == ["ValueError", f"{where} of rank 1"]
    assert first == ["PeerError", "step: rank 1 could not use its batch (1 of 2 ranks). See the error of that rank."]


@pytest.mark.parametrize(
    "counted",
    [4.0, None, -4, True, (1, 2, 3), (4.5, 2), (4, -1), "4"],
    ids=["float", "none", "negative", "bool", "three", "half", "tokens", "text"],
)
def test_invalid_count_result_is_refused(counted):
    with pytest.raises(ConfigError, match=r"count must return samples, or \(samples, tokens\), as whole numbers, got "):
        microbatch_step(
            plain(),
            some(5),
            loss_fn=loss_fn,
            microbatch_size=2,
            batch_spec=batch_spec(split=split, count=lambda batch: counted),
        )


@pytest.mark.parametrize("counted", [np.int64(5), torch.tensor(5), (np.int32(5), torch.tensor(15)), [5, 15]], ids=repr)
def test_integer_like_counts_are_accepted(counted):
    state, _ = microbatch_step(
        plain(), some(5), loss_fn=loss_fn, microbatch_size=2, batch_spec=batch_spec(split=split, count=lambda batch: counted)
    )
    assert state._step_counts.samples == 5


@pytest.mark.parametrize("pieces", [None, 3, "text", {"a": 1}], ids=["none", "number", "text", "mapping"])
def test_non_list_split_result_is_refused(pieces):
    with pytest.raises(ConfigError, match="split must return a list of microbatches, got "):
        microbatch_step(
            plain(),
            some(5),
            loss_fn=loss_fn,
            microbatch_size=2,
            batch_spec=batch_spec(split=lambda batch, size: pieces, count=count),
        )
