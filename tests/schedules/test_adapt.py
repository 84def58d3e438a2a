import pytest
import torch

from dtrain.errors import ConfigError
from dtrain.schedules.combine import to_lambda_lr
from dtrain.schedules.curves import constant, cosine, linear
from dtrain.schedules.hyperparameter import with_unit
from dtrain.schedules.phases import warmup


def optimizer_of(*rates):
    return torch.optim.SGD([{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates])


def run(scheduler, optimizer, steps):
    found = []
    for _ in range(steps):
        found.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    return found


def test_lambda_lr_gives_each_step_its_own_lr():
    schedule, optimizer = warmup(cosine(1.0, 0.1, 30), 5), optimizer_of(0.5)
    assert run(to_lambda_lr(schedule, optimizer), optimizer, 40) == [[0.5 * schedule(t)] for t in range(40)]


def test_groups_keep_their_lr_and_may_have_separate_schedules():
    optimizer = optimizer_of(1.0, 0.1)
    found = run(to_lambda_lr([linear(1.0, 0.0, 4), constant(0.5)], optimizer), optimizer, 4)
    assert found == [[1.0, 0.05], [0.75, 0.05], [0.5, 0.05], [0.25, 0.05]]


@pytest.mark.parametrize("schedule", [linear(1.0, 0.0, 10), with_unit("ba", linear(1.0, 0.0, 10))], ids=["plain", "of steps"])
def test_lambda_lr_resumes_from_its_state(schedule):
    optimizer = optimizer_of(1.0)
    scheduler = to_lambda_lr(schedule, optimizer)
    run(scheduler, optimizer, 3)
    saved, other = scheduler.state_dict(), optimizer_of(1.0)
    other.load_state_dict(optimizer.state_dict())
    resumed = to_lambda_lr(schedule, other)
    resumed.load_state_dict(saved)
    other.load_state_dict(optimizer.state_dict())
    assert run(resumed, other, 3) == run(scheduler, optimizer, 3) == [[0.7], [0.6], [0.5]]


def test_to_lambda_lr_refuses_schedules_not_counted_in_steps():
    with pytest.raises(
        ConfigError,
        match=r"to_lambda_lr: schedule must be a function of steps, got a schedule of tok\. Use dt\.transforms\.scale_lr",
    ):
        to_lambda_lr(with_unit("tok", constant(1.0)), optimizer_of(1.0))


def test_to_lambda_lr_requires_one_schedule_per_group():
    with pytest.raises(ConfigError, match="to_lambda_lr: schedule must have one entry per parameter group, got 1 for 2"):
        to_lambda_lr([constant(1.0)], optimizer_of(1.0, 1.0))
    with pytest.raises(ConfigError, match="to_lambda_lr: schedule must be a function of a number"):
        to_lambda_lr([0.5], optimizer_of(1.0))
