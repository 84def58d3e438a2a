"""Gradient hooks of parameters: once a step, on the gradient that one process with the whole batch would have."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

from dtrain.data.batch import batch_spec
from dtrain.dist.dtensor import full_tensor
from dtrain.dist.init import get_dist_info
from dtrain.dist.mesh import build_mesh
from dtrain.errors import ConfigError, StepError
from dtrain.shard.fsdp import shard_model
from dtrain.shard.precision import Precision
from dtrain.step.compose import compose_step, optimizer_in_backward
from dtrain.step.grad_cache import grad_cache_step
from dtrain.step.microbatch_step import microbatch_step
from dtrain.typing import LossSum
from shard.test_param_objects import mesh_for, strategies

SAMPLES, STEPS = 8, 2


class Net(nn.Module):
    """A tied weight, a block, a scalar that is always whole, and a layer that no sample uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out, self.unused = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(2, 2)
        self.second.weight = self.first.weight
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.second(torch.tanh(self.first(x))))) * self.scale


def make(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return Net().to(dtype)


def batch(step: int) -> torch.Tensor:
    return torch.randn(SAMPLES, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step)) * (1 + step)


def squares(model: nn.Module, x: torch.Tensor) -> LossSum:
    return LossSum(total=model(x).square().sum(), weight=len(x))


def add_hooks(model: nn.Module, calls: list) -> list:
    """Register hooks that are neither elementwise nor linear. Return their handles."""

    def normalize(grad: torch.Tensor) -> torch.Tensor:
        calls.append("normalize")
        return grad / grad.norm() + grad.sign() * grad.abs().amax()

    def freeze_row(grad: torch.Tensor) -> None:
        calls.append("freeze")
        grad[1] = 0  # in place, without a result

    def clip(param: torch.Tensor) -> None:
        calls.append("clip")
        param.grad.clamp_(-0.05, 0.05)

    return [
        model.first.weight.register_hook(normalize),
        model.first.weight.register_hook(freeze_row),
        model.out.bias.register_post_accumulate_grad_hook(clip),
        model.scale.register_hook(lambda grad: grad.clamp(-0.01, 0.01)),
        model.unused.weight.register_hook(lambda grad: calls.append("unused")),
    ]


def one_process() -> tuple[dict, list]:
    """Train with plain torch, and return the weights and the calls."""
    model, calls = make(), []
    add_hooks(model, calls)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        loss = squares(model, batch(step))
        (loss.total / loss.weight).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}, calls


def share(whole: torch.Tensor) -> torch.Tensor:
    size = len(whole) // get_dist_info().world_size
    return whole[get_dist_info().rank * size :][:size]


GRADS = {
    "whole": microbatch_step,
    "microbatches": partial(microbatch_step, microbatch_size=2),
    "grad cache": partial(grad_cache_step, microbatch_size=2),
}


def train(strategy: str, when: str, grad: str, **options) -> tuple[float, bool]:
    expected, expected_calls = one_process()
    model, calls = make(), []
    if when == "before":
        add_hooks(model, calls)
    if strategy != "none":
        model = shard_model(model, mesh_for(strategy), strategy=strategy, **options)
    if when == "after":
        add_hooks(model, calls)
    step = compose_step(squares, grad=GRADS[grad])
    state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for index in range(STEPS):
        state, _ = step(state, share(batch(index)))
    error = max((full_tensor(p.detach()) - expected[name]).abs().max().item() for name, p in state.params.items())
    return error, sorted(calls) == sorted(expected_calls)


def all_trainings() -> dict:
    results = {}
    for strategy in [*strategies(), *(["none"] if get_dist_info().world_size == 1 else [])]:
        for grad in GRADS:
            for when in ("before", "after") if grad == "whole" else ("before",):
                for accumulate in ("local", "sharded") if strategy != "none" and grad == "microbatches" else (None,):
                    options = {} if accumulate is None else {"accumulate": accumulate, "blocks": (nn.Linear,)}
                    results[f"{strategy} {when} {grad} {accumulate}"] = train(strategy, when, grad, **options)
    return results


@pytest.mark.parametrize("world_size", [1, 2])
def test_hooks_see_the_gradient_of_the_whole_batch_once_a_step(ranks, world_size):
    for results in ranks(world_size).run(all_trainings):
        for case, (error, same_calls) in results.items():
            assert same_calls, case
            assert error <= 1e-12, (case, error)


def test_hooks_run_in_one_process_without_dtrain_hooks_left_behind():
    model, calls = make(), []
    handles = add_hooks(model, calls)
    step = compose_step(squares)
    state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1))
    state, _ = step(state, batch(0))
    (model(batch(0)).sum()).backward()  # outside of a step, torch calls the hooks as ever
    assert sorted(calls) == ["clip", "clip", "freeze", "freeze", "normalize", "normalize"]
    for handle in handles:
        handle.remove()
    calls.clear()
    step(state, batch(1))
    assert not calls


def run_once(handles: list, calls: list, grad: torch.Tensor) -> None:
    calls.append(list(grad.shape))
    handles[-1].remove()


def removed_and_added() -> list:
    results = []
    for strategy in strategies():
        model, calls = make(), []
        handles = add_hooks(model, calls)
        model = shard_model(model, mesh_for(strategy), strategy=strategy)
        step = compose_step(squares)
        state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for handle in handles:
            handle.remove()  # a handle from before shard_model
        once = []

        handles.append(model.out.weight.register_hook(partial(run_once, handles, once)))
        for index in range(2):
            state, _ = step(state, share(batch(index)))
        results.append([calls, once])
    return results


@pytest.mark.parametrize("world_size", [1, 2])
def test_handles_remove_hooks_before_and_during_a_step(ranks, world_size):
    for results in ranks(world_size).run(removed_and_added):
        assert results == [[[], [[2, 4]]]] * len(results)


def noisy() -> list:
    weights = []
    for strategy in strategies():
        model = make()
        model = shard_model(model, mesh_for(strategy), strategy=strategy)
        model.out.weight.register_hook(lambda grad: grad + torch.randn_like(grad))
        step = compose_step(squares)
        state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1))
        torch.manual_seed(get_dist_info().rank)
        for index in range(2):
            state, _ = step(state, share(batch(index)))
        weights.append(full_tensor(state.params["out.weight"].detach()).flatten().tolist())
    return weights


def test_noise_in_a_hook_is_equal_on_all_ranks_and_layouts(ranks):
    first, second = ranks(2).run(noisy)
    assert first == second
    for weights in first:
        torch.testing.assert_close(weights, first[0], rtol=1e-12, atol=1e-12)


def refused() -> dict:
    messages: dict = {}
    for strategy in strategies():
        for case in ("one rank alone", "wrong shape", "in backward"):
            model = shard_model(make(), mesh_for(strategy), strategy=strategy)
            if case != "one rank alone" or get_dist_info().rank == 0:
                model.out.weight.register_hook(lambda grad: grad[:1])
            step = (
                optimizer_in_backward(squares, batch_spec=batch_spec(weight=len))
                if case == "in backward"
                else compose_step(squares)
            )
            state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1))
            before = full_tensor(state.params["out.bias"].detach()).clone()
            try:
                step(state, share(batch(0)))
                messages[f"{strategy} {case}"] = "no error"
            except (StepError, ConfigError) as error:
                unchanged = torch.equal(before, full_tensor(model.out.bias.detach()))
                messages[f"{strategy} {case}"] = f"{error}" if unchanged else "the parameters changed"
    return messages


def test_hooks_that_cannot_run_are_refused_by_name(ranks):
    messages = {
        "one rank alone": "step: the gradient hooks of the parameter 'out.weight' must be equal on all ranks",
        "wrong shape": "microbatch_step: the hook of the parameter 'out.weight' must return None or a gradient of shape [2, 4]",
        "in backward": "optimizer_in_backward: the parameter 'out.weight' must have no gradient hook",
    }
    first, second = ranks(2).run(refused)
    assert first == second
    for case, line in first.items():
        assert messages[case.partition(" ")[2]] in line, (case, line)
        assert "\n" not in line


def cast_copies() -> list:
    grads = []
    for strategy in strategies():
        model, seen = make(torch.float32), []
        model.out.weight.register_hook(lambda grad, seen=seen: seen.append([str(grad.dtype), list(grad.shape)]))
        model = shard_model(model, mesh_for(strategy), strategy=strategy, precision=Precision(param="bf16", reduce="fp32"))
        step = compose_step(squares)
        state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1))
        step(state, share(batch(0)).float())
        grads.append(seen)
    return grads


def test_hook_sees_the_stored_dtype_under_a_cast(ranks):
    for grads in ranks(2).run(cast_copies):
        assert grads == [[["torch.float32", [2, 4]]]] * len(grads)


def local_backward() -> list:
    outcomes = []
    for strategy in strategies():
        model, calls = make(), []
        model = shard_model(model, mesh_for(strategy), strategy=strategy)
        model.out.weight.register_hook(lambda grad, calls=calls: calls.append(1))
        try:
            model(share(batch(0))).sum().backward()
            outcomes.append(f"called {len(calls)}")
        except StepError as error:
            outcomes.append(str(error))
    return outcomes


def test_backward_outside_of_a_step_runs_or_refuses_hooks(ranks):
    for *sharded, replicated in ranks(2).run(local_backward):
        assert replicated == "called 1"
        assert all("backward: the hook of the parameter 'out.weight' runs in a step only" in line for line in sharded), sharded


def test_copies_of_replicated_models_are_plain(ranks):
    assert ranks(2).run(copied) == [True, True]


def copied() -> bool:
    model = shard_model(make(), build_mesh(), strategy="replicate")
    model.out.weight.register_hook(lambda grad: grad)
    return not copy.deepcopy(model).out.weight._backward_hooks


def removed_within_a_step() -> dict:
    """Return how often a hook ran whose handle is removed in the forward or the backward of the second of three steps."""
    called = {}
    for strategy in [*strategies(), *(["none"] if get_dist_info().world_size == 1 else [])]:
        for where in ("forward", "backward"):
            model, calls, forwards = make(), [], []
            handles = [
                model.first.weight.register_hook(lambda grad, calls=calls: calls.append("before")),
                model.first.weight.register_post_accumulate_grad_hook(lambda param, calls=calls: calls.append("after")),
                model.first.weight.register_hook(lambda grad, calls=calls: calls.append("kept")),
            ]

            def remove(*_: object, handles: list = handles) -> None:
                for handle in handles[:2]:
                    handle.remove()

            def hook(module, args, output, where=where, forwards=forwards, remove=remove) -> None:
                forwards.append(1)
                if len(forwards) == 2:
                    remove() if where == "forward" else output.register_hook(remove)

            model.out.register_forward_hook(hook)
            if strategy != "none":
                model = shard_model(model, mesh_for(strategy), strategy=strategy)
            step = compose_step(squares)
            state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1))
            for index in range(3):
                state, _ = step(state, share(batch(index)))
            called[f"{strategy} {where}"] = sorted(calls)
    return called


@pytest.mark.parametrize("world_size", [1, 2])
def test_handle_removes_its_hook_during_a_forward_and_a_backward(ranks, world_size):
    for called in ranks(world_size).run(removed_within_a_step):
        assert called == {case: ["after", "before", "kept", "kept", "kept"] for case in called}


def test_hooks_come_back_if_the_start_of_a_step_fails(monkeypatch):
    def fail(*_: object) -> None:
        raise RuntimeError("no memory for the copies of buffers")

    model, calls = make(), []
    add_hooks(model, calls)
    step = compose_step(squares)
    state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with monkeypatch.context() as patch:
        patch.setattr("dtrain.shard.buffers.BufferSync.begin_step", fail)
        with pytest.raises(RuntimeError, match="no memory"):
            step(state, batch(0))
    model(batch(0)).sum().backward()
    assert sorted(calls) == ["clip", "freeze", "normalize"]
