"""Batches without a sample, given to a step by hand: one line with the remedy, on all ranks alike."""

from functools import partial

import pytest
import torch

import dtrain as dt
from dtrain.dist.init import get_dist_info

LINE = "step: no rank has a sample in this batch. Skip the step if a batch may be empty on all ranks, or end the loop."


def loss_fn(model, batch):
    return dt.LossSum(total=model(batch["x"]).square().sum(), weight=len(batch["x"]))


GRADS = {
    "whole": dt.microbatch_step,
    "microbatch": partial(dt.microbatch_step, microbatch_size=2),
    "cached": partial(dt.step.grad_cache_step, microbatch_size=2),
    "auto": dt.microbatch_step,
}


def said(fn, *args):
    try:
        return fn(*args)
    except dt.errors.DtrainError as error:
        return f"{type(error).__name__}: {error}"


def stepped(kind: str, sizes: list):
    """Make a step over a batch of so many samples on each rank, and then a step over a full batch."""
    net = torch.nn.Linear(3, 2)
    torch.nn.init.constant_(net.weight, 0.5)
    torch.nn.init.zeros_(net.bias)
    model = dt.shard_model(net, dt.build_mesh()) if get_dist_info().world_size > 1 else net
    step = dt.compose_step(loss_fn, [dt.auto_microbatch()] if kind == "auto" else [], grad=GRADS[kind])
    state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1), allow_equal_batches=True)

    def run(size):
        nonlocal state
        state, metrics = step(state, {"x": torch.ones(size, 3), "name": ["a"] * size})
        return round(dt.reduce_metrics(metrics)["loss"], 6)

    first = said(run, sizes[get_dist_info().rank])
    return [first, said(run, 4), state.clock.samples]


@pytest.mark.parametrize("kind", GRADS)
def test_empty_batch_raises_one_line_error_and_training_continues(kind):
    first, second, samples = stepped(kind, [0])
    assert first == f"StepError: {LINE}"
    assert (second, samples) == (4.5, 4)


@pytest.mark.parametrize("kind", GRADS)
def test_empty_batches_are_refused_only_when_all_ranks_are_empty(ranks, kind):
    assert ranks(2).run(stepped, kind, [0, 0]) == [[f"StepError: {LINE}", 4.5, 8]] * 2
    (first, *_), (other, *_) = results = ranks(2).run(stepped, kind, [0, 3])
    assert first == other == 4.5
    assert [samples for _, _, samples in results] == [11, 11]


def evaluated(sizes: list, size: int | None):
    model = torch.nn.Linear(3, 2)
    torch.nn.init.constant_(model.weight, 0.5)
    torch.nn.init.zeros_(model.bias)
    batches = [{"x": torch.ones(sizes[get_dist_info().rank], 3)}]

    def run():
        return round(dt.reduce_metrics(dt.evaluate(model, batches, loss_fn, microbatch_size=size))["loss"], 6)

    return said(run)


@pytest.mark.parametrize("size", [None, 2])
def test_an_evaluation_over_empty_batches_is_refused_in_one_line(ranks, size):
    for messages in ([evaluated([0], size)], ranks(2).run(evaluated, [0, 0], size)):
        assert len(set(messages)) == 1
        assert messages[0] == (
            "StepError: reduce_metrics: metric 'loss' must have a positive weight, got 0 over all ranks. "
            "Check that the loss counts some sample on some rank."
        )
    assert ranks(2).run(evaluated, [0, 3], size) == [4.5, 4.5]
