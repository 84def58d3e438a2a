"""Saves in the background of several ranks: their own group, one verdict for all, and the exit code of a preempted run."""

from pathlib import Path

import pytest
import torch

from checkpoint.filled import sharded_state
from checkpoint.states import digest, names, watching
from dtrain.checkpoint import save, save_thread
from dtrain.checkpoint.checkpoint_info import latest_checkpoint
from dtrain.checkpoint.load import load_sharded
from dtrain.checkpoint.reader import verify
from dtrain.checkpoint.save import save_sharded
from dtrain.dist.collectives import all_gather_json
from dtrain.dist.init import get_dist_info
from dtrain.errors import DtrainError
from dtrain.testing.counters import count_collectives


def later(state):
    return state._next(clock=state.clock.tick(samples=1, tokens=0, seconds=0.0))


def groups_used(root: str, mode: str) -> list:
    state = sharded_state("full_shard", filled=True)
    inside: list[str] = []
    run_save = save.run_save

    def watched(*args):
        with count_collectives() as seen:  # of the thread that it is entered in
            saved = run_save(*args)
        inside.extend(record.group for record in seen.records)
        return saved

    with pytest.MonkeyPatch.context() as patch, count_collectives() as seen:
        patch.setattr(save, "run_save", watched)
        save_sharded(root, state, mode=mode).wait()
    return [sorted({record.group for record in seen.records}), sorted(set(inside))]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_save_thread_uses_its_own_process_group(tmp_path, ranks, mode):
    for used in ranks(2).run(groups_used, str(tmp_path), mode):
        assert used == [["control"], ["background"]]


def fails_on_one(root: str, failing_rank: int) -> list:
    state = sharded_state("full_shard", filled=True)
    save_sharded(root, state)
    state = later(state)
    before, said = digest(state), []
    with watching(**({"operation": 0, "kind": "pwritev"} if get_dist_info().rank == failing_rank else {})):
        handle = save_sharded(root, state, mode="async")
        handle._task.wait()
    all_gather_json(None)
    try:  # the next save raises it on all ranks, before its own work
        save_sharded(root, state, mode="async")
    except DtrainError as error:
        said.append(f"{type(error).__name__}: {error}")
    after = [digest(state) == before, names(Path(root)), str(latest_checkpoint(root))]
    all_gather_json(None)
    return [said, *after, save_sharded(root, state).result().written]


def test_next_save_raises_failure_of_one_rank_on_all(tmp_path, ranks):
    for rank, (said, unchanged, entries, latest, written) in enumerate(ranks(2).run(fails_on_one, str(tmp_path), 1)):
        start = "CheckpointError: save_sharded: step 5: " if rank == 1 else "PeerError: save_sharded: step 5: rank 1 failed"
        assert said[0].startswith(start)
        assert "No space left on device" in said[0]
        assert unchanged
        assert entries == ["step-00000004"]
        assert latest.endswith("step-00000004")
        assert written


def goes_on_training(root: str) -> list:
    """Every shard changes while the state is being written; a save of every step, each with all that there was then."""
    state, digests = sharded_state("full_shard", filled=True), {}
    for _ in range(5):
        state = later(state)
        with torch.no_grad():
            for param in state.params.values():
                param.add_(1.0)
        digests[state.step] = digest(state, rng=False)
        save_sharded(root, state, mode="async")
    save_thread.save_thread().wait_all()
    loaded = {}
    for step in digests:
        back = load_sharded(f"{root}/step-{step:08d}", sharded_state("full_shard", filled=False))
        loaded[step] = digest(back, rng=False)
    return [loaded == digests, len(set(digests.values())), verify(root).step]


def test_async_saves_are_unaffected_by_continued_training(tmp_path, ranks):
    for result in ranks(2).run(goes_on_training, str(tmp_path)):
        assert result == [True, 5, 9]
