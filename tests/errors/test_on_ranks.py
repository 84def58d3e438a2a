"""docs/errors.md, the errors of two ranks: torch's message or silence, and dtrain's message."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import dtrain as dt
from dtrain.testing import Ranks
from errors.on_ranks import LOSS, ROWS, everything, linear, unequal
from errors.said import check, fits, raised
from step.ending import endings

Found = list[dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("errors")


@pytest.fixture(scope="module")
def results(ranks: Callable[[int], Ranks], folder: Path) -> Found:
    return ranks(2).run(everything, str(folder), timeout_s=300)


def test_a_checkpoint_of_two_ranks_is_resumed_on_one(results: Found, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    halves = [torch.load(folder / f"rank-{rank}.pt") for rank in (0, 1)]
    by_hand = raised(lambda: linear().load_state_dict(halves[0]))
    model = linear()
    state = dt.compose_step(LOSS).init(model, torch.optim.AdamW(model.parameters()))
    done = dt.load_sharded(folder / "ckpt", state)
    assert done.step == 1
    assert dict(done.params)["weight"].flatten().tolist() == results[0]["resuming"]
    assert done.optimizer.state[model.weight]["exp_avg"].shape == (4, 4)
    check("Resuming on another number of ranks", by_hand=(by_hand,), here=(capfd.readouterr().err,))


def test_out_of_memory_reduces_the_microbatch_size(results: Found) -> None:
    for rank in (0, 1):
        memory = results[rank]["memory"]
        assert 1 <= memory["found"] < ROWS
        check("Out of memory with full sharding", by_hand=(memory["by_hand"],), here=(memory["here"],))


def test_optimizer_with_stale_parameters_is_refused(results: Found) -> None:
    for rank in (0, 1):
        gradients = results[rank]["gradients"]
        assert gradients["held"]  # torch says nothing, and learns nothing
        assert not gradients["moved"]
        check("Gradients that are None", here=(gradients["here"],))


def test_logged_loss_is_averaged_over_all_ranks(results: Found) -> None:
    losses = [result["losses"] for result in results]
    assert losses[0]["mine"] != losses[1]["mine"]
    exact = sum(result["mine"] * result["weight"] for result in losses) / sum(result["weight"] for result in losses)
    assert [result["mean"] for result in losses] == pytest.approx([exact, exact], rel=1e-5)
    assert not math.isclose(exact, (losses[0]["mine"] + losses[1]["mine"]) / 2, rel_tol=1e-3)  # a mean of means
    check("A loss that is not synchronised")


def test_sink_writes_on_one_rank_only(results: Found, folder: Path) -> None:
    assert len((folder / "by-hand.log").read_text().splitlines()) == 2
    assert len((folder / "here.jsonl").read_text().splitlines()) == 1
    assert dt.loggers.read_jsonl(folder / "here.jsonl")[1]["loss"] == results[0]["losses"]["mean"]
    check("The same metric from every rank")


def test_every_epoch_has_a_different_order(results: Found) -> None:
    for rank in (0, 1):
        first, second = results[rank]["orders"]["by_hand"]
        assert first == second
        first, second = results[rank]["orders"]["here"]
        assert first != second
    assert sorted(x for result in results for x in result["orders"]["here"][1]) == list(range(8))
    check("The same order in every epoch")


def test_ranks_take_the_same_number_of_steps(results: Found, tmp_path: Path) -> None:
    assert [result["hang"]["steps"] for result in results] == [8, 8]  # 2 epochs of 7 samples, 2 at a time
    codes, said = endings(unequal, 2, tmp_path)
    assert codes == [0, 0]
    assert fits("DistError: leaving init_dist: ranks must run the same exchange, got 'record ...", said[1]), said[1]
    check("Training hangs after the first epoch", by_hand=(results[0]["hang"]["by_hand"],), here=(said[0],))


def test_global_batch_size_does_not_grow_with_the_rank_count(results: Found) -> None:
    assert [result["batches"] for result in results] == [{"by_hand": 8, "here": 4}] * 2
    check("A batch that grew with the number of ranks")


class Remote:
    """Data whose decoder is a function made on the spot."""

    def __init__(self) -> None:
        self.decode = lambda index: torch.tensor(float(index))

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.decode(index)


class Settings:
    pass


def test_objects_that_cannot_be_pickled_are_named(results: Found, tmp_path: Path) -> None:
    torch.save({"settings": Settings}, tmp_path / "settings.pt")
    saved = raised(lambda: torch.save({"warmup": Remote().decode}, tmp_path / "x.pt"))
    loaded = raised(lambda: torch.load(tmp_path / "settings.pt"))
    model = linear()
    state = dt.compose_step(LOSS).init(model, torch.optim.SGD(model.parameters()))
    extra = {"schedule": {"warmup": Remote().decode}}
    ours = raised(lambda: dt.save_sharded(tmp_path / "ckpt", state, extra=extra))
    assert dt.checkpoint.list_steps(tmp_path / "ckpt") == []
    loader = dt.build_loader(Remote(), global_batch_size=4, seed=0, num_workers=1, start_method="spawn")
    sent = raised(lambda: list(loader.until("1ep")))
    forked = dt.build_loader(Remote(), global_batch_size=4, seed=0, num_workers=1, start_method="fork")
    assert sum(len(batch) for batch in forked.until("1ep")) == 8
    check("Objects that cannot be pickled", by_hand=(saved, loaded), here=(ours, sent, results[0]["objects"]))
