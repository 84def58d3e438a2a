"""A sound checkpoint of another model: refused with a short table, and nothing has changed."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from checkpoint.states import Net, digest, plain_state, train
from dtrain.checkpoint.load import load_sharded
from dtrain.checkpoint.save import save_sharded
from dtrain.errors import CheckpointMismatchError
from dtrain.state import TrainState, init_state


class Wider(Net):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(7, 3)
        self.more = nn.ModuleList(nn.Linear(1, 1) for _ in range(6))


def misfit(change) -> TrainState:
    model = change(Net())
    return init_state(model, torch.optim.AdamW(model.parameters(), amsgrad=True))


def no_buffer(model: Net) -> Net:
    del model.seen
    return model


def two_groups(state: TrainState) -> TrainState:
    params = list(state.params.values())
    return replace(state, optimizer=torch.optim.AdamW([{"params": params[:1]}, {"params": params[1:]}], amsgrad=True))


def other_order(state: TrainState) -> TrainState:
    return replace(state, optimizer=torch.optim.AdamW(list(state.params.values())[::-1], amsgrad=True))


MISFITS = {
    "shape": (lambda: misfit(lambda _: Wider()), r"params/last.weight: checkpoint F32 \[2, 7\], here F32 \[3, 7\]"),
    "more parameters": (lambda: misfit(lambda _: Wider()), r"and \d+ more"),
    "dtype": (lambda: misfit(lambda m: m.double()), r"params/first.weight: checkpoint F32 \[7, 5\], here F64 \[7, 5\]"),
    "buffer": (lambda: misfit(no_buffer), r"buffers/seen: checkpoint I64 \[\], here nothing"),
    "no slices": (lambda: replace(plain_state(), transform_states={}), r"transforms/ema: checkpoint a transform, here nothing"),
    "more slices": (
        lambda: replace(plain_state(), transform_states={**plain_state().transform_states, "sam": {}}),
        r"transforms/sam: checkpoint nothing, here a transform",
    ),
    "tensor in a slice": (
        lambda: plain_state().with_transform_state("ema", {"shadow": {}, "updates": 0}),
        r"transforms/ema/shadow/first.bias: checkpoint F32 \[7\], here nothing",
    ),
    "optimizer": (lambda: plain_state(optimizer="sgd"), r"optimizer/groups/0/betas: checkpoint a hyperparameter, here nothing"),
    "groups": (lambda: two_groups(plain_state()), r"optimizer/groups: checkpoint 1 group, here 2 groups"),
    "order": (
        lambda: other_order(plain_state()),
        r"optimizer/groups/0/params: checkpoint 4 \(first difference: first.weight\)",
    ),
}


@pytest.mark.parametrize(("make", "message"), MISFITS.values(), ids=MISFITS)
def test_mismatched_state_is_refused_with_table(tmp_path, make, message):
    save_sharded(tmp_path, train(plain_state(), 1))
    state = make()
    before = digest(state)
    with pytest.raises(CheckpointMismatchError, match=message) as caught:
        load_sharded(tmp_path, state)
    assert digest(state) == before
    assert str(caught.value).count("\n") <= 11
    state._check_not_stale("here")


def stacked(width: int, layers: int, *, name: str = "layers") -> TrainState:
    model = nn.Module()
    model.add_module(name, nn.ModuleList(nn.Linear(width, width) for _ in range(layers)))
    state = init_state(model, torch.optim.AdamW(model.parameters()))
    return replace(state, transform_states={"ema": {"shadow": {key: p.detach().clone() for key, p in state.params.items()}}})


OTHER_MODELS = {
    "wider": (
        lambda: stacked(4, 6),
        "12 entries differ (12 of another shape)",
        ["params/layers.0.weight: checkpoint F32 [3, 3], here F32 [4, 4]"],
    ),
    "deeper": (
        lambda: stacked(3, 7),
        "2 entries differ (2 missing)",
        ["params/layers.6.weight: checkpoint nothing, here F32 [3, 3]"],
    ),
    "wider and shallower": (
        lambda: stacked(4, 2),
        "12 entries differ (4 of another shape, 8 unexpected)",
        [
            "params/layers.0.bias: checkpoint F32 [3], here F32 [4]",
            "params/layers.2.weight: checkpoint F32 [3, 3], here nothing",
        ],
    ),
    "other names": (
        lambda: stacked(3, 6, name="blocks"),
        "24 entries differ (12 unexpected, 12 missing)",
        ["layers.0.weight: checkpoint F32 [3, 3], here nothing", "blocks.0.weight: checkpoint nothing, here F32 [3, 3]"],
    ),
}


@pytest.mark.parametrize(("make", "counts", "expected"), OTHER_MODELS.values(), ids=OTHER_MODELS)
def test_mismatch_table_of_other_model_is_short(tmp_path, make, counts, expected):
    """The EMA, optimizer state and group of a parameter that differs are not listed as well."""
    saved = stacked(3, 6)
    for param in saved.params.values():
        saved.optimizer.state[param] = {"exp_avg": torch.zeros_like(param)}
    save_sharded(tmp_path, saved)
    with pytest.raises(CheckpointMismatchError) as caught:
        load_sharded(tmp_path, make())
    head, *table = str(caught.value).split("\n")
    assert head.startswith(f"load_sharded: {tmp_path / 'step-00000000'} does not fit. {counts}. Build model, optimizer and")
    assert 2 <= len(table) <= 11
    assert all(line.startswith(("  params/", "  and ")) for line in table)
    for row in expected:
        assert any(row in line for line in table), row
