"""Parts of a checkpoint that are not asked for: refused on all ranks before anything changes, or left by ``ignore``."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import dtrain as dt
from checkpoint.filled import sharded_state
from checkpoint.states import Counter, digest, plain_state, train
from dtrain.checkpoint.load import load_sharded
from dtrain.checkpoint.save import save_sharded
from dtrain.dist.init import get_dist_info
from dtrain.dist.rng import rng_state, seed_all
from dtrain.errors import CheckpointMismatchError, ConfigError, DtrainError
from dtrain.state import init_state


def other_optimizer(seed: int) -> dt.TrainState:
    """The state of ``plain_state``, but for an optimizer that has nothing in common with that of the checkpoint."""
    return train(plain_state(seed, optimizer="sgd"), 1)


def without_a_weight(seed: int) -> dt.TrainState:
    torch.manual_seed(seed)
    model = nn.Module()
    model.first = nn.Linear(5, 7)
    model.register_buffer("seen", torch.zeros((), dtype=torch.int64))
    state = init_state(model, torch.optim.AdamW(model.parameters()), seed=seed)
    shadow = {name: p.detach().clone() for name, p in state.params.items()}
    return replace(
        state, transform_states={"ema": {"shadow": shadow, "updates": 0}, "spikes": {"worst": 0.0, "window": (1, 2)}}
    )


def without_slice(seed: int) -> dt.TrainState:
    state = plain_state(seed)
    return replace(state, transform_states={"ema": state.transform_states["ema"]})


# A part that the load leaves out, the words of the error, and the patterns that ignore the part.
LEFT = {
    "extra": (plain_state, {}, r"extra/loader: checkpoint a value, here nothing", ["extra/loader"]),
    "transform": (without_slice, {"loader": []}, r"transforms/spikes: checkpoint a transform, here", ["transforms/spikes"]),
    "optimizer": (other_optimizer, {"loader": []}, r"optimizer/groups/0/betas: checkpoint a hyperparam", ["optimizer"]),
    "parameters": (
        without_a_weight, {"loader": []}, r"params/last.weight: checkpoint F32 \[2, 7\], here nothing", ["last.*"],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("make", "extra", "message", "ignore"), LEFT.values(), ids=LEFT)
def test_unrequested_part_is_refused_unless_ignored(tmp_path, make, extra, message, ignore):
    save_sharded(tmp_path, train(plain_state(), 2), extra={"loader": [7]})
    state = make(1)
    before = digest(state)
    with pytest.raises(CheckpointMismatchError, match=message) as caught:
        load_sharded(tmp_path, state, extra=extra)
    assert "ignore=" in str(caught.value)
    assert digest(state) == before
    assert load_sharded(tmp_path, state, extra=extra, ignore=ignore).step == 2


def test_missing_extra_error_suggests_extra_or_ignore(tmp_path):
    save_sharded(tmp_path, train(plain_state(), 1), extra={"loader": Counter()})
    with pytest.raises(CheckpointMismatchError) as caught:
        load_sharded(tmp_path, plain_state())
    assert 'Pass extra={"loader": ...} to load stored values, or ignore=["extra/loader"] to skip them' in str(caught.value)


def test_ignore_patterns_skip_several_extras(tmp_path):
    save_sharded(tmp_path, plain_state(), extra={"loader": [1], "stop": [2], "history": [3]})
    history: list[int] = []
    state = load_sharded(tmp_path, plain_state(), extra={"history": history}, ignore=["extra/lo*", "extra/stop"])
    assert history == [3]
    assert state.restored.ignored == ("extra/loader", "extra/stop")


def test_ignored_extra_keeps_its_value(tmp_path):
    save_sharded(tmp_path, plain_state(), extra={"loader": {"position": 9, "weights": torch.ones(2)}})
    loader, new = Counter(), [3]
    load_sharded(tmp_path, plain_state(), extra={"loader": loader, "new": new}, ignore=["extra/loader", "extra/new"])
    assert loader.state["position"] == 0
    assert new == [3]


def test_ignored_optimizer_keeps_its_state(tmp_path):
    save_sharded(tmp_path, saved := train(plain_state(), 2))
    state = train(plain_state(1), 1)
    state.optimizer.param_groups[0]["lr"] = 0.25
    moments = [state.optimizer.state[p]["exp_avg"].clone() for p in state.params.values()]
    now = load_sharded(tmp_path, state, ignore=["optimizer"])
    assert torch.equal(now.params["first.weight"], saved.params["first.weight"])
    assert all(map(torch.equal, (now.optimizer.state[p]["exp_avg"] for p in now.params.values()), moments))
    assert now.optimizer.param_groups[0]["lr"] == 0.25


def test_ignored_random_state_is_unchanged(tmp_path):
    save_sharded(tmp_path, train(plain_state(), 2))
    state = plain_state()
    seed_all(77)
    before = repr(rng_state())
    load_sharded(tmp_path, state, ignore=["rng"])
    assert repr(rng_state()) == before


def begin(seed: int, *transforms: dt.Transform) -> tuple[dt.step.Step, dt.TrainState]:
    torch.manual_seed(seed)
    model = nn.Linear(3, 2)
    step = dt.compose_step(dt.mean_loss(lambda model, x: model(x).sum(), weight=len), transforms)
    return step, step.init(model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize("saved_with", [(dt.transforms.ema(0.5),), ()], ids=["stored", "not stored"])
def test_ignored_transform_restarts_from_loaded_weights(tmp_path, saved_with):
    step, state = begin(0, *saved_with)
    save_sharded(tmp_path, step(state, torch.ones(1, 3))[0])
    restored = load_sharded(tmp_path, begin(1, dt.transforms.ema(0.5))[1], ignore=["transforms/ema"])
    for name, average in restored.transform_states["ema"]["params"].items():
        assert torch.equal(average, restored.params[name])


def test_unrequested_state_is_refused_unless_ignored(tmp_path):
    save_sharded(tmp_path, {"generator": plain_state(0), "critic": plain_state(1)})
    with pytest.raises(CheckpointMismatchError, match=r"Pass the state 'critic', too.*ignore=\[\"states/critic\"\]"):
        load_sharded(tmp_path, {"generator": plain_state(2)})
    states = load_sharded(tmp_path, {"generator": plain_state(2)}, ignore=["states/critic"])
    assert states["generator"].restored.ignored == ("states/critic",)


@pytest.mark.parametrize("pattern", ["extra/loder", "transforms/emma", "states/critic", "last*", "heads.**"])
def test_ignore_pattern_without_match_is_refused(tmp_path, pattern):
    save_sharded(tmp_path, plain_state(), extra={"loader": [1]})
    with pytest.raises(ConfigError, match=r"ignore: a pattern must match a name in the model or the checkpoint, got '"):
        load_sharded(tmp_path, plain_state(), extra={"loader": [1]}, ignore=[pattern])


def test_model_name_pattern_does_not_ignore_extras(tmp_path):
    save_sharded(tmp_path, train(plain_state(), 1), extra={"loader": [1]})
    with pytest.raises(CheckpointMismatchError, match="extra/loader"):
        load_sharded(tmp_path, plain_state(), ignore=["**"])


def attempt(root: str, how: str) -> list[Any]:
    save_sharded(root, sharded_state("full_shard", filled=True), extra={"loader": [1]})
    state = sharded_state("full_shard", filled=False)
    before = digest(state)
    options: dict[str, Any] = {"extra": {"loader": [0]}}
    if get_dist_info().rank == 1:
        options = {} if how == "not asked for" else {"ignore": ["extra/loader"]}
    try:
        load_sharded(root, state, **options)
    except DtrainError as error:
        return [f"{type(error).__name__}: {error}".splitlines()[0], digest(state) == before]
    return ["nothing"]


def test_part_unrequested_on_one_rank_is_refused_on_all(tmp_path, ranks):
    (first, same), (second, also) = ranks(2).run(attempt, str(tmp_path), "not asked for")
    assert first.startswith("PeerError: load_sharded: rank 1 failed")
    assert second.startswith("CheckpointMismatchError: load_sharded: ")
    assert same
    assert also


def test_unequal_ignore_options_across_ranks_are_refused(tmp_path, ranks):
    for said, same in ranks(2).run(attempt, str(tmp_path), "ignored"):
        assert said.startswith("ConfigError: load_sharded: options must be equal on all ranks")
        assert same
