"""LiveBytes: every storage is counted once, with its current bytes, for as long as an object holds it."""

import copy
import gc
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from dtrain.memory.live_tensors import LiveBytes

FLOAT = 4


def made(*numbers: int) -> torch.Tensor:
    return torch.zeros(*numbers)


def grown_by_out(n: int) -> torch.Tensor:
    return torch.add(made(n), 1, out=torch.empty(0))


def shrunk(n: int) -> torch.Tensor:
    tensor = made(n)
    tensor.untyped_storage().resize_(0)
    return tensor


def emptied_and_filled(n: int) -> torch.Tensor:
    tensor = shrunk(n)
    tensor.untyped_storage().resize_(n * FLOAT)
    return tensor


def replaced(n: int) -> torch.Tensor:
    tensor = made(n)
    tensor.data = made(2 * n)
    return tensor


def from_storage(n: int) -> torch.Tensor:
    return made(0).set_(torch.UntypedStorage(n * FLOAT))


def saved_by_autograd(n: int) -> torch.Tensor:
    """Nothing in Python holds the leaf, nor the result that ``exp`` saves: only C++ does, until the graph is gone."""
    return made(n).requires_grad_().exp().sum()


HELD = {
    "made": (lambda: made(10), 10),
    "half": (lambda: made(10).half(), 5),
    "view": (lambda: made(10).view(2, 5)[1], 10),
    "detached": (lambda: made(10).detach(), 10),
    "two_views": (lambda: made(10).split(5), 10),
    "in_place": (lambda: made(10).add_(1).mul_(2), 10),
    "copy": (lambda: made(10).clone(), 10),
    "transposed_copy": (lambda: made(2, 5).t().contiguous(), 10),
    "expanded": (lambda: made(1).expand(10), 1),
    "several": (lambda: torch.sort(made(10)), 10 + 20),
    "list": (lambda: torch._foreach_add([made(3), made(4)], 1), 7),
    "from_python": (lambda: torch.tensor([1.0] * 10), 10),
    "deep_copy": (lambda: copy.deepcopy(made(10)), 10),
    "of_a_storage": (lambda: from_storage(10), 10),
    "resized": (lambda: made(5).resize_(10), 10),
    "resized_down": (lambda: made(10).resize_(5), 10),
    "out": (lambda: grown_by_out(10), 10),
    "storage_emptied": (lambda: shrunk(10), 0),
    "storage_filled": (lambda: emptied_and_filled(10), 10),
    "data_replaced": (lambda: replaced(10), 20),
    "saved_for_backward": (lambda: saved_by_autograd(10), 10 + 10 + 1),
    "sparse": (lambda: made(10).index_fill_(0, torch.tensor([1, 2]), 1.0).to_sparse(), 4 + 2),
    "meta": (lambda: torch.empty(10, device="meta"), 0),
    "nothing": (lambda: None, 0),
}


@pytest.mark.parametrize(("make", "floats"), HELD.values(), ids=HELD)
def test_live_bytes_count_held_tensors_only(make, floats):
    with LiveBytes() as seen:
        kept = make()
        assert seen.live == floats * FLOAT
        del kept
        assert seen.live == 0


def test_peak_is_the_maximum_of_simultaneous_live_bytes():
    with LiveBytes() as seen:
        made(10)
        made(20)
        kept = made(30)
        made(5)
        assert (seen.live, seen.peak) == (30 * FLOAT, 35 * FLOAT)
        seen.reset()
        assert seen.peak == kept.nbytes


def test_storage_resize_peak_includes_old_and_new_memory():
    with LiveBytes() as seen:
        kept = made(10)
        kept.resize_(30)
        assert (seen.live, seen.peak) == (30 * FLOAT, 40 * FLOAT)
        kept.untyped_storage().resize_(50 * FLOAT)
        assert (seen.live, seen.peak) == (50 * FLOAT, 80 * FLOAT)


def test_preexisting_tensor_is_counted_from_its_first_use():
    before = made(10)
    with LiveBytes() as seen:
        assert seen.live == 0
        before[2:4].view(2)
        assert seen.live == before.nbytes
        del before
        assert seen.live == 0


def test_preexisting_tensors_can_be_registered_immediately():
    model = nn.Linear(4, 4)
    with LiveBytes() as seen:
        seen.count(model.parameters())
        seen.count([model.weight[0], *model.parameters()])
        assert seen.live == 20 * FLOAT


def test_tensor_from_another_thread_is_counted_from_its_first_use():
    with LiveBytes() as seen:
        tensors = []
        thread = threading.Thread(target=lambda: tensors.append(made(10)))
        thread.start()
        thread.join(90)
        assert seen.live == 0
        tensors[0].add_(1)
        assert seen.live == 10 * FLOAT


def test_tensors_freed_or_resized_in_another_thread_are_subtracted():
    with LiveBytes() as seen:
        kept = [made(10), made(20)]

        def work():
            kept.pop()
            kept[0].untyped_storage().resize_(0)
            torch.zeros(7).untyped_storage().resize_(400)  # its own storage, which no counter has seen

        thread = threading.Thread(target=work)
        thread.start()
        thread.join(90)
        assert seen.live == 0


def test_live_bytes_track_frees_after_the_context():
    with LiveBytes() as seen:
        kept = made(10)
    made(20)
    assert seen.live == 10 * FLOAT
    del kept
    assert seen.live == 0


def test_storages_are_listed_with_their_creating_operator():
    before = made(2)
    with LiveBytes(stack_depth=2) as seen:
        kept = [before + 1, made(3, 4).half()]
        named = {held.made_by: held for held in seen.storages()}
    assert [held.bytes for held in seen.storages()] == sorted((held.bytes for held in named.values()), reverse=True)
    half = named["aten._to_copy.default"]
    assert (half.bytes, half.shape, half.dtype) == (24, (3, 4), "float16")
    assert len(half.stack) == 2
    assert half.stack[0].startswith(__file__)
    assert half.stack[0].endswith(test_storages_are_listed_with_their_creating_operator.__name__)
    assert named["before"].shape == (2,)
    assert len(kept) == 2


def test_backward_and_recomputation_are_counted():
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
    x = torch.randn(100, 8, requires_grad=True)

    def peak(run):
        model.zero_grad()
        x.grad = None
        with LiveBytes() as seen:
            seen.count([x, *model.parameters()])
            start = seen.live
            loss = run(x).sum()
            held = seen.live - start
            loss.backward()
            del loss
            assert seen.live - start == sum(t.grad.nbytes for t in [x, *model.parameters()])
            return held, seen.peak - start

    whole, again = peak(model), peak(lambda x: checkpoint(model, x, use_reentrant=False))
    assert whole[0] == 2 * x.nbytes + FLOAT, "what both tanh save, and the sum"
    assert again[0] < x.nbytes
    assert 2 * x.nbytes < again[1] <= whole[1] + x.nbytes


def test_live_bytes_are_constant_over_a_hundred_steps():
    model = nn.Sequential(nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(0.5))
    optimizer = torch.optim.AdamW(model.parameters())
    with LiveBytes() as seen:
        levels = set()
        for _ in range(100):
            model(torch.randn(4, 2, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            levels.add(seen.live)
        assert len(levels) == 1
        assert len(seen.storages()) == len(seen._table)


def test_nested_counters_count_the_same_bytes():
    with LiveBytes() as outer:
        first = made(10)
        with LiveBytes() as inner:
            second = emptied_and_filled(20)
            del first
        assert (inner.live, outer.live) == (20 * FLOAT, 20 * FLOAT)
        assert second.nbytes == inner.live


def test_storage_resize_patch_is_removed_after_all_contexts():
    one, two = LiveBytes(), LiveBytes()
    with one, two:
        assert "resize_" in vars(torch.UntypedStorage)
    assert "resize_" not in vars(torch.UntypedStorage)
    with pytest.raises(ZeroDivisionError), one:
        raise ZeroDivisionError
    assert "resize_" not in vars(torch.UntypedStorage)


def test_fake_tensors_count_their_nominal_bytes():
    with FakeTensorMode(), LiveBytes(fake=True) as seen:
        model = nn.Linear(1000, 1000, bias=False)
        assert seen.live == 1000 * 1000 * FLOAT
        x = torch.empty(100, 1000, device="cuda")
        assert seen.live == 1100 * 1000 * FLOAT
        model(torch.empty(100, 1000)).sum().backward()
        assert seen.live == 2100 * 1000 * FLOAT
        x.untyped_storage().resize_(0)
        assert seen.live == 2000 * 1000 * FLOAT


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
def test_fake_tensors_are_filtered_by_device_type(inside):
    fake, seen = FakeTensorMode(), LiveBytes(fake=True, device_type="cuda")
    outer, inner = (fake, seen) if inside else (seen, fake)
    with outer, inner:
        kept = [torch.empty(10), torch.empty(20, device="cuda")]
        if inside:  # a fake mode inside of the counter keeps its operations to itself; the next use shows its tensors
            assert seen.live == kept[1].nbytes
    with fake, seen:
        kept[0].add_(1)
        kept[1].add_(1)
        assert seen.live == kept[1].nbytes


def test_fake_tensors_are_ignored_in_a_real_run():
    fake = FakeTensorMode()
    with LiveBytes() as seen:
        with fake:
            pretended = torch.empty(1000) + 1
        pretended.add_(1)
        assert seen.live == 0


def test_compiled_module_runs_eagerly_and_is_counted():
    layer = nn.Linear(8, 8)
    compiled = torch.compile(layer, backend="eager")
    compiled(made(4, 8))
    with LiveBytes() as bare:
        expected = layer(made(4, 8))
        bare_live = bare.live
    with LiveBytes() as seen:
        output = compiled(made(4, 8))
        assert seen.live == bare_live
    torch.testing.assert_close(output, expected)


# An alternative history of a few variables: the counter must give the sum over distinct storages.
ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["make", "view", "copy", "drop", "resize", "storage", "swap", "detach", "same"]),
        st.integers(0, 3),
        st.integers(0, 3),
        st.integers(0, 40),
    ),
    max_size=25,
)


class Slots(list):
    """The variables of a history, without a look at values: a tensor whose storage was emptied has none to show."""

    def __repr__(self) -> str:
        return f"{len(self)} variables"


def act(slots: Slots, action: str, to: int, source: int, n: int) -> None:
    """Do one step of a history: the variable ``to`` gets a new value, mostly made from ``source``."""
    given = slots[source]
    whole = given is not None and given.untyped_storage().nbytes() >= given.nbytes
    if action == "make":
        slots[to] = torch.empty(n)
    elif action == "drop":
        slots[to] = None
    elif given is None or (action in ("view", "copy") and not whole):
        return
    elif action == "view":
        slots[to] = given[: n // 2]
    elif action == "copy":
        slots[to] = given.clone()
    elif action == "resize":
        given.resize_(n)
    elif action == "storage":
        given.untyped_storage().resize_(n * FLOAT)
    elif action == "swap" and slots[to] is not None:
        slots[to].data = given
    else:
        slots[to] = given.detach() if action == "detach" else given


@settings(max_examples=60, deadline=None)
@given(ACTIONS)
def test_live_bytes_equal_distinct_storage_bytes_for_any_history(history):
    slots = Slots([None] * 4)
    with LiveBytes() as seen:
        highest = 0
        for step in history:
            act(slots, *step)
            storages = {s.untyped_storage().data_ptr() or id(s.untyped_storage()): s for s in slots if s is not None}
            held = sum(s.untyped_storage().nbytes() for s in storages.values())
            del storages
            highest = max(highest, held)
            assert seen.live == held
        assert seen.peak >= highest
        slots.clear()
        assert seen.live == 0


def test_refused_allocation_leaves_no_reference_cycle():
    gc.collect()
    with LiveBytes(admit=lambda wanted: MemoryError("no") if wanted > 20 * FLOAT else None) as seen:
        kept = made(10)
        gc.disable()
        try:
            with pytest.raises(MemoryError):
                made(20).repeat(2)
            with pytest.raises(MemoryError):
                made(20).untyped_storage().resize_(21 * FLOAT)
            assert seen.live == kept.nbytes
        finally:
            gc.enable()
