"""``auto_microbatch`` at real out-of-memory: the size it finds, the cost of a later step, and steps that ran out of memory.

The limit is a share of the device's memory, beyond which torch's allocator raises. A dry run limits the bytes of CPU tensors.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import dtrain as dt
from gpu_device import GIB, Memory, Setting, Training, draw_tokens, gpt_loss
from gpu_results import Cell, Table, band
from helpers.gpt import GPT, GPTConfig
from measure import compare, verdict

SHARES = (0.15, 0.3)  # of the device's memory
HEADROOMS = (0.0, 0.05)
FAILURES = 50
AT_MOST = 1.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of the models and batches: a GPT for the search, layers of ``width`` for the failures."""

    config: GPTConfig
    samples: int
    width: int
    rows: int
    failures: int


FULL = Sizes(
    config=GPTConfig(n_layer=12, n_head=12, dim=768, max_seq=1024), samples=512, width=4096, rows=256, failures=FAILURES
)
TOY = Sizes(config=GPTConfig(n_layer=2, n_head=2, dim=16, max_seq=16), samples=16, width=16, rows=16, failures=3)


def square_loss(model: nn.Module, batch: Tensor) -> dt.LossSum:
    return dt.LossSum(total=model(batch).square().sum(), weight=len(batch))


def auto_microbatch(setting: Setting) -> Iterator[Table]:
    """The size found over the largest by hand, the cost of a later step, and induced failures."""
    sizes = TOY if setting.toy else FULL
    with setting.memory() as memory:
        limits = _limits(setting, sizes, memory)
        yield Table(
            title="Size found against the largest that works by hand (GPT, AdamW, two microbatches)",
            columns=("limit, GiB", "headroom", "size found", "largest by hand", "found over by hand", "probes", "search, s"),
            rows=(row for limit in limits for row in _found_sizes(setting, sizes, memory, limit)),
            note="By hand: bisection with forward and backward in plain PyTorch, until torch raises out of memory.",
        )
        memory.limit = sys.maxsize
        setting.release()
        yield _later_step(setting, sizes)
        setting.release()
        yield _induced_failures(setting, sizes, memory)


def _limits(setting: Setting, sizes: Sizes, memory: Memory) -> list[int]:
    """Return limits in bytes. On a CPU: between the peaks of one sample and of the whole batch."""
    if setting.device.type == "cuda":
        total = torch.cuda.get_device_properties(setting.device).total_memory
        return [int(total * share) for share in SHARES]
    state, batch = _gpt_state(setting, sizes)
    peaks = []
    for size in (1, sizes.samples // 2):
        memory.reset()
        _by_hand(state.model, batch, size)
        peaks.append(memory.peak)
    return [sum(peaks) // 2]


def _gpt_state(setting: Setting, sizes: Sizes) -> tuple[dt.TrainState, Tensor]:
    """Return a state with optimizer state, and a batch in host memory, from which microbatches are copied."""
    model = setting.build(partial(GPT, sizes.config))
    state = dt.compose_step(gpt_loss).init(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    batch = draw_tokens(sizes.config, sizes.samples)
    state, metrics = dt.microbatch_step(state, batch[:2], loss_fn=gpt_loss, microbatch_size=1)
    state, _ = dt.optimizer_step(state, metrics)
    return state, batch


def _by_hand(model: nn.Module, batch: Tensor, size: int) -> None:
    """Forward and backward of two microbatches in plain PyTorch."""
    try:
        for microbatch in batch[: 2 * size].split(size):
            _loss_by_hand(model, microbatch).backward()
    finally:
        model.zero_grad()


def _loss_by_hand(model: nn.Module, tokens: Tensor) -> Tensor:
    # A function of its own, so that no variable holds the logits during backward and the next microbatch.
    tokens = tokens.to(next(model.parameters()).device)
    logits = model(tokens[:, :-1]).float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")


def _fits(setting: Setting, model: nn.Module, batch: Tensor, size: int) -> bool:
    try:
        _by_hand(model, batch, size)
    except RuntimeError as error:
        if not dt.memory.is_out_of_memory(error):
            raise
        return False
    finally:
        # Without this, fragments of the last try decide about the next try.
        setting.release_tensors()
    return True


def _found_sizes(setting: Setting, sizes: Sizes, memory: Memory, limit: int) -> list[list[Cell]]:
    """Search with each headroom, then bisect by hand."""
    memory.limit = sys.maxsize
    setting.release()
    state, batch = _gpt_state(setting, sizes)
    memory.limit = limit
    searches = []
    for headroom in HEADROOMS:
        searches.append(dt.step.find_microbatch_size(state, batch, loss_fn=gpt_loss, headroom=headroom))
    low, high = 0, sizes.samples // 2
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if _fits(setting, state.model, batch, middle) else (low, middle - 1)
    return [
        [limit / GIB, headroom, search.size, low, search.size / max(low, 1), len(search.probes), search.seconds]
        for headroom, search in zip(HEADROOMS, searches, strict=True)
    ]


def _later_step(setting: Setting, sizes: Sizes) -> Table:
    """Compare a step after the search with a step of the same fixed size."""
    size = max(sizes.samples // 64, 1)
    batch = draw_tokens(sizes.config, 4 * size).to(setting.device)
    runs = {
        "auto": _stepping(setting, sizes, batch, transforms=[dt.auto_microbatch(initial_size=size)]),
        "fixed": _stepping(setting, sizes, batch, microbatch_size=size),
    }
    timings = setting.timed(runs, share=0.4)
    rows: list[list[Cell]] = []
    for clock, by_name in timings.items():
        ratio = compare(by_name["auto"], by_name["fixed"])
        outcome = verdict(ratio.ratio, at_most=AT_MOST)
        rows.append([clock, ratio.b_s * 1e3, ratio.a_s * 1e3, ratio.ratio, band(ratio), outcome])
    return Table(
        title=f"A step after the search against a fixed size, 4 microbatches of {size}",
        columns=("clock", "fixed, ms", "auto, ms", "auto over fixed", "A/A band", "verdict"),
        rows=rows,
        note=f"Target: at most {AT_MOST}.",
    )


def _stepping(
    setting: Setting, sizes: Sizes, batch: Tensor, *, transforms: Any = (), microbatch_size: int | None = None
) -> Callable[[], None]:
    model = setting.build(partial(GPT, sizes.config))
    step = dt.compose_step(gpt_loss, transforms, microbatch_size=microbatch_size)
    state = step.init(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    return Training(step=step, state=state, batch=batch).run


def _layers(setting: Setting, width: int) -> nn.Module:
    """Return layers with dropout, whose kernels give the same bits each time."""

    def make() -> nn.Module:
        blocks = [nn.Sequential(nn.Linear(width, width), nn.Dropout(0.1), nn.GELU()) for _ in range(4)]
        return nn.Sequential(*blocks, nn.Linear(width, 1))

    return setting.build(make)


def _induced_failures(setting: Setting, sizes: Sizes, memory: Memory) -> Table:
    """Run steps whose first size does not fit; compare each with a step that starts with the size that fits."""
    setting.release()
    auto, fixed = _layers(setting, sizes.width), _layers(setting, sizes.width)
    optimizers = {net: torch.optim.SGD(net.parameters(), lr=1e-6) for net in (auto, fixed)}
    batch = torch.randn(sizes.rows, 256, sizes.width)
    memory.limit = _limit_below_whole_batch(auto, batch[: sizes.rows // 4].to(setting.device), memory)
    live, equal, failed, took = 0, 0, 0, []
    deadline = time.perf_counter() + setting.seconds / 4
    for number in range(sizes.failures):
        if not setting.toy and time.perf_counter() > deadline:
            break
        torch.manual_seed(number)
        step = dt.compose_step(square_loss, [dt.auto_microbatch(initial_size=sizes.rows)])
        begun = time.perf_counter()
        state, _ = step(step.init(auto, optimizers[auto]), batch)
        took.append(time.perf_counter() - begun)
        size = state.transform_states["auto_microbatch"]["size"]
        failed += 0 < size < sizes.rows
        torch.manual_seed(number)
        step = dt.compose_step(square_loss, microbatch_size=size or None)
        state, _ = step(step.init(fixed, optimizers[fixed]), batch)
        equal += all(torch.equal(a, b) for a, b in zip(auto.parameters(), fixed.parameters(), strict=True))
        del state, step
        gc.collect()
        # The first step allocates memory that a run keeps, such as workspaces.
        live = live or memory.live
    return Table(
        title="Steps whose first size ran out of memory, each against a step that starts with the size that fits",
        columns=("steps", "ran out of memory", "equal bit for bit", "memory left over, bytes", "median s per failed step"),
        rows=[[len(took), failed, equal, memory.live - live, median(took)]],
    )


def _limit_below_whole_batch(net: nn.Module, quarter: Tensor, memory: Memory) -> int:
    """Return a limit in which about half of the batch fits, from the peak of a quarter."""
    live = memory.live
    memory.reset()
    square_loss(net, quarter).total.backward()
    net.zero_grad()
    return live + 2 * (memory.peak - live)
