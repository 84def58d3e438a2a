"""The update on local shards: the bits and the state of an update of DTensors."""

from functools import partial

import pytest
import torch
from torch import nn

from dtrain.dist.dtensor import full_tensor, is_dtensor, is_placed_like, to_local
from dtrain.dist.mesh import build_mesh
from dtrain.optim.decoupled import DecoupledAdamW, DecoupledSGDW
from dtrain.shard.fsdp import shard_model
from dtrain.step.optimizer import step_optimizer

STEPS = 3
LATE = "0.bias"  # gets its first gradient in the second step
OPTIMIZERS = {
    "Adadelta": partial(torch.optim.Adadelta, lr=0.1),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.1, lr_decay=0.1),
    "Adam, amsgrad": partial(torch.optim.Adam, lr=0.1, amsgrad=True),
    "AdamW": partial(torch.optim.AdamW, lr=0.1),
    "AdamW, foreach": partial(torch.optim.AdamW, lr=0.1, foreach=True),
    "AdamW, fused": partial(torch.optim.AdamW, lr=0.1, fused=True),
    "AdamW, maximize": partial(torch.optim.AdamW, lr=0.1, maximize=True),
    "Adamax": partial(torch.optim.Adamax, lr=0.1),
    "ASGD": partial(torch.optim.ASGD, lr=0.1, t0=1),
    "NAdam": partial(torch.optim.NAdam, lr=0.1),
    "RAdam": partial(torch.optim.RAdam, lr=0.1),
    "RMSprop": partial(torch.optim.RMSprop, lr=0.1, momentum=0.9, centered=True),
    "SGD": partial(torch.optim.SGD, lr=0.1),
    "SGD, momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "DecoupledAdamW": partial(DecoupledAdamW, lr=0.1),
    "DecoupledSGDW": partial(DecoupledSGDW, lr=0.1, momentum=0.9, weight_decay=0.1),
}


def sharded():
    """A model of which a rank of two has an empty shard, on one mesh."""
    torch.manual_seed(0)
    return shard_model(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1)), build_mesh(), strategy="full_shard")


def groups(model):
    params = dict(model.named_parameters())
    return [{"params": [p for name, p in params.items() if "weight" in name]}, {"params": [params["0.bias"], params["1.bias"]]}]


def set_gradients(model, step):
    draw = torch.Generator().manual_seed(step)
    for name, param in model.named_parameters():
        whole = torch.randn(param.shape, generator=draw)
        mesh, placements = param.device_mesh, param.placements
        grad = torch.distributed.tensor.distribute_tensor(whole, mesh, placements)
        param.grad = None if name == LATE and step == 0 else grad


def differences(name):
    """Return the names of values that differ after a few steps of one optimizer, on DTensors and on shards."""
    models = [sharded(), sharded()]
    optimizers = [OPTIMIZERS[name](groups(model)) for model in models]
    paths = []
    for step in range(STEPS):
        for model, optimizer, update in zip(models, optimizers, (lambda o: o.step(), step_optimizer), strict=True):
            set_gradients(model, step)
            update(optimizer)
        paths += [
            f"params of group {i}" for i, g in enumerate(optimizers[1].param_groups) if not all(map(is_dtensor, g["params"]))
        ]
    pairs = zip(*(model.named_parameters() for model in models), strict=True)
    for (path, a), (_, b) in pairs:
        mine, other = optimizers[1].state[b], optimizers[0].state[a]
        if not torch.equal(to_local(a), to_local(b)):
            paths.append(path)
        if list(mine) != list(other):
            paths.append(f"{path}: {list(mine)} for {list(other)}")
        paths += [f"{path} {key}" for key in other if not same(mine[key], other[key])]
    return paths + [key for key in optimizers[0].param_groups[0] if key != "params" and differs(optimizers, key)]


def differs(optimizers, key):
    return optimizers[0].param_groups[0][key] != optimizers[1].param_groups[0][key]


def same(a, b):
    if not isinstance(b, torch.Tensor):
        return a == b
    return is_placed_like(a, b) and a.dtype == b.dtype and torch.equal(to_local(a), to_local(b))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_shards_get_the_bits_and_the_state_of_dtensors(ranks, name):
    assert ranks(2).run(differences, name) == [[], []]


def rprop_on_shards():
    model, plain = sharded(), nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))
    plain.load_state_dict({name: full_tensor(param) for name, param in model.named_parameters()})
    optimizers = torch.optim.Rprop(groups(model), lr=0.1), torch.optim.Rprop(groups(plain), lr=0.1)
    for step in range(STEPS):
        set_gradients(model, step)
        for own, param in zip(plain.parameters(), model.parameters(), strict=True):
            own.grad = None if param.grad is None else full_tensor(param.grad)
        step_optimizer(optimizers[0])
        optimizers[1].step()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    return [torch.equal(full_tensor(a), b) for a, b in pairs]


def test_rprop_runs_on_shards_though_not_on_dtensors(ranks):
    assert ranks(2).run(rprop_on_shards) == [[True] * 4] * 2


class Spy(torch.optim.SGD):
    """Counts the DTensors among the parameters that its ``step`` sees."""

    seen: list[int]

    def step(self, closure=None):
        self.seen = [sum(map(is_dtensor, group["params"])) for group in self.param_groups]


class Elementwise(Spy):
    updates_elementwise = True


def hooked(optimizer):
    optimizer.register_step_pre_hook(lambda *args: None)


def replaced(optimizer):
    optimizer.step = partial(type(optimizer).step, optimizer)


def scheduled(optimizer):
    torch.optim.lr_scheduler.StepLR(optimizer, 1)


def differentiable(optimizer):
    optimizer.param_groups[0]["differentiable"] = True


def placed_otherwise(optimizer):
    param = optimizer.param_groups[0]["params"][0]
    param.grad = param.grad.redistribute(placements=[torch.distributed.tensor.Replicate()])


def unchanged(optimizer):
    pass


class Inherited(Elementwise):
    pass


CASES = {  # the optimizer, the edit of it, and the DTensors that it sees in each of its two groups
    "elementwise": (Elementwise, unchanged, [0, 0]),
    "with a scheduler of torch": (Elementwise, scheduled, [0, 0]),
    "of another class": (Spy, unchanged, [2, 2]),
    "of a subclass": (Inherited, unchanged, [2, 2]),
    "with a hook": (Elementwise, hooked, [2, 2]),
    "with another step": (Elementwise, replaced, [2, 2]),
    "differentiable": (Elementwise, differentiable, [2, 2]),
    "a gradient on other ranks": (Elementwise, placed_otherwise, [2, 2]),
}


def seen_dtensors(case):
    kind, change, _ = CASES[case]
    model = sharded()
    set_gradients(model, 1)
    optimizer = kind(groups(model), lr=0.1)
    change(optimizer)
    step_optimizer(optimizer)
    return optimizer.seen


@pytest.mark.parametrize("case", CASES)
def test_only_a_known_elementwise_update_runs_on_shards(ranks, case):
    assert ranks(2).run(seen_dtensors, case) == [CASES[case][2]] * 2


class Failing(Elementwise):
    updates_elementwise = True

    def step(self, closure=None):
        self.state[self.param_groups[0]["params"][0]]["new"] = 1
        raise RuntimeError("no")


def state_after_a_failure():
    model = sharded()
    set_gradients(model, 1)
    optimizer = Failing(groups(model), lr=0.1)
    with pytest.raises(RuntimeError, match="no"):
        step_optimizer(optimizer)
    plain = [param for group in optimizer.param_groups for param in group["params"] if not is_dtensor(param)]
    return len(plain), dict(optimizer.state), optimizer.param_groups[0]["foreach"]


def test_an_error_puts_the_parameters_back(ranks):
    assert ranks(2).run(state_after_a_failure) == [[0, {}, None]] * 2


def seen_beside_a_replicated_model():
    replicated = shard_model(nn.Linear(3, 5), build_mesh(), strategy="replicate")
    model = sharded()
    set_gradients(model, 1)
    optimizer = Elementwise([*groups(model), {"params": list(replicated.parameters())}], lr=0.1)
    step_optimizer(optimizer)
    return optimizer.seen


def test_a_replicated_model_in_the_process_changes_nothing(ranks):
    assert ranks(2).run(seen_beside_a_replicated_model) == [[0, 0, 0]] * 2
