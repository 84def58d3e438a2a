"""The step itself detects replicas that differ, on any rank; replicas that may differ are ignored."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel

import dtrain as dt
from dtrain.dist.dtensor import to_local
from dtrain.dist.init import get_dist_info
from dtrain.errors import ConfigError, DesyncError
from dtrain.testing import count_collectives, count_host_syncs
from shard.copies import ADAMW, begin, part


def trained(strategy, spoil=None, *, steps=3, transforms=(), interval=100, spoiled_step=1, tp=1, root=None, dtype=None):
    """Run some steps; ``spoil`` changes the parameters before the step ``spoiled_step``. Return the last step and the error."""
    info = get_dist_info()
    # The plan cuts one layer, and the other layer is whole along tp.
    plan = {"tp_plan": {"first": ColwiseParallel(output_layouts=Replicate())}} if tp > 1 else {}
    step, state = begin(list(transforms), strategy, ADAMW, tp=tp, **plan)
    state = step.init(state.model, state.optimizer, replica_check_every=interval)
    rank = state.spec.data_rank
    sizes = [8 // state.spec.data_ranks] * state.spec.data_ranks
    said = "nothing"
    try:
        while state.step < steps:
            if spoil is not None and state.step == spoiled_step:
                with torch.no_grad():
                    spoil(state, info.rank)
            state, _ = step(state, part(state.step, sizes, rank, rank + 1))
        if root is not None:
            dt.save_sharded(root, state)
    except DesyncError as error:
        said = str(error)
    return state.step, said


def add_on(ranks, name, value=1e-9):
    def spoil(state, rank):
        if rank in ranks:
            to_local(state.params[name]).view(-1)[:1].add_(value)

    return spoil


def cases_of_two(folder):
    """Each case of two ranks once, so that the processes start once."""

    def nan(state, rank):
        state.params["temperature"].fill_(float("nan"))

    def other_nan(state, rank):
        state.params["temperature"].fill_(-float("nan") if rank else float("nan"))

    return {
        "replicate": trained("replicate", add_on([1], "first.weight")),
        "full_shard, shard": trained("full_shard", add_on([1], "first.weight")),
        "full_shard, whole": trained("full_shard", add_on([1], "temperature")),
        "shard_grad_op, whole": trained("shard_grad_op", add_on([1], "temperature")),
        "hybrid_shard": trained("hybrid_shard", add_on([0], "last.weight")),
        "tp": trained("full_shard", add_on([1], "last.bias"), tp=2),
        "off": trained("replicate", add_on([1], "first.weight"), interval=0),
        "late": trained("replicate", add_on([1], "first.weight"), steps=9, spoiled_step=5, interval=7),
        "save": trained("replicate", add_on([1], "first.weight"), steps=6, spoiled_step=5, root=folder + "/a"),
        "save, off": trained("replicate", add_on([1], "first.weight"), steps=6, spoiled_step=5, interval=0, root=folder + "/b"),
        "equal": trained("replicate", add_on([0, 1], "first.weight"), steps=6, interval=1, root=folder + "/c"),
        "nan": trained("replicate", nan, steps=6, interval=1),
        "nan with two signs": trained("replicate", other_nan, steps=6, interval=1),
        "local": trained("replicate", transforms=[dt.transforms.local_sgd("2ba")], steps=4, interval=1),
    }


def test_replicas_that_differ_raise_in_the_next_step_or_at_the_save(ranks, tmp_path):
    for outcomes in ranks(2).run(cases_of_two, str(tmp_path)):
        text = "{}: step {}: '{}' must be equal on all ranks, got a different value on ranks [1] than on ranks [0]. "
        for case, caller, step, name in (
            ("replicate", "step", 1, "first.weight"),
            ("full_shard, whole", "step", 1, "temperature"),
            ("shard_grad_op, whole", "step", 1, "temperature"),
            ("hybrid_shard", "step", 1, "last.weight"),
            ("tp", "step", 1, "last.bias"),
            ("late", "step", 7, "first.weight"),
            ("save", "save_sharded", 6, "first.weight"),
        ):
            stopped, message = outcomes[case]
            assert message.startswith(text.format(caller, step, name)), case
            assert stopped == step, "the step that raises is not made"
        for case in ("full_shard, shard", "off", "save, off", "equal", "nan", "nan with two signs", "local"):
            assert outcomes[case][1] == "nothing", case
    assert not list((tmp_path / "a").glob("step*")), "a save that raises commits nothing"


def cases_of_four():
    return {
        **{f"replicate {spoiled}": trained("replicate", add_on(spoiled, "last.bias")) for spoiled in ([3], [2, 3], [1, 2])},
        "hybrid_shard": trained("hybrid_shard", add_on([3], "first.weight")),
        "hybrid_shard, whole": trained("hybrid_shard", add_on([1], "temperature")),
        "tp": trained("full_shard", add_on([3], "last.bias"), tp=2),
        "equal": trained("hybrid_shard", steps=6, interval=1),
        "tp, equal": trained("full_shard", steps=6, interval=1, tp=2),
    }


def test_four_ranks_name_the_ranks_that_differ(ranks):
    for outcomes in ranks(4).run(cases_of_four):
        for case, where in (
            (
                "replicate [3]",
                "'last.bias' must be equal on all ranks, got a different value on ranks [3] than on ranks [0, 1, 2]",
            ),
            ("replicate [2, 3]", "got a different value on ranks [2, 3] than on ranks [0, 1]"),
            ("replicate [1, 2]", "got a different value on ranks [1, 2] than on ranks [0, 3]"),
            ("hybrid_shard", "'first.weight' must be equal on all ranks, got a different value on ranks [3] than on ranks [1]"),
            ("hybrid_shard, whole", "'temperature' must be equal on all ranks, got a different value on ranks [1] than on"),
            ("tp", "'last.bias' must be equal on all ranks, got a different value on ranks [3] than on ranks [2]"),
        ):
            assert where in outcomes[case][1], (case, outcomes[case])
        assert outcomes["equal"] == outcomes["tp, equal"] == [6, "nothing"]


def costs():
    step, state = begin([], "replicate", ADAMW)
    seen = []
    for _ in range(6):
        with count_host_syncs() as waits, count_collectives() as exchanges:
            state, _ = step(state, part(0, [4, 4], get_dist_info().rank, get_dist_info().rank + 1))
        seen.append((waits.count, exchanges.count(group="control")))
    return seen


def test_the_comparison_adds_no_wait_and_no_exchange(ranks):
    """Steps 3 and 4 differ only by the comparison: the first four steps of a run compare."""
    for seen in ranks(2).run(costs):
        assert seen[3] == seen[4] == seen[5]


def test_a_negative_interval_is_refused():
    model = nn.Linear(1, 1)
    step = dt.compose_step(dt.mean_loss(lambda model, x: model(x).mean(), weight=len))
    with pytest.raises(ConfigError, match=r"init: replica_check_every must be .*, got -1"):
        step.init(model, torch.optim.SGD(model.parameters(), lr=0.1), replica_check_every=-1)


class Quantized(torch.Tensor):
    """A weight of 8 bits with a scale, which knows few operations, as the weights of packages for quantization are."""

    @staticmethod
    def __new__(cls, codes, scale):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype, device=codes.device)

    def __init__(self, codes, scale):
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self):
        return ["codes", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        aten, (weight, *others) = torch.ops.aten, args
        if func in (aten.detach.default, aten.clone.default):
            return Quantized(func(weight.codes), func(weight.scale))
        if func is aten.copy_.default and isinstance(others[0], Quantized):
            weight.codes.copy_(others[0].codes), weight.scale.copy_(others[0].scale)
            return weight
        if func is aten.mul.Tensor:
            return weight.codes * weight.scale * others[0]
        raise NotImplementedError(f"{func} of Quantized")


class WithQuantized(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.scales = nn.Parameter(torch.arange(3.0), requires_grad=False)

    def forward(self, x):
        return self.inner(x) + self.scales * 2.0


def trained_with_wrapped_weights(spoil):
    model = dt.shard_model(WithQuantized(), dt.build_mesh(), strategy="replicate")
    codes = torch.arange(3, dtype=torch.int8)
    model.scales = nn.Parameter(Quantized(codes, torch.tensor(0.5)), requires_grad=False)
    step = dt.compose_step(dt.mean_loss(lambda model, x: model(x).square().mean(), weight=len))
    trainable = [param for param in model.parameters() if param.requires_grad]
    state = step.init(model, torch.optim.SGD(trainable, lr=0.1), replica_check_every=1)
    said = "nothing"
    try:
        for _ in range(3):
            state, _ = step(state, torch.ones(2, 3))
            if spoil:
                with torch.no_grad():
                    model.inner.bias.add_(get_dist_info().rank)
    except DesyncError as error:
        said = str(error)
    return state.step, said


def wrapped_and_spoiled():
    return [trained_with_wrapped_weights(spoil) for spoil in (False, True)]


def test_weights_that_wrap_other_tensors_are_left_out_and_the_others_compared(ranks):
    for fine, spoiled in ranks(2).run(wrapped_and_spoiled):
        assert tuple(fine) == (3, "nothing")
        assert spoiled[0] == 1
        assert spoiled[1].startswith("step: step 1: 'inner.bias' must be equal on all ranks")
