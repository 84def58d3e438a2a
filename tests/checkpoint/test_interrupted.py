"""A save after an interrupt: the loader's position agrees with the state, wherever in the loop body the interrupt came."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import dtrain as dt

DATA = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))
LENGTH = "2ep"


class Stream(torch.utils.data.IterableDataset):
    """The data one after another, with a state of its own."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self):
        while self.at < len(DATA):
            self.at += 1
            yield DATA[self.at - 1]
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Run:
    """A loop that is interrupted once, at a place of the body of one of its iterations."""

    def __init__(self, kind: str, where: str = "", iteration: int = -1) -> None:
        torch.manual_seed(0)
        self.at, self.iteration, self.calls = where, iteration, 0
        self.model = nn.Linear(3, 1)
        data, shuffle = (DATA, True) if kind == "map" else (Stream(), False)
        self.loader = dt.build_loader(data, global_batch_size=4, seed=1, shuffle=shuffle)
        self.step = dt.compose_step(dt.mean_loss(self.loss, weight=len), [dt.transforms.ema(0.5)])
        self.state = self.step.init(self.model, torch.optim.AdamW(self.model.parameters(), lr=0.1), loader=self.loader)

    def come_to(self, place: str) -> None:
        if (place, self.calls) == (self.at, self.iteration):
            raise KeyboardInterrupt

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        self.come_to("in the step")
        return model(batch).square().mean()

    def train(self) -> dt.TrainState:
        state = self.state
        for batch in self.loader.until(LENGTH):
            self.come_to("before the step")
            state, _ = self.step(state, batch)
            self.come_to("after the step")
            self.calls += 1
        return state


def resumed(kind: str, root: Path) -> tuple[int, list[float]]:
    run = Run(kind)
    run.state = dt.load_sharded(root, run.state)
    state = run.train()
    return state.step, run.model.weight.flatten().tolist()


@pytest.mark.parametrize("kind", ["map", "iterable"])
@pytest.mark.parametrize("iteration", [1, 5, 6, 7], ids=["early", "last of an epoch", "first of an epoch", "later"])
@pytest.mark.parametrize("where", ["before the step", "in the step", "after the step"])
def test_save_after_interrupt_neither_skips_nor_repeats_batches(tmp_path, kind, where, iteration):
    whole = Run(kind)
    expected = whole.train().step, whole.model.weight.flatten().tolist()
    run = Run(kind, where, iteration)
    try:
        run.train()
    except KeyboardInterrupt:
        state = dt.TrainState.newest(run.model)
        assert state.step == iteration + (where == "after the step")
        dt.save_sharded(tmp_path, state)
    else:
        pytest.fail("the loop was not interrupted")
    assert resumed(kind, tmp_path) == expected


def test_interrupt_in_first_step_skips_no_batch(tmp_path):
    run = Run("map", "in the step", 0)
    with pytest.raises(KeyboardInterrupt):
        run.train()
    assert run.loader.state_dict()["batches"] == 0


def test_save_before_step_skips_no_batch(tmp_path):
    whole, run = Run("map"), Run("map")
    expected = whole.train().step, whole.model.weight.flatten().tolist()
    state = run.state
    for batch in run.loader.until(LENGTH):
        if state.step == 4:
            dt.save_sharded(tmp_path, state)
            break
        state, _ = run.step(state, batch)
    assert resumed("map", tmp_path) == expected


def by_hand(run: Run, batch: torch.Tensor) -> None:
    run.model(batch).sum().backward()


def in_thirds(run: Run, batch: torch.Tensor) -> None:
    run.calls += 1
    if run.calls % 3 == 0:
        run.state, _ = run.step(run.state, batch)


@pytest.mark.parametrize(("use", "batches"), [(by_hand, 5), (in_thirds, 6)], ids=["by hand", "every third batch"])
def test_batch_without_step_counts_when_the_next_is_requested(use: Callable[[Run, torch.Tensor], None], batches: int) -> None:
    run = Run("map")
    for number, batch in enumerate(run.loader.until(LENGTH), 1):
        use(run, batch)
        if number == 6:
            assert run.loader.state_dict()["batches"] == batches
            return


def test_finished_loop_counts_its_last_batch() -> None:
    run = Run("map")
    for batch in run.loader.until(LENGTH):
        if run.state.step < 11:
            run.state, _ = run.step(run.state, batch)
    assert run.loader.state_dict()["batches"] == 12
