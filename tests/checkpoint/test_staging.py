"""Staging buffers hold the file's content byte for byte, in memory that is reused."""

from __future__ import annotations

from itertools import pairwise

import torch

from dtrain.checkpoint import data_file
from dtrain.checkpoint.data_file import MemoryPool, TensorSlot, fill_staging_, plan_file_layout
from dtrain.checkpoint.layout import DTYPE_NAMES


def placed(tensors):
    return plan_file_layout(
        TensorSlot.of(key, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)) for key, tensor in tensors.items()
    )


def some_tensors(seed=0):
    torch.manual_seed(seed)
    return {
        "large": torch.randn(200, 200),
        "turned": torch.randn(300, 100).t(),  # not row by row in memory
        **{f"small-{number}": torch.randn(number) for number in range(1, 9)},
        "bytes": torch.randint(0, 255, (77,), dtype=torch.uint8),
        "flag": torch.tensor(True),
    }


def content(memory, tensors):
    image = fill_staging_(memory, placed(tensors), tensors)
    return b"".join(bytes(view) for view in image.views(0, image.size))


def expected(tensors):
    plan = placed(tensors)
    rows = (tensors[box.key].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for box in plan.slots)
    return plan.header + b"".join(rows)


def test_staged_image_is_file_and_independent_of_source_tensors():
    tensors = some_tensors()
    image = fill_staging_(MemoryPool().acquire(placed(tensors).size, pinned=False), placed(tensors), tensors)
    wanted = expected(tensors)
    for tensor in tensors.values():
        tensor.zero_()
    assert b"".join(bytes(view) for view in image.views(0, image.size)) == wanted


def test_pool_reuses_memory_for_other_layouts():
    pool, first, other = MemoryPool(), some_tensors(), {"only": torch.arange(10.0)}
    memory = pool.acquire(placed(first).size, pinned=False)
    where = memory.data_ptr()
    for tensors in (first, some_tensors(1), other, first):
        assert content(memory, tensors) == expected(tensors)
        pool.release(memory)
        memory = pool.acquire(placed(tensors).size, pinned=False)
        assert memory.data_ptr() == where


def test_memory_in_use_does_not_overlap_and_is_page_aligned():
    pool = MemoryPool()
    one, other, large = (pool.acquire(size, pinned=False) for size in (100, 4097, 10**6))
    in_order = sorted((one, other, large), key=torch.Tensor.data_ptr)
    assert all(lower.data_ptr() + lower.numel() <= upper.data_ptr() for lower, upper in pairwise(in_order))
    assert all(memory.data_ptr() % data_file.PAGE_BYTES == 0 for memory in (one, other, large))


def test_pool_replaces_small_memory_by_larger():
    pool = MemoryPool()
    pool.release(pool.acquire(100, pinned=False))
    large = pool.acquire(10_000, pinned=False)
    assert large.numel() == 10_000
    pool.release(large)
    assert pool.acquire(50, pinned=False) is large


def test_small_tensors_lie_behind_large_ones_of_their_item_size():
    """The 4-byte steps of AdamW would else lie between its moments, and cost a reader a chunk each."""
    kinds = {
        "exp_avg": ("F32", (2**20,)),
        "step": ("F32", ()),
        "weight": ("BF16", (2**20,)),
        "bias": ("F32", (100,)),
        "norm": ("BF16", (100,)),
    }
    slots = [TensorSlot.of(f"{name}/{key}", *kind) for name in ("a", "b") for key, kind in kinds.items()]
    order = ["exp_avg", "bias", "step", "weight", "norm"]
    assert [slot.key for slot in plan_file_layout(slots).slots] == [f"{name}/{key}" for key in order for name in ("a", "b")]
