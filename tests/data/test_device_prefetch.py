"""Batches on a device ahead of time. The CPU's path; and the copies, where there is a GPU."""

import pytest
import torch

import dtrain as dt
from dtrain.dist.step_sync import ForwardRecord, sync_before_forward
from samples import Stream


def test_on_a_cpu_batches_keep_their_order_without_prefetch():
    asked = []

    def source():
        for number in range(3):
            asked.append(number)
            yield {"x": torch.tensor([number])}

    batches = dt.data.prefetch_to_device(source(), "cpu")
    assert next(batches)["x"].tolist() == [0]
    assert asked == [0]
    assert [batch["x"].tolist() for batch in batches] == [[1], [2]]


def test_prefetch_factor_must_be_positive():
    with pytest.raises(dt.errors.ConfigError, match="prefetch_factor must be an integer of at least 1, got 0"):
        next(dt.data.prefetch_to_device([], "cpu", prefetch_factor=0))


def test_device_loader_position_counts_returned_batches():
    loader = dt.build_loader(torch.arange(20), global_batch_size=4, seed=0, shuffle=False, device="cpu")
    stream = loader.until("1ep")
    next(stream), next(stream)
    assert loader.position.samples == 8


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("workers", [0, 2])
def test_device_copies_run_ahead_on_a_separate_cuda_stream(workers):
    data = torch.arange(4096 * 64, dtype=torch.float32).view(4096, 64)
    loader = dt.build_loader(data, global_batch_size=512, seed=0, shuffle=False, device="cuda", num_workers=workers)
    total, busy = torch.zeros((), device="cuda"), torch.randn(2048, 2048, device="cuda")
    for count, batch in enumerate(loader.until("1ep"), 1):
        assert batch.device.type == "cuda"
        # The last batch ends the epoch, so its position is sample 0 of the next one.
        assert loader.position.total == 512 * count
        busy = busy @ busy / 2048
        total += batch.double().sum().float()
    torch.testing.assert_close(total.cpu(), data.double().sum().float())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_device_loader_does_not_prefetch_past_a_possible_epoch_end():
    options = {"global_batch_size": 4, "seed": 0, "shuffle": False, "pre_sharded": True, "device": "cuda"}
    loader, counts = dt.build_loader(Stream(10), **options), []
    for batch in loader.until("2ep"):
        counts.append(len(batch))
        record = ForwardRecord(samples=len(batch), tokens=0, microbatches=1)
        sync_before_forward(record, batch_info=loader._last_batch_info)
    assert counts == [4, 4, 2] * 2
