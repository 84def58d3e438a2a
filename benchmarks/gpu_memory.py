"""Peak memory on a GPU: against the plan, and with each option that makes a model fit, beside its cost in time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

import dtrain as dt
from gpu_device import GIB, Memory, Setting, Training, draw_tokens, gpt_loss
from gpu_results import Cell, Table, band
from helpers.gpt import GPT, Block, GPTConfig
from measure import compare

TOLERANCE = 0.05  # of the measured peak
WARM_STEPS = 2  # the second step has the optimizer's state

Optimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    config: GPTConfig
    samples: int


FULL = Sizes(config=GPTConfig(n_layer=12, n_head=16, dim=1024, max_seq=1024, vocab=32_768), samples=8)
TOY = Sizes(config=GPTConfig(n_layer=2, n_head=2, dim=64, max_seq=64), samples=4)


FUSED_ADAMW: Optimizer = partial(torch.optim.AdamW, lr=1e-4, fused=True)
SGD: Optimizer = partial(torch.optim.SGD, lr=1e-4, momentum=0.9)
DECOUPLED_ADAMW: Optimizer = partial(dt.optim.DecoupledAdamW, lr=1e-4, weight_decay=1e-5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One row of the comparison with the plan."""

    name: str
    strategy: str = "replicate"
    precision: dt.Precision | None = None
    checkpoint: Literal["nothing", "matmuls"] | None = None
    optimizer: Optimizer = FUSED_ADAMW


BF16 = dt.Precision.preset("DEFAULT", "bf16")
LAYOUTS = (
    Layout(name="`replicate`, float32, fused AdamW"),
    Layout(name="`replicate`, SGD with momentum", optimizer=SGD),
    Layout(name="`replicate`, DecoupledAdamW", optimizer=DECOUPLED_ADAMW),
    Layout(name="`full_shard`, float32", strategy="full_shard"),
    Layout(name="`full_shard`, bf16", strategy="full_shard", precision=BF16),
    Layout(name="`full_shard`, bf16, blocks checkpointed", strategy="full_shard", precision=BF16, checkpoint="nothing"),
    Layout(name="`full_shard`, bf16, matmuls kept", strategy="full_shard", precision=BF16, checkpoint="matmuls"),
)

Change = Callable[[nn.Module], object]
CHECKPOINTED = partial(dt.shard.checkpoint_activations, blocks=(Block,))
OFFLOADED = partial(dt.shard.offload_activations, blocks=(Block,))


def _checkpointed_and_offloaded(model: nn.Module) -> None:
    OFFLOADED(CHECKPOINTED(model))


OPTIONS: dict[str, Change] = {
    "matmuls kept": partial(CHECKPOINTED, keep="matmuls"),
    "every second block computed again": partial(CHECKPOINTED, every=2),
    "every block computed again": CHECKPOINTED,
    "activations offloaded": OFFLOADED,
    "every second block offloaded": partial(OFFLOADED, every=2),
    "inputs of blocks offloaded, blocks computed again": _checkpointed_and_offloaded,
}


def memory(setting: Setting) -> Iterator[Table]:
    """Peak memory of a step against ``dtrain plan``, and of options against none."""
    sizes = TOY if setting.toy else FULL
    layouts = (LAYOUTS[0], LAYOUTS[5]) if setting.toy else LAYOUTS
    with setting.open_dist(), setting.memory():
        # From here on the workspaces exist, so a row holds none of them.
        facts = dt.planning.measure_device(setting.device)
    yield Table(
        title=f"Peak memory of a step against the plan, {_described(sizes)}",
        columns=("layout", "planned, GiB", "measured, GiB", "planned over measured", "verdict"),
        rows=(_plan_row(setting, sizes, layout) for layout in layouts),
        note=f"Target: within {TOLERANCE:.0%} of the measured peak of torch's allocator, whose rounding is planned. "
        f"Workspaces of matrix products, {facts.workspaces / 2**20:.3g} MiB here, are in neither column.",
    )
    with setting.open_dist(), setting.memory() as counter:
        names = list(OPTIONS)[2:4] if setting.toy else list(OPTIONS)
        yield Table(
            title=f"Activation memory: peak and time of a step with each option against none, {_described(sizes)}, bf16",
            columns=("option", "peak, GiB", "peak over none", "step, ms", "time over none", "A/A band"),
            rows=(_option_row(setting, sizes, name, counter, share=1 / len(names)) for name in names),
            note="`transforms.autocast` on plain parameters; offload copies to pinned memory. On a CPU offload does nothing.",
        )


def _described(sizes: Sizes) -> str:
    config = sizes.config
    return f"GPT of {config.n_layer} layers, dim {config.dim}, {sizes.samples} sequences of {config.max_seq} tokens"


def _planned(setting: Setting, sizes: Sizes, layout: Layout) -> int:
    """Return the planned peak in bytes, with the rounding of the allocator."""
    workload = dt.planning.Workload(
        model=partial(GPT, sizes.config),
        loss_fn=gpt_loss,
        batch=partial(draw_tokens, sizes.config),
        blocks=(Block,),
        optimizer=layout.optimizer,
        transforms=[dt.transforms.clip_by_norm(1.0)],
    )
    estimate = dt.planning.estimate_memory(
        workload,
        world_size=1,
        strategy=layout.strategy,
        microbatch_size=sizes.samples,
        precision=layout.precision,
        checkpoint=layout.checkpoint,
        device="cuda" if setting.device.type == "cuda" else "cpu",
    )
    return estimate.peak + dt.planning.library_memory(estimate).device_rounding


def _plan_row(setting: Setting, sizes: Sizes, layout: Layout) -> list[Cell]:
    # A plan needs a process without process groups.
    planned = _planned(setting, sizes, layout)
    change: Change = partial(CHECKPOINTED, keep=layout.checkpoint) if layout.checkpoint else _unchanged
    shard_args = {"strategy": layout.strategy, "precision": layout.precision}
    with setting.open_dist(), setting.memory() as counter:
        setting.release()
        before = counter.live
        step = _stepping(setting, sizes, change, layout.optimizer, shard_args, [dt.transforms.clip_by_norm(1.0)])
        measured = _peak(step, counter) - before
        del step
    ratio = planned / measured
    verdict = "met" if abs(ratio - 1) <= TOLERANCE else "not met"
    return [layout.name, planned / GIB, measured / GIB, ratio, verdict]


def _unchanged(model: nn.Module) -> None:
    return None


def _stepping(
    setting: Setting, sizes: Sizes, change: Change, optimizer: Optimizer, shard_args: dict[str, Any], transforms: list[Any]
) -> Callable[[], None]:
    """Return a function that trains one step."""
    model = setting.build(partial(GPT, sizes.config))
    change(model)
    model = dt.shard_model(model, dt.build_mesh(), blocks=(Block,), **shard_args)
    step = dt.compose_step(gpt_loss, transforms)
    batch = draw_tokens(sizes.config, sizes.samples).to(setting.device)
    return Training(step=step, state=step.init(model, optimizer(model.parameters())), batch=batch).run


def _peak(step: Callable[[], None], counter: Memory) -> int:
    """Return the peak of a step that finds the optimizer's state."""
    for _ in range(WARM_STEPS):
        step()
    counter.reset()
    step()
    return counter.peak


def _option_row(setting: Setting, sizes: Sizes, name: str, counter: Memory, *, share: float) -> list[Cell]:
    """Measure peaks one after the other, then the times of both sides interleaved."""
    make = partial(
        _stepping,
        setting,
        sizes,
        optimizer=FUSED_ADAMW,
        shard_args={"strategy": "replicate"},
        transforms=[dt.transforms.autocast("bf16")],
    )
    changes = {"none": _unchanged, name: OPTIONS[name]}
    steps, peaks = {}, {}
    for label, change in changes.items():
        setting.release()
        before = counter.live
        steps[label] = make(change)
        peaks[label] = _peak(steps[label], counter) - before
    timings = setting.timed(steps, share=share)["device"]
    ratio = compare(timings[name], timings["none"])
    return [name, peaks[name] / GIB, peaks[name] / peaks["none"], ratio.a_s * 1e3, ratio.ratio, band(ratio)]
