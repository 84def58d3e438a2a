"""Modules that ordinary PyTorch takes around FSDP2: hooks, outputs of any kind, strided weights, sparse gradients."""

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel

from dtrain.dist.dtensor import full_tensor
from dtrain.dist.init import get_dist_info
from dtrain.dist.mesh import build_mesh
from dtrain.errors import StepError
from dtrain.shard.fsdp import shard_model
from dtrain.step.compose import compose_step
from dtrain.step.microbatch_step import microbatch_step
from dtrain.transforms.gradients.clipping import clip_by_norm
from dtrain.typing import LossSum
from shard.models import as_in_a_step
from shard.test_param_objects import mesh_for, strategies

STEPS = 2


class Box:
    """A plain object around a tensor."""

    def __init__(self, hidden: Any) -> None:
        self.hidden = hidden


class Slotted:
    """A plain object without a dictionary."""

    __slots__ = ("hidden",)

    def __init__(self, hidden: Any) -> None:
        self.hidden = hidden


class Node:
    """One of several objects that all refer to each other."""

    def __init__(self, hidden: Any) -> None:
        self.hidden, self.others = hidden, list[Any]()


def linked(y: torch.Tensor) -> Node:
    nodes = [Node(y if index == 0 else index) for index in range(8)]
    for node in nodes:
        node.others = nodes
        vars(node).update({f"link{index}": other for index, other in enumerate(nodes)})
    return nodes[0]


class Cache:
    """A value that travels through the blocks, and collects the output of each."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden, self.past = hidden, list[torch.Tensor]()

    def add(self, hidden: torch.Tensor) -> Any:
        self.hidden = hidden
        self.past.append(hidden * 2)
        return self


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.inner = kind, nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, cache: Cache | None = None) -> Any:
        y = self.inner(torch.tanh(x))
        if cache is not None:
            return cache.add(y)
        if self.kind == "siblings":
            return y[:, :1], y[:, 1:]
        results = {
            "linked": linked,
            "box": Box,
            "slots": Slotted,
            "nested": lambda y: Box({"a": [Box(y)]}),
            "pair": lambda y: (y, x.view(-1)),
        }
        return results.get(self.kind, lambda y: y.view(-1, 4))(y)


def unpack(value: Any) -> torch.Tensor:
    while not isinstance(value, torch.Tensor):
        value = getattr(value, "hidden", value)
        value = value["a"] if isinstance(value, dict) else value[0] if isinstance(value, list | tuple) else value
    return value


class Net(nn.Module):
    """Two blocks; the rest depends on ``kind``."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.first, self.second, self.head = kind, Block(kind), Block(kind), nn.Linear(4, 4)
        if kind == "transposed":
            self.head.weight = nn.Parameter(self.head.weight.detach().t())
        elif kind == "images":
            self.conv = nn.Conv2d(2, 2, 2).to(memory_format=torch.channels_last)
        elif kind == "hooks":
            self.first.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 2,))
            self.second.register_forward_hook(lambda module, inputs, output: output * module.inner.weight.sum())
            self.second.register_full_backward_hook(lambda module, grads, outputs: (grads[0] * 3,))
            self.second.register_full_backward_pre_hook(lambda module, outputs: (outputs[0] * 0.5,))
            self.head.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 2,))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "images":
            x = x + self.conv(x.view(-1, 2, 2, 1).expand(-1, -1, -1, 2)).sum((1, 2, 3))[:, None]
        if self.kind == "cache":
            cache = self.first(x, Cache(x))
            cache = self.second(cache.hidden, cache)
            return self.head(cache.hidden + sum(cache.past))
        if self.kind == "siblings":
            for block in (self.first, self.second):
                left, right = block(x)
                left += 1
                right *= 2
                x = torch.cat((left, right), -1)
            return self.head(x)
        x = unpack(self.first(x))
        if self.kind == "changed view":
            x += 1
            x *= 2
        x = unpack(self.second(x))
        y = self.head(x).view(-1, 2)
        if self.kind == "changed view":
            y -= 1
        return y


KINDS = (
    "view",
    "changed view",
    "box",
    "slots",
    "nested",
    "pair",
    "linked",
    "cache",
    "siblings",
    "transposed",
    "images",
    "hooks",
)


def squares(model: nn.Module, x: torch.Tensor) -> LossSum:
    y = model(x)
    if model.kind == "changed view":
        y *= 2
    return LossSum(total=y.square().sum(), weight=len(x))


def make(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return Net(kind).double()


def whole() -> torch.Tensor:
    return torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def one_process(kind: str) -> dict:
    model = make(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    for _ in range(STEPS):
        loss = squares(model, whole())
        (loss.total / loss.weight).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


def errors() -> dict:
    info, largest = get_dist_info(), {}
    size = 8 // info.world_size
    for kind in KINDS:
        expected = one_process(kind)
        for strategy in strategies():
            for microbatch_size in (None, 2) if strategy == "full_shard" else (2,):
                model = shard_model(make(kind), mesh_for(strategy), strategy=strategy, blocks=(Block,))
                step = compose_step(squares, grad=partial(microbatch_step, microbatch_size=microbatch_size))
                state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.001))
                for _ in range(STEPS):
                    state, _ = step(state, whole()[info.rank * size :][:size])
                pairs = ((full_tensor(p.detach()), expected[name]) for name, p in state.params.items())
                largest[f"{kind} {strategy} {microbatch_size}"] = max((a - b).abs().max().item() for a, b in pairs)
    return largest


@pytest.mark.costly
@pytest.mark.parametrize("world_size", [1, 2])
def test_unusual_modules_train_as_in_one_process(ranks, world_size):
    for largest in ranks(world_size).run(errors):
        assert {case: error for case, error in largest.items() if not error <= 1e-12} == {}


def gathers_with_cache() -> list[int]:
    """Return the numbers of all-gathers of a forward and a backward, with and without a cache."""
    totals = []
    for kind in ("cache", "box"):
        model = shard_model(make(kind), mesh_for("full_shard"), strategy="full_shard", blocks=(Block,))
        with CommDebugMode() as counts, as_in_a_step(model):
            model(whole()).sum().backward()
        totals.append(sum(n for name, n in counts.get_comm_counts().items() if "gather" in str(name)))
    return totals


def test_tensors_of_earlier_units_in_a_cache_gather_no_later_unit_again(ranks):
    for with_cache, without in ranks(2).run(gathers_with_cache):
        assert with_cache == without > 0


class Halves(nn.Module):
    """Returns two views of one tensor, as the encoder of a VAE does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.inner(x).chunk(2, -1)


class Root(nn.Module):
    """Owns no parameters outside of its block, and returns views."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Halves()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mu, log_variance = self.encoder(x)
        return (mu + log_variance.exp()).view(-1, 2)


def warnings_about_views() -> list[str]:
    model = shard_model(Root(), mesh_for("full_shard"), strategy="full_shard", blocks=(Halves,))
    with warnings.catch_warnings(record=True) as caught, as_in_a_step(model):
        warnings.simplefilter("always")
        model(whole().float()).sum().backward()
    return [str(warning.message) for warning in caught if "view" in str(warning.message)]


@pytest.mark.parametrize("world_size", [1, 2])
def test_views_warn_of_nothing(ranks, world_size):
    assert ranks(world_size).run(warnings_about_views) == [[]] * world_size


def strides_after_sharding() -> list:
    strides = []
    for ignored in ((), ("head.weight",)):
        model = shard_model(make("transposed"), mesh_for("full_shard"), strategy="full_shard", ignored_params=ignored)
        strides.append(list(model.head.weight.stride()))
    return strides


def test_ignored_parameter_keeps_its_strides(ranks):
    assert ranks(1).run(strides_after_sharding) == [[[4, 1], [1, 4]]]


def state_dict_hooks() -> list:
    called = []
    for strategy in strategies():
        model, calls = make("view"), []
        model.register_state_dict_pre_hook(lambda *_, calls=calls: calls.append("before save"))
        model.register_state_dict_post_hook(lambda module, state, *_: state.update(extra=torch.ones(1)))
        model.register_load_state_dict_pre_hook(lambda module, state, *_: state.pop("extra"))
        model.register_load_state_dict_post_hook(lambda *_, calls=calls: calls.append("after load"))
        model = shard_model(model, mesh_for(strategy), strategy=strategy, blocks=(Block,))
        model.load_state_dict(model.state_dict())
        called.append(calls)
    return called


def test_state_dict_hooks_run_around_units(ranks):
    for called in ranks(2).run(state_dict_hooks):
        assert called == [["before save", "after load"]] * len(called)


class Sparse(nn.Module):
    """Asks for sparse gradients without saying so in a module."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(6, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(x, self.table, sparse=True)


class Outside(nn.Module):
    """Uses the weight of a block outside of the block."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block("view")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(self.block(x.float()), self.block.inner.weight)


def plain_squares(model: nn.Module, x: torch.Tensor) -> LossSum:
    return LossSum(total=model(x).square().sum(), weight=len(x))


USED_OUTSIDE = "must not compute with a sharded parameter outside of the forward of its unit"
REFUSED: dict = {
    "sparse": (Sparse, plain_squares, "step: the gradient of the parameter 'table' must be dense, got torch.sparse_coo"),
    "outside": (Outside, plain_squares, USED_OUTSIDE),
}


def refusals() -> dict:
    messages = {}
    for case, (kind, loss, _) in REFUSED.items():
        for strategy in strategies():
            model = shard_model(kind(), mesh_for(strategy), strategy=strategy, blocks=(Block,) if case == "outside" else ())
            step = compose_step(loss)
            state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1))
            try:
                step(state, torch.tensor([[0, 1, 2, 3]]))
                messages[f"{case} {strategy}"] = "no error"
            except StepError as error:
                messages[f"{case} {strategy}"] = str(error)
    return messages


def test_clipping_of_a_sparse_gradient_is_refused_by_name_in_one_process():
    model = Sparse()
    step = compose_step(plain_squares, [clip_by_norm(1.0)])
    state = step.init(model, torch.optim.SparseAdam(model.parameters(), lr=0.1))
    message = "the gradient of the parameter 'table' must be dense, got torch.sparse_coo, because torch has no norm"
    with pytest.raises(StepError, match=message):
        step(state, torch.tensor([[0, 1]]))


@pytest.mark.parametrize("world_size", [1, 2])
def test_use_of_a_parameter_that_units_cannot_serve_is_one_line(ranks, world_size):
    for messages in ranks(world_size).run(refusals):
        for case, line in messages.items():
            name, strategy = case.split()
            # Plain parameters, or parameters that stay gathered from the forward on, can be used anywhere.
            fine = strategy == "replicate" and not (name == "sparse" and world_size > 1)
            fine |= name == "outside" and strategy == "shard_grad_op"
            assert (line == "no error") if fine else (REFUSED[name][2] in line and "\n" not in line), (case, line)
            assert fine or name == "sparse" or " torch says: RuntimeError: " in line, (case, line)


def mixes_tensors(model: nn.Module, x: torch.Tensor) -> LossSum:
    return LossSum(total=(model.inner.weight * torch.ones(model.inner.weight.shape)).sum(), weight=len(x))


def error_of_tensor_parallelism() -> str:
    plan = {"inner": ColwiseParallel(output_layouts=Replicate())}
    model = shard_model(Block("view"), build_mesh(tp=2), strategy="full_shard", tp_plan=plan)
    step = compose_step(mixes_tensors)
    state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1, foreach=False))
    with pytest.raises(RuntimeError) as raised:
        step(state, torch.tensor([[0, 1, 2, 3]]))
    return str(raised.value)


def test_an_error_of_dtensors_under_tensor_parallelism_is_not_explained_by_sharding(ranks):
    for line in ranks(2).run(error_of_tensor_parallelism):
        assert "DTensor" in line
        assert USED_OUTSIDE not in line
