"""count_host_syncs: a wait for a device is counted on a CPU too, named with its caller, and torch is left as it was."""

import threading

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dtrain.dist.mesh import build_mesh
from dtrain.shard.fsdp import shard_model
from dtrain.testing import count_host_syncs

ONES = torch.ones(3)


@pytest.mark.parametrize(
    ("what", "call"),
    [
        ("item", lambda: ONES[0].item()),
        ("item", lambda: float(ONES[0])),
        ("item", lambda: int(ONES[0])),
        ("item", lambda: bool(ONES[0])),
        ("item", lambda: 1 if ONES.isnan().any() else 0),
        ("item", lambda: torch.allclose(ONES, ONES)),
        ("tolist", lambda: ONES.tolist()),
        ("numpy", lambda: ONES.numpy()),
        ("numpy", lambda: np.asarray(ONES)),
        ("cpu", lambda: ONES.cpu()),
        ("nonzero", lambda: ONES.nonzero()),
        ("masked_select", lambda: ONES.masked_select(ONES > 0)),
        ("unique", lambda: ONES.unique()),
        ("index", lambda: ONES[ONES > 0]),
        ("item", lambda: torch.equal(ONES, ONES)),
        ("repeat_interleave", lambda: ONES.repeat_interleave(torch.tensor([1, 2, 1]))),
    ],
)
def test_each_host_sync_is_counted_once_with_its_location(what, call):
    with count_host_syncs() as seen:
        call()
    assert [sync.kind for sync in seen.calls] == [what]
    assert seen.count == 1
    file, _, place = seen.calls[0].location.partition(":")
    assert file == __file__
    assert place.endswith("in <lambda>")


@pytest.mark.parametrize(
    ("copy", "what"),
    [
        (lambda t: t.to("cpu"), ["copy"]),
        (lambda t: torch.empty(3).copy_(t), ["copy"]),
        (lambda t: t.cpu(), ["cpu"]),
        (lambda t: t.to("cpu", non_blocking=True), []),
        (lambda t: torch.empty(3).copy_(t, non_blocking=True), []),
    ],
)
def test_blocking_device_copy_is_counted_once(copy, what):
    far = torch.empty(3, device="meta")  # the device that every machine has: nothing comes back, but the copy is asked for
    with pytest.raises(NotImplementedError), count_host_syncs() as seen:
        copy(far)
    assert [call.kind for call in seen.calls] == what


def sync_inside_a_dtensor() -> list[str]:
    net = shard_model(nn.Linear(4, 4), build_mesh())
    with count_host_syncs() as seen:
        float(net.weight.detach().sum())
    return [call.kind for call in seen.calls]


def test_dtensor_internal_sync_is_counted(ranks):
    assert ranks(2).run(sync_inside_a_dtensor) == [["item"]] * 2


def test_masked_tensor_write_is_counted_and_scalar_fill_is_not():
    x, mask = torch.zeros(4), torch.tensor([True, False, True, False])
    with count_host_syncs() as seen:
        x[mask] = 1.0
        x[torch.tensor([0, 1])] = torch.ones(2)
        assert seen.calls == []
        x[mask] = torch.ones(2)
        torch.index_put(x, (mask,), torch.ones(2))
    assert [call.kind for call in seen.calls] == ["index_put", "index_put"]


def test_nonblocking_calls_are_not_counted():
    with count_host_syncs() as seen:
        ONES.to("cpu")
        ONES.to(torch.float64)
        ONES[torch.tensor([0, 2])]
        ONES.repeat_interleave(torch.tensor([1, 2, 1]), output_size=4)
        ONES.to("meta")
        torch.empty(3, device="meta").copy_(ONES)
        ONES.sum() + 1.0
    assert seen.calls == []


def optimizer_syncs(**options: bool) -> list[str]:
    params = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizer = torch.optim.AdamW(params, **options)
    for param in params:
        param.grad = torch.ones(3)
    optimizer.step()
    with count_host_syncs() as seen:
        optimizer.step()
    return [call.kind for call in seen.calls]


def test_foreach_adamw_syncs_on_step_counts_and_fused_does_not():
    assert set(optimizer_syncs(foreach=True)) == {"item"}
    assert optimizer_syncs(fused=True) == []


class ReadsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * float(grad.sum()) + len(grad.tolist())


def test_syncs_in_backward_and_hooks_are_counted():
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda grad: grad.cpu())
    with count_host_syncs() as seen:
        ReadsInBackward.apply(x).sum().backward()
    assert [call.kind for call in seen.calls] == ["item", "tolist", "cpu"]


def test_syncs_of_a_user_thread_are_not_counted():
    with count_host_syncs() as seen:
        thread = threading.Thread(target=lambda: (ONES.tolist(), ONES[0].item()))
        thread.start()
        thread.join()
    assert seen.count == 0


def test_nested_contexts_count_and_restore_torch_methods():
    before = {name: (getattr(Tensor, name), name in vars(Tensor)) for name in ("cpu", "numpy", "tolist")}
    with pytest.raises(KeyError), count_host_syncs() as outer:  # noqa: PT012
        ONES.tolist()
        with count_host_syncs() as inner:
            ONES.tolist()
            ONES[0].item()
        raise KeyError
    ONES.tolist()
    assert (outer.count, inner.count) == (3, 2)
    assert {name: (getattr(Tensor, name), name in vars(Tensor)) for name in before} == before
