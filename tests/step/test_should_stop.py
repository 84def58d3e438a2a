"""``should_stop``: one rank's signal stops all at the same step; the last save decides how ``init_dist``'s block ends."""

import os
import signal
from functools import partial

import pytest
import torch
from torch import nn

import dtrain as dt
from dtrain.errors import StaleStateError
from dtrain.testing import count_collectives
from step.ending import endings, say

AT = 3  # the step before which the signal comes, from 0


def squared(model, batch):
    return dt.LossSum(total=model(batch).square().sum(), weight=len(batch))


def begin(transforms=()):
    model = dt.shard_model(nn.Linear(3, 1), dt.build_mesh(), blocks=(nn.Linear,))
    step = dt.compose_step(squared, transforms)
    return step, step.init(model, torch.optim.SGD(model.parameters(), lr=0.01), allow_equal_batches=True)


def told(rank, now, when=AT, number=signal.SIGTERM):
    """Signal the last rank before step ``when``."""
    if rank == dt.init_dist().world_size - 1 and now == when:
        os.kill(os.getpid(), number)


BATCH = torch.ones(2, 3)


def train(rank, *, folder, asks=True, saves="after", number=signal.SIGTERM, steps=9):
    """Run a loop; print the step after which it stopped."""
    with dt.init_dist():
        step, state = begin()
        for now in range(steps):
            told(rank, now, number=number)
            state, _ = step(state, BATCH)
            stop = asks and dt.should_stop(state)
            if saves == "always" or (stop and saves in ("after", "twice")):
                dt.save_sharded(folder / "ckpt", state)
            if stop and saves == "twice":
                assert not dt.save_sharded(folder / "ckpt", state).result().written
            if saves == "before" and now == AT - 1:
                dt.save_sharded(folder / "ckpt", state)
            if stop:
                break
        say(folder, rank, state.step)
        if saves in ("fails", "exits", "exits with 3"):
            dt.save_sharded(folder / "ckpt", state, mode="async")
            raise KeyError("after it was saved") if saves == "fails" else SystemExit(3 if saves == "exits with 3" else None)


# The exit codes of the ranks, and the last saved step. The signal before step AT is in the record of that step.
ENDS = {
    "saved after it": ("after", 75, AT + 1),
    "saved twice": ("twice", 75, AT + 1),
    "saved every step": ("always", 75, AT + 1),
    "saved before it": ("before", 0, AT),
    "not saved": ("never", 0, None),
    "saved, then an exception": ("fails", 1, AT + 1),
    "saved, then sys.exit()": ("exits", 75, AT + 1),
    "saved, then sys.exit(3)": ("exits with 3", 3, AT + 1),
}


@pytest.mark.costly
@pytest.mark.parametrize(("saves", "code", "saved"), ENDS.values(), ids=ENDS)
@pytest.mark.parametrize("world_size", [1, 2])
def test_ranks_stop_together_and_exit_75_after_saving(tmp_path, world_size, saves, code, saved):
    codes, said = endings(partial(train, folder=tmp_path, saves=saves), world_size, tmp_path)
    assert (codes, said) == ([code] * world_size, [AT + 1] * world_size)
    checkpoint = dt.latest_checkpoint(tmp_path / "ckpt") if (tmp_path / "ckpt").exists() else None
    assert (checkpoint and checkpoint.name) == (saved and f"step-{saved:08d}")


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGINT])
def test_launcher_selected_signal_stops_the_run(tmp_path, number):
    body = partial(train, folder=tmp_path, number=number)
    assert endings(body, 2, tmp_path, DTRAIN_STOP_SIGNAL=str(int(number))) == ([75, 75], [AT + 1] * 2)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_loop_without_should_stop_exits_by_the_signal(tmp_path, number):
    body = partial(train, folder=tmp_path, asks=False, number=number)
    codes, said = endings(body, 2, tmp_path, DTRAIN_STOP_SIGNAL=str(int(number)))
    assert (codes, said) == ([-number] * 2, [None] * 2)


def ask_now_and_then(rank, *, folder):
    """It asks after steps 3, 6 and 9 only; the signal comes before step index 3, so it is late by two steps."""
    with dt.init_dist():
        step, state = begin()
        while not (state.step % 3 == 0 and dt.should_stop(state)):
            told(rank, state.step)
            state, _ = step(state, BATCH)
        say(folder, rank, state.step)
        dt.save_sharded(folder / "ckpt", state)


def test_should_stop_can_be_called_every_few_steps(tmp_path):
    assert endings(partial(ask_now_and_then, folder=tmp_path), 2, tmp_path) == ([75, 75], [6, 6])


def two_states(rank, *, folder):
    """As a GAN has: both learn, and the loop asks for one of them, after both have exchanged their records."""
    with dt.init_dist():
        (step, one), (_, other) = begin(), begin()
        other, _ = step(other, BATCH)  # so that it is ahead, as a critic is
        for now in range(9):
            told(rank, now, when=0)
            one, _ = step(one, BATCH)
            other, _ = step(other, BATCH)
            if dt.should_stop(other):
                dt.save_sharded(folder / "one", one)
                dt.save_sharded(folder / "other", other)
                break
        say(folder, rank, [one.step, other.step])


def test_two_states_stop_at_the_same_iteration(tmp_path):
    assert endings(partial(two_states, folder=tmp_path), 2, tmp_path) == ([75, 75], [[1, 2], [1, 2]])


def second_try(inner):
    def grad(state, batch):
        inner(state, batch)
        return inner(state, batch)

    return grad


def two_records_in_a_step(rank, *, folder):
    with dt.init_dist():
        step, state = begin([dt.Transform(name="twice", grad=second_try)])
        told(rank, 0, when=0)
        state, _ = step(state, BATCH)
        with count_collectives() as seen:
            assert dt.should_stop(state)
        assert seen.records == []
        dt.save_sharded(folder / "ckpt", state)


def test_two_step_records_in_one_step_count_once(tmp_path):
    assert endings(partial(two_records_in_a_step, folder=tmp_path), 2, tmp_path)[0] == [75, 75]


def save_in_the_middle(rank, *, folder):
    with dt.init_dist():
        _, state = begin()
        told(rank, 0, when=0)
        state, metrics = dt.microbatch_step(state, BATCH, loss_fn=squared)
        dt.save_sharded(folder / "ckpt", state)
        state, _ = dt.optimizer_step(state, metrics)
        return dt.should_stop(state)


def test_mid_step_save_does_not_count_as_the_final_save(tmp_path):
    assert endings(partial(save_in_the_middle, folder=tmp_path), 2, tmp_path) == ([0, 0], [True, True])


def failing_batch(rank, *, folder):
    """The record that carries the signal belongs to a step that fails on the other rank; the loop continues with the next."""
    with dt.init_dist():
        step, state = begin()
        told(rank, 0, when=0)
        with pytest.raises((dt.errors.ConfigError, dt.errors.PeerError)):
            step(state, object() if rank == 0 else BATCH)
        assert dt.should_stop(state)
        dt.save_sharded(folder / "ckpt", state)


def test_ranks_agree_to_stop_in_a_failed_step(tmp_path):
    assert endings(partial(failing_batch, folder=tmp_path), 2, tmp_path)[0] == [75, 75]


def one_after_the_other(rank, *, folder):
    """A block that ended with 75, caught by a caller that continues: the next block is not affected."""
    with pytest.raises(SystemExit, match="75"):
        train(rank, folder=folder)
    with dt.init_dist():
        step, state = begin()
        state, _ = step(state, BATCH)
        return dt.should_stop(state)


def test_later_init_dist_block_clears_the_stop_request(tmp_path):
    assert endings(partial(one_after_the_other, folder=tmp_path), 2, tmp_path) == ([0, 0], [False, False])


def test_should_stop_is_false_without_init_dist():
    model = nn.Linear(3, 1)
    step = dt.compose_step(squared)
    before = step.init(model, torch.optim.SGD(model.parameters(), lr=0.01))
    after, _ = step(before, BATCH)
    assert dt.should_stop(after) is False
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    with pytest.raises(StaleStateError, match="should_stop: this state was stepped already"):
        dt.should_stop(before)
