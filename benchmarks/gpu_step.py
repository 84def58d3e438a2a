"""Speed of a training step on a GPU: tokens per second and MFU of a large GPT, and the overhead of small steps.

Both sides of a ratio train the same weights on the same batches. ``train`` compares the losses of both sides at the end;
``overhead`` first compares parameters after float64 steps, as ``step_overhead.py`` does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import dtrain as dt
from gpu_device import Setting
from gpu_results import Cell, Table
from measure import Comparison, Rounds, compare, typical, verdict
from step_overhead import WORKS, Composed, Hand, Work, check_arithmetic, looped

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from helpers.gpt import GPT, Block, GPTConfig

LARGE = GPTConfig(n_layer=20, n_head=16, dim=2048, max_seq=2048, vocab=32_768)
SMALL = GPTConfig(n_layer=2, n_head=2, dim=32, max_seq=32)
SAMPLES = 8
TRAIN_AT_MOST = 1 / 0.99
SAME_LOSS = 0.02  # relative, after some bf16 steps: kernels round in another order

LossOf = Callable[[Tensor, Tensor], Tensor]
Step = Callable[[Tensor], Tensor]
"""One training step on a batch; returns its mean loss, on the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainJob:
    """Model, batches and settings that both sides of a comparison share."""

    setting: Setting
    config: GPTConfig
    loss: LossOf

    def model(self) -> nn.Module:
        """Return the model with the same float32 weights each time."""
        torch.manual_seed(0)
        with self.setting.device:
            return GPT(self.config)

    def adamw(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def batches(self) -> list[Tensor]:
        generator = torch.Generator().manual_seed(1)
        shape = (SAMPLES, self.config.max_seq + 1)
        return [torch.randint(self.config.vocab, shape, generator=generator).to(self.setting.device) for _ in range(4)]


def summed_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum")


def by_hand(job: TrainJob) -> Step:
    """The loop that most people write: autocast, compiled blocks, clipping, fused AdamW."""
    model = job.model()
    for block in (module for module in model.modules() if isinstance(module, Block)):
        block.compile(backend=job.setting.backend)
    optimizer = job.adamw(model)

    def step(batch: Tensor) -> Tensor:
        targets = batch[:, 1:]
        with torch.autocast(job.setting.device.type, torch.bfloat16):
            loss = job.loss(model(batch[:, :-1]), targets) / targets.numel()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def like_torchtitan(job: TrainJob) -> Step:
    """FSDP2 with bf16 parameters and float32 reductions, compiled blocks and loss: the settings of torchtitan's trainer."""
    model = job.model()
    mesh = init_device_mesh(job.setting.device.type, (1,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in (module for module in model.modules() if isinstance(module, Block)):
        block.compile(backend=job.setting.backend)
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = job.adamw(model)

    def step(batch: Tensor) -> Tensor:
        targets = batch[:, 1:]
        loss = job.loss(model(batch[:, :-1]), targets) / targets.numel()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def with_dtrain(job: TrainJob, *, autocast: bool) -> Step:
    """A composed step, in bf16 by autocast or by FSDP2's mixed precision."""

    def loss_fn(model: nn.Module, batch: Tensor) -> dt.LossSum:
        targets = batch[:, 1:]
        return dt.LossSum(total=job.loss(model(batch[:, :-1]), targets), weight=targets.numel())

    precision = None if autocast else dt.Precision.preset("DEFAULT", "bf16")
    strategy = "replicate" if autocast else "full_shard"
    model = dt.shard_model(job.model(), dt.build_mesh(), strategy=strategy, blocks=(Block,), precision=precision)
    dt.compile_blocks(model, blocks=(Block,), backend=job.setting.backend)
    transforms = [dt.transforms.clip_by_norm(1.0), *([dt.transforms.autocast("bf16")] if autocast else [])]
    step = dt.compose_step(loss_fn, transforms)
    state = step.init(model, job.adamw(model))

    def run(batch: Tensor) -> Tensor:
        nonlocal state
        state, metrics = step(state, batch)
        loss = metrics["loss"]
        return loss.total / loss.weight

    return run


def train(setting: Setting) -> Iterator[Table]:
    """Tokens per second and MFU of a GPT of a billion parameters in bf16, compiled, against the same model by hand."""
    config = SMALL if setting.toy else LARGE
    plain = TrainJob(setting=setting, config=config, loss=summed_cross_entropy)
    compiled = replace(plain, loss=torch.compile(summed_cross_entropy, backend=setting.backend))
    with setting.open_dist():
        yield trained(plain, "by hand, autocast", by_hand, "dtrain, `replicate`, `transforms.autocast`", autocast=True)
        setting.release()
        title = "by hand, FSDP2 and compiled loss, as torchtitan"
        yield trained(compiled, title, like_torchtitan, "dtrain, `full_shard`, `Precision`, the same loss", autocast=False)


def trained(job: TrainJob, hand_name: str, hand: Callable[[TrainJob], Step], our_name: str, *, autocast: bool) -> Table:
    """Time the steps of both sides, and compare their losses."""
    batches = job.batches()
    steps = {our_name: with_dtrain(job, autocast=autocast), hand_name: hand(job)}
    losses: dict[str, Tensor] = {}

    def loop(name: str) -> Callable[[], None]:
        endless = cycle(batches)

        def run() -> None:
            losses[name] = steps[name](next(endless))

        return run

    timings = job.setting.timed({name: loop(name) for name in steps}, seconds=75)["device"]
    ratio = compare(timings[our_name], timings[hand_name])
    return Table(
        title=(
            f"GPT of {_parameters(job):,} parameters, {SAMPLES} sequences of {job.config.max_seq} tokens per step, bf16 by "
            f"{'autocast' if autocast else 'mixed precision of FSDP2'}"
        ),
        columns=("step", "tokens/s", "ms per step", "MFU, %", "time over by hand", "A/A band", "last loss", "verdict"),
        rows=[_train_row(job, name, timings[name], ratio if name == our_name else None, losses[name]) for name in steps],
        note=_loss_note(losses, our_name, hand_name),
    )


def _train_row(job: TrainJob, name: str, timings: Rounds, ratio: Comparison | None, loss: Tensor) -> list[Cell]:
    tokens, seconds = SAMPLES * job.config.max_seq, typical(timings).value
    rate = tokens / seconds
    flops = dt.monitors.transformer_flops(
        # An embedding table is looked up, not multiplied.
        params=_parameters(job) - job.config.vocab * job.config.dim,
        layers=job.config.n_layer,
        dim=job.config.dim,
        seq=job.config.max_seq,
    )
    device = job.setting.device
    peak = dt.monitors.peak_flops(torch.cuda.get_device_name(device), "bf16") if device.type == "cuda" else None
    utilization = None if peak is None else 100 * rate * flops / peak
    against: list[Cell] = ["", "", loss.item(), ""]
    if ratio is not None:
        low, high = ratio.band
        against = [ratio.ratio, f"{low:.3f} to {high:.3f}", loss.item(), verdict(ratio.ratio, at_most=TRAIN_AT_MOST)]
    return [name, rate, seconds * 1e3, utilization, *against]


def _parameters(job: TrainJob) -> int:
    with torch.device("meta"):
        return sum(param.numel() for param in GPT(job.config).parameters())


def _loss_note(losses: dict[str, Tensor], ours: str, theirs: str) -> str:
    apart = abs(losses[ours].item() / losses[theirs].item() - 1)
    same = "the losses agree" if apart <= SAME_LOSS else "**the losses differ**: the sides did not do the same"
    return (
        f"Target: at most {TRAIN_AT_MOST:.3f} of the time by hand. MFU: `dt.monitors.transformer_flops` over "
        f"`dt.monitors.peak_flops`. After as many steps {same}, by {apart:.1e}."
    )


def _middle_gpt() -> nn.Module:
    return GPT(MIDDLE)


MIDDLE = GPTConfig(n_layer=12, n_head=12, dim=768, max_seq=1024)


def _draw_middle(generator: torch.Generator) -> dict[str, Tensor]:
    text = torch.randint(256, (16, MIDDLE.max_seq + 1), generator=generator)
    return {"inputs": text[:, :-1].contiguous(), "labels": text[:, 1:].contiguous()}


MIDDLE_WORK = Work(
    name="12-layer GPT, dim 768", build=_middle_gpt, draw=_draw_middle, microbatch_size=4, at_most=1.02, blocks=(Block,)
)


def overhead(setting: Setting) -> Iterator[Table]:
    """Time of a composed step over the same step by hand, without CUDA graphs, for tiny and middle models."""
    works = [WORKS["mlp"]] if setting.toy else [*WORKS.values(), MIDDLE_WORK]
    works = [replace(work, device=str(setting.device)) for work in works]
    for work in works:
        # Kernels of a GPU add in another order on each side. A wrong weight shows as 1e-4 and more.
        check_arithmetic(work, [Composed, Hand], steps=2 if setting.toy or work.build is _middle_gpt else 20, tolerance=1e-8)
    setting.release()
    rows: list[list[Cell]] = []
    for work in works:
        rows += _overhead_rows(setting, work)
    yield Table(
        title="Composed step (loss, clipping, average, 4 microbatches) against the same step by hand, float32 with TF32",
        columns=("model", "clock", "by hand, ms", "dtrain, ms", "dtrain over by hand", "A/A band", "difference, us", "verdict"),
        rows=rows,
        note=(
            "Host: until Python goes on. Device: between CUDA events before the first and after the last of the steps of one "
            "call, between which the host does not wait."
        ),
    )


def _overhead_rows(setting: Setting, work: Work) -> list[list[Cell]]:
    steps = 1 if setting.toy else 10
    before = dt.dist.use_tf32()
    try:
        sides = {"dtrain": Composed(work, torch.float32), "by hand": Hand(work, torch.float32)}
        runs = {name: partial(_repeat, looped(side, work.batches()), steps) for name, side in sides.items()}
        timings = setting.timed(runs, seconds=60)
    finally:
        dt.dist.use_tf32(before)
    rows: list[list[Cell]] = []
    for clock, by_name in timings.items():
        comparison = compare(by_name["dtrain"], by_name["by hand"])
        low, high = comparison.band
        micros = [
            1e6 * edge / steps for edge in (comparison.difference.value, comparison.difference.low, comparison.difference.high)
        ]
        rows.append(
            [
                work.name,
                clock,
                comparison.b_s * 1e3 / steps,
                comparison.a_s * 1e3 / steps,
                comparison.ratio,
                f"{low:.3f} to {high:.3f}",
                replace(comparison.difference, value=micros[0], low=micros[1], high=micros[2]),
                verdict(comparison.ratio, at_most=work.at_most),
            ]
        )
    return rows


def _repeat(run: Callable[[], object], times: int) -> None:
    for _ in range(times):
        run()
