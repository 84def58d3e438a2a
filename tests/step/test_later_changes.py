"""Parameters, options and loops that change after ``step.init``: as in plain torch, or one line that names the change."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

import dtrain as dt
from dtrain.dist.init import get_dist_info
from dtrain.errors import DtrainError

STRATEGIES = ("none", "full_shard", "shard_grad_op", "replicate")
Change = Callable[[nn.Module, torch.optim.Optimizer], object]


def squares(model: nn.Module, x: torch.Tensor) -> dt.LossSum:
    return dt.LossSum(total=model(x).square().sum(), weight=len(x))


STEP = dt.compose_step(squares)


def batch_of(step: int) -> torch.Tensor:
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(step)) + get_dist_info().rank


def begun(strategy: str) -> dt.TrainState:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ModuleList([nn.Linear(4, 4)])[0], nn.Linear(4, 1))
    if strategy != "none":
        model = dt.shard_model(model, dt.build_mesh(), strategy=strategy, blocks=(nn.Linear,))
    return STEP.init(model, torch.optim.SGD(model.parameters(), lr=0.1))


def layouts() -> list[str]:
    return [strategy for strategy in STRATEGIES if strategy != "none" or get_dist_info().world_size == 1]


def told(call: Callable[[], object]) -> str:
    try:
        call()
    except DtrainError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


# Parameters


def append(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.append(nn.Linear(1, 1))
    optimizer.add_param_group({"params": list(model[-1].parameters())})


def append_untrained(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.append(nn.Linear(1, 1))


def optimize_another(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})


def replace_head(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model[2] = nn.Linear(4, 1)


def replace_head_and_train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    replace_head(model, optimizer)
    optimizer.param_groups[0]["params"] = list(model.parameters())


def append_frozen(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.append(nn.Linear(1, 1).requires_grad_(False))


def replace_weight(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model[2].weight = nn.Parameter(torch.zeros(1, 4))


IN_A_STEP: dict[str, tuple[Change, str]] = {
    "appended, and in the optimizer": (append, "the parameter '3.weight' was added to the optimizer"),
    "appended": (append_untrained, "the parameter '3.weight' was added to the model"),
    "in the optimizer only": (optimize_another, "the parameter of shape (3,) was added to the optimizer"),
    "head replaced": (replace_head, "the parameter '2.weight' was replaced"),
    "head replaced, and in the optimizer": (replace_head_and_train, "the parameter '2.weight' was added to the optimizer"),
}
# A frozen parameter changes no step, and one assignment in a module is looked for in some steps.
IN_A_SAVE = {
    **IN_A_STEP,
    "frozen": (append_frozen, "the parameter '3.weight' was added to the model"),
    "weight replaced": (replace_weight, "the parameter '2.weight' was replaced"),
}


def later_steps(cases: list[str]) -> list[str]:
    wrong = []
    for strategy in layouts():
        for case in cases:
            change, expected = IN_A_STEP[case]
            state = begun(strategy)
            # After the first step, in which all parameters are compared.
            for number in range(2):
                state, _ = STEP(state, batch_of(number))
            change(state.model, state.optimizer)
            line = told(lambda state=state: STEP(state, batch_of(2)))
            if not line.startswith(f"StepError: step: {expected} after step.init") or "\n" in line:
                wrong.append(f"{strategy}, {case}: {line}")
    return wrong


@pytest.mark.parametrize("world", [1, 2])
def test_a_step_refuses_parameters_added_after_init(ranks, world):
    assert ranks(world).run(later_steps, list(IN_A_STEP)) == [[]] * world


def later_saves(root: str, cases: list[str]) -> list[str]:
    wrong = []
    for strategy in layouts():
        for case in cases:
            change, expected = IN_A_SAVE[case]
            state, _ = STEP(begun(strategy), batch_of(0))
            change(state.model, state.optimizer)
            line = told(lambda state=state: dt.save_sharded(root, state))
            if not line.startswith(f"StepError: save_sharded: {expected} after step.init") or "\n" in line:
                wrong.append(f"{strategy}, {case}: {line}")
    return wrong


@pytest.mark.parametrize("world", [1, 2])
def test_a_save_refuses_parameters_added_after_init(ranks, world, tmp_path):
    assert ranks(world).run(later_saves, str(tmp_path / "ckpt"), list(IN_A_SAVE)) == [[]] * world
    assert not (tmp_path / "ckpt").exists() or not list((tmp_path / "ckpt").glob("step*"))


def test_an_update_by_hand_refuses_parameters_added_after_init():
    for change, expected in IN_A_STEP.values():
        state = begun("none")
        change(state.model, state.optimizer)
        state.model[0](batch_of(0)).sum().backward()
        with pytest.raises(dt.errors.StepError, match=r"after step\.init") as error:
            dt.apply_gradients(state, {})
        assert expected in str(error.value)


def test_changes_without_new_parameters_train_on(tmp_path):
    state = begun("none")
    for number in range(6):
        state, _ = STEP(state, batch_of(number))
    weight = state.model[0].weight
    state.model[1] = nn.Identity()
    torch.nn.utils.parametrize.register_parametrization(state.model[0], "weight", nn.Identity())
    before = weight.clone()
    state, _ = STEP(state, batch_of(6))
    state, _ = STEP(state, batch_of(7))
    assert not torch.equal(weight, before)
    dt.save_sharded(tmp_path, state)


def gathered_copies(root: str) -> list[str]:
    lines = []
    for strategy in layouts():
        state = begun(strategy)
        for number in range(6):
            with torch.no_grad():
                state.model(batch_of(number))
            state, _ = STEP(state, batch_of(number))
        with torch.no_grad():
            state.model(batch_of(6))
        lines.append(told(lambda state=state, strategy=strategy: dt.save_sharded(f"{root}/{strategy}", state)))
    return lines


@pytest.mark.parametrize("world", [1, 2])
def test_unsharded_copies_of_a_forward_are_not_new_parameters(ranks, world, tmp_path):
    for lines in ranks(world).run(gathered_copies, str(tmp_path)):
        assert set(lines) == {"nothing"}


# Options


def options_by_rank() -> list[str]:
    lines = []
    for strategy in ("full_shard", "replicate"):
        state = begun(strategy)
        before = [param.full_tensor() if hasattr(param, "full_tensor") else param.clone() for param in state.params.values()]
        state.optimizer.param_groups[0]["lr"] += 0.5 * get_dist_info().rank
        lines.append(told(lambda state=state: STEP(state, batch_of(0))))
        after = [param.full_tensor() if hasattr(param, "full_tensor") else param for param in state.params.values()]
        assert all(map(torch.equal, before, after))
        state.optimizer.param_groups[0]["lr"] = 0.1
        state, _ = STEP(state, batch_of(0))
        state.optimizer.param_groups[0]["momentum"] = 0.5 if get_dist_info().rank else 0.9
        lines.append(told(lambda state=state: STEP(state, batch_of(1))))
        # The default may differ: it chooses the implementation.
        state.optimizer.param_groups[0].update(momentum=0.0, foreach=bool(get_dist_info().rank))
        state, _ = STEP(state, batch_of(1))
        # Only the first update compares an option that is no number.
        state = begun(strategy)
        state.optimizer.param_groups[0]["form"] = f"form {get_dist_info().rank}"
        lines.append(told(lambda state=state: STEP(state, batch_of(0))))
    return lines


def test_options_that_differ_between_ranks_are_refused_before_the_update(ranks):
    first, second = ranks(2).run(options_by_rank)
    assert first == second
    expected = 2 * [
        "'lr' of group 0 of SGD|0.1 on ranks [0] and 0.6 on",
        "'momentum' of group 0 of SGD|0.9 on",
        "'form' of group 0",
    ]
    for line, (option, _, values) in zip(first, [text.partition("|") for text in expected], strict=True):
        assert line.startswith("DesyncError: ")
        assert f"the option {option}" in line
        assert f"must be equal on all ranks, got {values}" in line
        assert "dt.reduce_metrics" in line
        assert "MatrixOptimizer" not in line
        assert "\n" not in line


# Parameters of the loss


def test_parameters_of_another_state_and_of_frozen_models_do_not_warn():
    critic, generator = nn.Linear(4, 1), nn.Linear(4, 4)
    teacher = nn.Linear(4, 4).requires_grad_(False)

    def fool(model: nn.Module, x: torch.Tensor) -> dt.LossSum:
        out = model(x)
        return dt.sum_loss(critic(out)[:, 0] + (out - teacher(x)).square().mean(-1))

    step = dt.compose_step(fool)
    state = step.init(generator, torch.optim.SGD(generator.parameters(), lr=0.1))
    with pytest.warns(UserWarning, match=r"the loss reaches 2 trainable parameters of no state"):
        step(state, batch_of(0))
    generator = nn.Linear(4, 4)
    other = STEP.init(critic, torch.optim.SGD(critic.parameters(), lr=0.1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(step.init(generator, torch.optim.SGD(generator.parameters(), lr=0.1)), batch_of(0))
    assert other.step == 0
