"""An average in the place of the parameters: its readers, refused calls meanwhile, and that every bit comes back."""

import pytest
import torch
from torch import nn

import dtrain as dt
from dtrain.dist.dtensor import full_tensor, to_local
from dtrain.errors import ConfigError, StaleStateError
from dtrain.transforms.combinators import masked
from dtrain.transforms.weights.averaging import ema, load_average_, use_average
from falling import BATCH, LOSS, average, begin, take, weight


class BrokenError(Exception):
    pass


def _broken_inside(state: dt.TrainState, batch: torch.Tensor) -> None:
    was, mean = state.model[0].weight.detach().clone(), state.transform_states["ema"]["params"]["0.weight"].clone()
    with use_average(state, "ema"):
        assert torch.equal(state.model[0].weight, mean.to(was.dtype))
        assert not torch.equal(state.model[0].weight, was)
        state.model(batch)  # in training mode, so running statistics move
        raise BrokenError


def test_use_average_swaps_the_average_in_and_back():
    step, state = begin(ema(0.75))
    state = take(step, state)
    with use_average(state, "ema"):
        assert weight(state) == 3.875
        assert dt.reduce_metrics(dt.evaluate(state.model, [BATCH], LOSS)) == {"loss": 3.875}
        assert dict(dt.full_params(state))["weight"].item() == 3.875
    assert (weight(state), average(state, "ema")) == (3.5, 3.875)
    assert weight(take(step, state)) == 3.0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_use_average_restores_parameters_exactly_after_an_exception(dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7)).to(dtype)
    step = dt.compose_step(dt.mean_loss(lambda model, x: model(x).float().square().mean(), weight=len), [ema(0.9)])
    state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batch = torch.randn(4, 5).to(dtype)
    state, _ = step(state, batch)
    means = state.transform_states["ema"]["params"]
    before = [t.clone() for t in (*model.state_dict().values(), *means.values())]
    with pytest.raises(BrokenError):
        _broken_inside(state, batch)
    assert all(torch.equal(a, b) for a, b in zip(before, (*model.state_dict().values(), *means.values()), strict=True))
    assert state._run_context.replaced_by is None


@pytest.mark.parametrize(
    ("use", "where"),
    [
        (lambda step, state, root: step(state, BATCH), "step"),
        (lambda step, state, root: dt.microbatch_step(state, BATCH, loss_fn=LOSS), "microbatch_step"),
        (lambda step, state, root: dt.save_sharded(root, state), "save_sharded"),
        (lambda step, state, root: dt.load_sharded(root, state), "load_sharded"),
        (lambda step, state, root: use_average(state, "ema").__enter__(), "use_average"),
        (lambda step, state, root: load_average_(state, "ema"), "load_average_"),
    ],
    ids=["step", "gradient", "save", "load", "again", "for good"],
)
def test_step_and_save_are_refused_inside_use_average(use, where, tmp_path):
    step, state = begin(ema(0.75))
    state = take(step, state)
    with use_average(state, "ema"):
        with pytest.raises(StaleStateError, match=f"{where}: the average 'ema' is in the place of the parameters. Leave"):
            use(step, state, str(tmp_path))
        assert weight(state) == 3.875
    assert weight(take(step, state)) == 3.0


def test_use_average_refuses_a_spent_state():
    step, state = begin(ema(0.75))
    take(step, state)
    with pytest.raises(StaleStateError, match="use_average: this state was stepped already"), use_average(state):
        pass


def test_use_average_refuses_unknown_or_unstarted_averages():
    step, state = begin(ema(0.75, start=2))
    with (
        pytest.raises(ConfigError, match=r"use_average: the average 'ema' has not started at step 0\. See start="),
        use_average(state),
    ):
        pass
    with pytest.raises(ConfigError, match=r"load_average_: name must be an average .*, got 'swa'\. Averages: \['ema'\]"):
        load_average_(state, "swa")
    with use_average(take(step, state, 2)):
        assert weight(state) == 3.0


def test_use_average_refuses_an_unsharded_model(monkeypatch):
    _, state = begin(ema(0.75))
    state.model.__dict__["_dtrain_unsharded"] = True  # as unsharded does
    with (
        pytest.raises(
            ConfigError,
            match=r"use_average: the model must be sharded, got an unsharded model\. Enter unshard_params inside the context",
        ),
        use_average(state),
    ):
        pass


def test_use_average_of_a_masked_average_swaps_only_masked_parameters():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    step = dt.compose_step(LOSS, [masked(ema(0.5), "0.*")])
    state, _ = step(step.init(model, torch.optim.SGD(model.parameters(), lr=0.5)), BATCH)
    before = [p.item() for p in model.parameters()]
    with use_average(state):
        assert [p.item() != was for p, was in zip(model.parameters(), before, strict=True)] == [True, True, False, False]


def test_load_average_replaces_the_parameters_permanently():
    step, state = begin(ema(0.75))
    state = take(step, state)
    load_average_(state, "ema")
    assert (weight(state), average(state, "ema")) == (3.875, 3.875)
    assert weight(take(step, state)) == 3.375


# ---- sharded ----------------------------------------------------------------------------------------------------------------


def evaluated(strategy: str) -> dict[str, object]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    model = dt.shard_model(model, dt.build_mesh(), strategy=strategy, blocks=(nn.Linear,))
    loss = dt.mean_loss(lambda model, x: model(x).square().mean(), weight=len)
    step = dt.compose_step(loss, [ema(0.5)])
    state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.5))
    batch = torch.randn(3, 4, dtype=torch.float64)
    for _ in range(2):
        state, _ = step(state, batch)
    means = state.transform_states["ema"]["params"]
    copy = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    copy.load_state_dict({name: full_tensor(mean).clone() for name, mean in means.items()})
    with torch.no_grad():
        expected = [loss(copy, batch).total.item() / 3, copy(batch).sum().item()]
    before = [to_local(p).detach().clone() for p in (*state.params.values(), *means.values())]
    places = [to_local(p).data_ptr() for p in state.params.values()]
    with torch.no_grad():
        outside = model(batch).sum().item()
        with use_average(state):
            numbers = [dt.reduce_metrics(dt.evaluate(model, [batch], loss))["loss"]]
            with dt.shard.unshard_params(model):
                numbers.append(model(batch).sum().item())
            whole = {name: full.clone() for name, full in dt.full_params(state)}
            model(batch)
        again = model(batch).sum().item()
    dt.evaluate(model, [batch], loss)  # frees the tensors of that forward
    after = [to_local(p).detach().clone() for p in (*state.params.values(), *means.values())]
    step(state, batch)
    return {
        "error": max(abs(a - b) for a, b in zip(numbers, expected, strict=True)),
        "whole": all(torch.equal(whole[name], tensor) for name, tensor in copy.state_dict().items()),
        "outside": outside == again != expected[1],
        "bits": all(torch.equal(a, b) for a, b in zip(before, after, strict=True)),
        "places": places == [to_local(p).data_ptr() for p in state.params.values()],
    }


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "replicate"])
def test_sharded_model_computes_with_its_average(ranks, strategy):
    for result in ranks(2).run(evaluated, strategy):
        assert result.pop("error") < 1e-12
        assert result == {"whole": True, "outside": True, "bits": True, "places": True}
