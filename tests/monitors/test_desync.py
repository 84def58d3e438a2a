"""Replicas that differ are detected, for every tensor and every rank; and hashes of bits."""

import random

import numpy as np
import pytest
import torch
from torch import nn

import dtrain as dt
from dtrain import spans
from dtrain.dist.dtensor import to_local
from dtrain.dist.init import get_dist_info
from dtrain.dist.rng import seed_all
from dtrain.errors import ConfigError, DesyncError, StaleStateError
from dtrain.monitors.desync import check_desync
from dtrain.shard import replica_check
from dtrain.shard.replica_check import hash_tensors
from dtrain.testing import count_host_syncs
from dtrain.transforms.weights.averaging import ema
from shard.copies import ADAMW, begin, part

CPU = torch.device("cpu")
ALL = ("params", "buffers", "optimizer", "transform_states", "rng", "position")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int16, torch.uint8, torch.bool,
          torch.complex64, torch.float8_e4m3fn)  # fmt: skip


def hash_of(tensor):
    return hash_tensors([tensor], CPU).item()


def flip(tensor, index=0, bit=0):
    """One bit of one element. Mutates: ``tensor``."""
    words = (
        tensor.detach().view(-1).view({8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[tensor.element_size()])
    )
    words[index] ^= torch.tensor(1 << bit if bit < 8 * tensor.element_size() - 1 else -(1 << bit), dtype=torch.int64).to(
        words.dtype
    )


# ---- hashes -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d not in (torch.bool, torch.complex64)], ids=str)
def test_hash_depends_on_every_bit(dtype):
    tensor = torch.arange(3).to(dtype)
    before, seen = hash_of(tensor), set()
    for index in range(3):
        for bit in range(8 * tensor.element_size()):
            flip(tensor, index, bit)
            seen.add(hash_of(tensor))
            flip(tensor, index, bit)
    assert hash_of(tensor) == before
    assert len(seen | {before}) == 1 + 3 * 8 * tensor.element_size()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_hash_supports_any_dtype_layout_and_size(dtype):
    x = (torch.arange(24) % 2).to(dtype).view(4, 6)
    hashes = [hash_of(tensor) for tensor in (x, x.clone(), x[:, ::2], x.t(), x[0, 0], x[:0])]
    assert hashes[0] == hashes[1]
    assert hash_of(x.t()) == hash_of(x.t().contiguous())
    assert hashes[5] == 0


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.flip(0),
        lambda x: x.roll(1),
        lambda x: -x,
        lambda x: x * (1.0 - 2.0 * (torch.arange(len(x)) < 2)),  # two signs: a plain sum of 64-bit words would not see them
        lambda x: x.index_copy(0, torch.tensor([0, 2**15]), x[[2**15, 0]]),  # the same place in two blocks
        lambda x: x.index_add(0, torch.tensor([4, 6, 8]), torch.tensor([1.0, -2.0, 1.0], dtype=x.dtype)),
    ],
    ids=["reversed", "rotated", "negated", "two signs", "across blocks", "second difference"],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_hash_depends_on_order_and_sign(change, dtype):
    x = torch.randn(2**16 + 100, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert hash_of(change(x)) != hash_of(x)


def test_hashes_of_many_small_tensors_differ():
    tensors = [torch.tensor([a, b], dtype=torch.int16) for a in range(-15, 15) for b in range(-15, 15)]
    assert len(set(hash_tensors(tensors, CPU).tolist())) == len(tensors)


def test_hash_equals_reference_sum():
    """In one go, as a GPU computes it, and with numbers of Python."""
    words = torch.randint(-(2**31), 2**31, (5 * 2**15 + 7,), generator=torch.Generator().manual_seed(0)).int()
    within, of_block = (
        replica_check._odd_factors(2**15, replica_check._STRIDE, CPU),
        replica_check._odd_factors(6, replica_check._PER_BLOCK, CPU),
    )
    factors = (of_block[:, None] * within).flatten()[: len(words)]
    assert hash_of(words) == (words * factors).sum().item()
    assert all(factor % 2 for factor in [*within.tolist(), *of_block.tolist()])
    by_hand = sum(w * f for w, f in zip(words[:100].tolist(), factors[:100].tolist(), strict=True))
    assert (hash_of(words[:100]) - by_hand) % 2**64 == 0


# ---- ranks ------------------------------------------------------------------------------------------------------------------


class Heard:
    def __init__(self):
        self.events = []

    def on_step(self):
        spans.schedule_next_check(step=10**12, in_s=1e6)

    def on_event(self, event):
        self.events.append({key: value for key, value in event.items() if key != "at"})


def spoiled(what, strategy, rank, options=None, steps=2):
    """Run two steps on these ranks with a difference on one of them, and return the result of the check."""
    seed_all(3)
    step, state = begin([ema(0.9)], strategy, ADAMW)
    sizes = [2] * get_dist_info().world_size
    for number in range(steps):
        state, _ = step(state, part(number, sizes, get_dist_info().rank, get_dist_info().rank + 1))
    check_desync(state, of=ALL, same_rng=True)
    if get_dist_info().rank == rank:
        spoil(state, what)
    heard = Heard()
    spans.set_listener(heard)
    try:
        check_desync(state, **(options or {}))
    except DesyncError as error:
        (event,) = heard.events
        return str(error), event["tensor"], event["ranks"], event["step"]
    finally:
        spans.set_listener(None)
    return "no error"


def spoil(state, what):
    if what in state.params:
        flip(to_local(state.params[what]), 0, 3)
    elif what == "moment":
        flip(to_local(state.optimizer.state[state.params["last.bias"]]["exp_avg_sq"]))
    elif what == "moment, first":
        flip(to_local(state.optimizer.state[state.params["first.weight"]]["exp_avg"]))
    elif what == "slice":
        flip(to_local(state.transform_states["ema"]["params"]["temperature"]))
    elif what == "clock":
        object.__setattr__(state.clock, "samples", state.clock.samples + 1)
    else:
        {"torch": lambda: torch.rand(()), "python": random.random, "numpy": np.random.rand}[what]()


@pytest.mark.parametrize(
    ("what", "options", "name"),
    [
        ("first.weight", {}, "first.weight"),
        ("temperature", {}, "temperature"),
        ("moment", {"of": ("optimizer",)}, "optimizer last.bias exp_avg_sq"),
        ("slice", {"of": ("params", "transform_states")}, "transform state ema params temperature"),
        ("clock", {}, "clock samples"),
        ("torch", {"same_rng": True}, "random numbers of torch"),
        ("python", {"same_rng": True}, "random numbers of python"),
        ("numpy", {"same_rng": True}, "random numbers of numpy"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_difference_between_two_replicas_is_named_on_both_ranks(ranks, what, options, name):
    for message, tensor, minority, step in ranks(2).run(spoiled, what, "replicate", 1, options):
        assert message.startswith(
            f"check_desync: step 2: {name!r} must be equal on all ranks, got a different value on ranks [1] than on "
            "ranks [0]. 1 of "
        )
        assert (tensor, minority, step) == (name, [1], 2)


@pytest.mark.parametrize(
    ("what", "options"),
    [
        ("first.weight", {"of": ("buffers", "optimizer", "position")}),
        ("moment", {}),
        ("slice", {}),
        ("torch", {}),
        ("clock", {"of": ("params",)}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unselected_state_is_not_compared(ranks, what, options):
    assert ranks(2).run(spoiled, what, "replicate", 1, options) == ["no error"] * 2


@pytest.mark.parametrize(("what", "detected"), [("temperature", True), ("first.weight", False), ("clock", True)])
def test_sharded_model_compares_only_replicated_values(ranks, what, detected):
    answers = ranks(2).run(spoiled, what, "full_shard", 1)
    assert [answer != "no error" for answer in answers] == [detected] * 2


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("what", ["first.weight", "temperature", "moment, first"])
def test_hybrid_sharding_compares_replicas_of_each_shard(ranks, what, rank):
    errors = ranks(4).run(spoiled, what, "hybrid_shard", rank, {"of": ("params", "optimizer")})
    for message, tensor, minority, _ in errors:
        assert tensor == {"moment, first": "optimizer first.weight exp_avg"}.get(what, what)
        if what == "temperature":  # whole on all ranks: three against one
            assert minority == [rank]
            assert f"got a different value on ranks [{rank}] than on ranks " in message
        else:  # one against one: the right value is unknown, and the lower rank is taken
            assert minority == [{0: 2, 3: 3}[rank]]


class Loader:
    """Says where it is."""

    def __init__(self, samples):
        self.samples = samples

    def state_dict(self):
        return {"epoch": 1, "samples": self.samples}


def with_extra(kind):
    _, state = begin([], "replicate")
    rank = get_dist_info().rank
    extra = {"same": {"a": [1, 2.5]}, "loader": Loader(7 + rank)} if kind == "loader" else {"odd": {1, 2}}
    try:
        check_desync(state, extra=extra)
    except (DesyncError, ConfigError) as error:
        return str(error)
    return "no error"


def test_loader_position_is_compared(ranks):
    for message in ranks(2).run(with_extra, "loader"):
        assert message.startswith(
            "check_desync: step 0: 'extra loader' must be equal on all ranks, got a different value on ranks [1] than on "
            "ranks [0]. "
        )


def test_extra_requires_plain_data(ranks):
    for message in ranks(2).run(with_extra, "set"):
        assert message.startswith("check_desync: extra['odd'] must be plain data or have a state_dict() of plain data, got ")


def buffers(kept):
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model = dt.shard_model(model, dt.build_mesh(), strategy="replicate", blocks=(nn.Linear,), buffers=kept)
    step = dt.compose_step(dt.mean_loss(lambda model, x: model(x).square().mean(), weight=len))
    state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1))
    state, _ = step(state, torch.randn(4, 2, generator=torch.Generator().manual_seed(get_dist_info().rank)))
    try:
        check_desync(state)
        if get_dist_info().rank == 1:
            model[1].running_mean.add_(1.0)
        check_desync(state)
    except DesyncError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(("kept", "expected"), [("broadcast", True), ("mean", True), ("own", False)])
def test_buffers_are_compared_when_they_should_be_equal(ranks, kept, expected):
    for message in ranks(2).run(buffers, kept):
        assert (
            "'buffer 1.running_mean' must be equal on all ranks, got a different value on ranks [1] than on ranks [0]"
            in message
        ) == expected


def apart():
    step, state = begin([], "replicate")
    state = dt.transforms.split_replicas(state)
    state, _ = step(state, part(0, [4, 4], get_dist_info().rank, get_dist_info().rank + 1))  # they differ now, as they may
    try:
        check_desync(state)
    except ConfigError as error:
        return str(error)
    return "no error"


def test_independently_trained_copies_are_refused(ranks):
    for message in ranks(2).run(apart):
        assert message.startswith("check_desync: 2 copies of the model are training apart at step 1")


def test_single_rank_compares_nothing():
    model = nn.Linear(1, 1)
    step = dt.compose_step(dt.mean_loss(lambda model, x: model(x).mean(), weight=len))
    state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with count_host_syncs() as seen:
        after, _ = step(state, torch.ones(1, 1))
    check_desync(after)
    assert seen.count <= 2
    with pytest.raises(StaleStateError, match="check_desync: this state was stepped already"):
        check_desync(state)


@pytest.mark.parametrize("of", [("weights",), (), "params"], ids=["unknown", "empty", "text"])
def test_invalid_arguments_are_refused(of):
    model = nn.Linear(1, 1)
    step = dt.compose_step(dt.mean_loss(lambda model, x: model(x).mean(), weight=len))
    state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(
        ConfigError,
        match="check_desync: of must be a list of names from params, buffers, optimizer, transform_states, rng, position, got",
    ):
        check_desync(state, of=of)


@pytest.mark.parametrize(
    ("told", "minority"),
    [
        ([1, 1, 2, 1], [2]),
        ([2, 1, 1, 1], [0]),
        ([1, 2, 3, 1], [1, 2]),
        ([1, 2], [1]),
        ([None, 1, 1], [0]),  # it has no such thing
    ],
)
def test_minority_ranks_are_named(told, minority):
    entries = [[["other", "", 5], *([["w", "", value]] if value is not None else [])] for value in told]
    with pytest.raises(DesyncError, match="step 7: 'w' must be equal on all ranks, got a different value on") as error:
        replica_check.raise_first_difference("check_desync", 7, entries)
    assert f"a different value on ranks {minority} than on" in str(error.value)
