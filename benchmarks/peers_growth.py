"""Time dtrain where its work could grow faster than that of a loop by hand: long lists, frozen parameters, small parts.

That both sides reach the same parameters, or the same loss, is checked before anything is timed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dtrain as dt
from measure import CPU, Rounds, Run, interleaved
from step_overhead import SAME_FLOAT64, mlp, relative_distance

Measured = dict[str, dict[str, Rounds]]
Method = Literal["plain", "EMA", "auto_microbatch"]
PROCESSOR_TIME = {"processor time": CPU}
# Rows of a batch, rows of a microbatch, and steps of one timing.
ROWS, SIZE, STEPS = 32, 8, 10
DECAY = 0.999


def _timed(runs: dict[str, Run], pairs: int) -> Measured:
    threads = torch.get_num_threads()
    # Processor time is then the work that is done, not the time for which threads wait for each other.
    torch.set_num_threads(1)
    try:
        return interleaved(runs, rounds=max(1, pairs // 2), warmup=2, clocks=PROCESSOR_TIME)
    finally:
        torch.set_num_threads(threads)


def _check(what: str, ours: list[Tensor], theirs: list[Tensor]) -> None:
    apart = relative_distance(ours, theirs)
    if not apart <= SAME_FLOAT64:
        raise SystemExit(f"peers: {what}: dtrain and the loop by hand differ by {apart:.1e} (relative)")


# Splitting


def split_of_ids(pairs: int, *, samples: int) -> Measured:
    """Time the split of a batch with a list of ids into microbatches of one sample."""
    batch = {"x": torch.randn(samples, 16), "ids": [f"sample {index}" for index in range(samples)]}

    def by_hand() -> list[dict[str, Any]]:
        starts = range(samples)
        return [{key: values[start : start + 1] for key, values in batch.items()} for start in starts]

    def ours() -> list[dict[str, Any]]:
        return dt.data.split_batch(batch, 1)

    for mine, theirs in zip(ours(), by_hand(), strict=True):
        if mine["ids"] != theirs["ids"] or not mine["x"].equal(theirs["x"]):
            raise SystemExit("peers: dtrain and the loop by hand split a batch differently")
    return _timed({"by hand": by_hand, "dtrain": ours}, pairs)


# Frozen parameters


class Adapted(nn.Module):
    """A trained MLP beside frozen layers, which the forward leaves out: only the walks of a step are different."""

    def __init__(self, frozen: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.adapter = mlp()
        self.base = nn.ModuleList(nn.Linear(4, 4) for _ in range(frozen // 2)).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.adapter(x)
        return logits


class AdaptedByHand:
    """A step of the trained parameters, as one writes it."""

    def __init__(self, frozen: int, dtype: torch.dtype, method: Method) -> None:
        self.model, self.method = Adapted(frozen).to(dtype), method
        self.params = list(self.model.adapter.parameters())
        self.optimizer: Any = torch.optim.AdamW(self.params, lr=1e-3)
        self.averages = [param.detach().clone() for param in self.params]

    def step(self, x: Tensor, y: Tensor) -> None:
        pieces = list(zip(x.split(SIZE), y.split(SIZE), strict=True))
        for part, labels in pieces:
            (F.cross_entropy(self.model(part), labels) / len(pieces)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.method == "EMA":
            with torch.no_grad():
                torch._foreach_lerp_(self.averages, self.params, 1.0 - DECAY)


class AdaptedComposed:
    """The same step composed."""

    def __init__(self, frozen: int, dtype: torch.dtype, method: Method) -> None:
        model = Adapted(frozen).to(dtype)
        transforms = {
            "plain": [],
            "EMA": [dt.transforms.ema(DECAY)],
            "auto_microbatch": [dt.auto_microbatch(initial_size=SIZE)],
        }[method]
        size = {} if method == "auto_microbatch" else {"microbatch_size": SIZE}
        self.composed = dt.compose_step(_loss_sum, transforms, **size)
        self.params = list(model.adapter.parameters())
        self.state = self.composed.init(model, torch.optim.AdamW(self.params, lr=1e-3))

    @property
    def averages(self) -> list[Tensor]:
        return list(self.state.transform_states["ema"]["params"].values())

    def step(self, x: Tensor, y: Tensor) -> None:
        self.state, _ = self.composed(self.state, {"x": x, "y": y})


def _loss_sum(model: nn.Module, batch: dict[str, Tensor]) -> dt.LossSum:
    total = F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum")
    return dt.LossSum(total=total, weight=batch["y"].numel())


def adapter_step(pairs: int, *, method: Method, frozen: int = 2000) -> Measured:
    """Time a step beside ``frozen`` parameters by hand and with dtrain, and with dtrain beside 20 of them."""
    makes: dict[str, Callable[[torch.dtype], Any]] = {
        "by hand": partial(AdaptedByHand, frozen, method=method),
        "dtrain": partial(AdaptedComposed, frozen, method=method),
        "dtrain, 20 frozen": partial(AdaptedComposed, 20, method=method),
    }
    x, y = torch.randn(ROWS, 64), torch.randint(10, (ROWS,))
    exact = {name: make(torch.float64) for name, make in makes.items()}
    for side in exact.values():
        for _ in range(STEPS):
            side.step(x.double(), y)
    for side in exact.values():
        extra = (side.averages, exact["by hand"].averages) if method == "EMA" else ([], [])
        _check(method, [*side.params, *extra[0]], [*exact["by hand"].params, *extra[1]])

    def steps(side: Any) -> None:
        for _ in range(STEPS):
            side.step(x, y)

    return _timed({name: partial(steps, make(torch.float32)) for name, make in makes.items()}, pairs)


# Evaluation


def evaluations(size: int | Literal["auto"] | None) -> dict[str, Callable[[], Tensor]]:
    """An evaluation over 16 batches, in parts of ``size`` samples, by hand and with dtrain."""
    torch.manual_seed(0)
    model, rows = mlp(), size if isinstance(size, int) else ROWS
    batches = [{"x": torch.randn(ROWS, 64), "y": torch.randint(10, (ROWS,))} for _ in range(16)]

    def by_hand() -> Tensor:
        model.eval()
        total, count = torch.zeros((), dtype=torch.float64), 0
        with torch.no_grad():
            for batch in batches:
                for x, y in zip(batch["x"].split(rows), batch["y"].split(rows), strict=True):
                    total += F.cross_entropy(model(x), y, reduction="sum")
                    count += y.numel()
        model.train()
        return total / count

    def ours() -> Tensor:
        loss = dt.evaluate(model, batches, _loss_sum, microbatch_size=size)["loss"]
        return loss.total / loss.weight

    return {"by hand": by_hand, "dtrain": ours}


def evaluation(pairs: int, *, size: int | Literal["auto"] | None) -> Measured:
    """Time these evaluations."""
    runs = evaluations(size)
    _check(f"evaluate, {size}", [runs["dtrain"]()], [runs["by hand"]()])
    return _timed(runs, pairs)
