"""Speed of a training step on a GPU: tokens per second and MFU of a large GPT, and the overhead of small steps.

Both sides of a ratio train the same weights on the same batches. ``train`` compares the losses of both sides at the end;
``overhead`` first compares parameters after float64 steps, as ``step_overhead.py`` does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import dtrain as dt
from gpu_device import NOT_AVAILABLE, Setting, count_parameters, describe_missing, draw_tokens
from gpu_results import Cell, Table, band
from helpers.gpt import GPT, Block, GPTConfig, Linear
from measure import Comparison, Figure, Rounds, compare, typical, verdict
from step_overhead import WORKS, Composed, Hand, Work, check_arithmetic, gpt_work, looped

LARGE = GPTConfig(n_layer=20, n_head=16, dim=2048, max_seq=2048, vocab=32_768)
SMALL = GPTConfig(n_layer=2, n_head=2, dim=32, max_seq=32)
# Shapes of nanochat's models of depth 24 and 26: dim 64 times the depth, heads of 128.
NANOCHAT = {
    "d24": GPTConfig(n_layer=24, n_head=12, dim=1536, max_seq=2048, vocab=32_768),
    "d26": GPTConfig(n_layer=26, n_head=13, dim=1664, max_seq=2048, vocab=32_768),
}
SAMPLES = 8
TRAIN_AT_MOST, FP8_AT_MOST = 1.0, 1 / 1.15  # of the time by hand, in bf16
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

    @property
    def parameters(self) -> int:
        """Number of weights."""
        return count_parameters(partial(GPT, self.config))

    def model(self) -> nn.Module:
        """Return the model with the same float32 weights each time."""
        return self.setting.build(partial(GPT, self.config))

    def adamw(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def batches(self) -> list[Tensor]:
        return [draw_tokens(self.config, SAMPLES, seed).to(self.setting.device) for seed in range(4)]


def summed_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum")


def by_hand(job: TrainJob) -> Step:
    """The loop that most people write: autocast, compiled blocks, clipping, fused AdamW."""
    model = job.model()
    for block in _blocks(model):
        block.compile(backend=job.setting.backend)
    return _plain_step(job, model, autocast=True)


def like_torchtitan(job: TrainJob) -> Step:
    """FSDP2 with bf16 parameters and float32 reductions, compiled blocks and loss: the settings of torchtitan's trainer."""
    model = job.model()
    mesh = init_device_mesh(job.setting.device.type, (1,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in _blocks(model):
        block.compile(backend=job.setting.backend)
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return _plain_step(job, model, autocast=False)


def _blocks(model: nn.Module) -> list[Block]:
    return [module for module in model.modules() if isinstance(module, Block)]


def _plain_step(job: TrainJob, model: nn.Module, *, autocast: bool) -> Step:
    optimizer = job.adamw(model)

    def step(batch: Tensor) -> Tensor:
        targets = batch[:, 1:]
        with torch.autocast(job.setting.device.type, torch.bfloat16, enabled=autocast):
            loss = job.loss(model(batch[:, :-1]), targets) / targets.numel()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def with_dtrain(job: TrainJob, *, autocast: bool = False, fp8: bool = False) -> Step:
    """A composed step, in bf16 by autocast or by FSDP2's mixed precision; the blocks multiply in 8 bits if ``fp8``."""

    def loss_fn(model: nn.Module, batch: Tensor) -> dt.LossSum:
        targets = batch[:, 1:]
        return dt.LossSum(total=job.loss(model(batch[:, :-1]), targets), weight=targets.numel())

    precision = None if autocast else dt.Precision.preset("DEFAULT", "bf16")
    strategy = "replicate" if autocast else "full_shard"
    model = _in_8_bits(job) if fp8 else job.model()
    model = dt.shard_model(model, dt.build_mesh(), strategy=strategy, blocks=(Block,), precision=precision)
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


def _in_8_bits(job: TrainJob) -> nn.Module:
    model = job.model()
    for layer in (module for module in model.modules() if type(module) is Linear):
        # The example's subclass differs in its initial weights alone; subclasses are not converted.
        layer.__class__ = nn.Linear
    return dt.shard.convert_to_fp8(model, ignore="head", emulate=job.setting.device.type != "cuda")


def train(setting: Setting) -> Iterator[Table]:
    """Tokens per second and MFU of GPTs in bf16 and fp8, compiled, against the same models by hand."""
    job = TrainJob(setting=setting, config=SMALL if setting.toy else LARGE, loss=summed_cross_entropy)
    compiled = replace(job, loss=torch.compile(summed_cross_entropy, backend=setting.backend))
    torchtitan = Side(name="by hand, FSDP2 and compiled loss, as torchtitan", make=like_torchtitan)
    ours = Side(name="dtrain, `full_shard`, `Precision`, the same loss", make=with_dtrain, at_most=TRAIN_AT_MOST)
    with setting.open_dist():
        sides = [
            Side(
                name="dtrain, `replicate`, `transforms.autocast`",
                make=partial(with_dtrain, autocast=True),
                at_most=TRAIN_AT_MOST,
            ),
            Side(name="by hand, autocast", make=by_hand),
        ]
        yield trained(job, sides, kind="bf16 by autocast", share=0.25)
        setting.release()
        yield trained(compiled, [ours, torchtitan], kind="bf16 by mixed precision of FSDP2", share=0.25)
        fp8 = Side(name="dtrain, the same in fp8, `tensorwise`", make=partial(with_dtrain, fp8=True), at_most=FP8_AT_MOST)
        for depth, config in ({"d24": SMALL} if setting.toy else NANOCHAT).items():
            setting.release()
            shape = replace(compiled, config=config)
            yield trained(shape, [ours, fp8, torchtitan], kind=f"shape of nanochat's {depth}, bf16 and fp8", share=0.2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One side of a comparison.

    Args:
        name: first cell of its row.
        make: function that builds the model and returns its step.
        at_most: target over the time by hand; None for the side by hand.
    """

    name: str
    make: Callable[[TrainJob], Step]
    at_most: float | None = None


def trained(job: TrainJob, sides: Sequence[Side], *, kind: str, share: float) -> Table:
    """Time the steps of all sides, and compare the losses of the first one and of the last one, which is by hand.

    A side between them that fails, such as fp8 without torchao, gets a row with its reason.
    """
    batches = job.batches()
    losses: dict[str, Tensor] = {}
    reasons: dict[str, str] = {}

    def loop(name: str, step: Step) -> Callable[[], None]:
        endless = cycle(batches)

        def run() -> None:
            losses[name] = step(next(endless))

        return run

    runs = {}
    for side in sides:
        try:
            run = loop(side.name, side.make(job))
            # The first call compiles.
            run()
        except NOT_AVAILABLE as error:
            if side in (sides[0], sides[-1]):
                raise
            reasons[side.name] = describe_missing(error)
        else:
            runs[side.name] = run
    timings = job.setting.timed(runs, share=share)["device"]
    hand = timings[sides[-1].name]
    return Table(
        title=f"GPT of {job.parameters:,} parameters, {SAMPLES} sequences of {job.config.max_seq} tokens per step, {kind}",
        columns=("step", "tokens/s", "ms per step", "MFU, %", "time over by hand", "A/A band", "last loss", "verdict"),
        rows=[
            [side.name, *[None] * 6, reasons[side.name]]
            if side.name in reasons
            else _train_row(job, side, timings[side.name], compare(timings[side.name], hand), losses[side.name])
            for side in sides
        ],
        note=_loss_note(losses, sides),
    )


def _train_row(job: TrainJob, side: Side, timings: Rounds, ratio: Comparison, loss: Tensor) -> list[Cell]:
    tokens, seconds = SAMPLES * job.config.max_seq, typical(timings).value
    rate = tokens / seconds
    flops = dt.monitors.transformer_flops(
        # An embedding table is looked up, not multiplied.
        params=job.parameters - job.config.vocab * job.config.dim,
        layers=job.config.n_layer,
        dim=job.config.dim,
        seq=job.config.max_seq,
    )
    peak = job.setting.peak_flops
    utilization = None if peak is None else 100 * rate * flops / peak
    against: list[Cell] = ["", "", loss.item(), ""]
    if side.at_most is not None:
        against = [ratio.ratio, band(ratio), loss.item(), verdict(ratio.ratio, at_most=side.at_most)]
    return [side.name, rate, seconds * 1e3, utilization, *against]


def _loss_note(losses: Mapping[str, Tensor], sides: Sequence[Side]) -> str:
    # Products in 8 bits, of the sides between, give another loss.
    apart = abs(losses[sides[0].name].item() / losses[sides[-1].name].item() - 1)
    same = "the losses in bf16 agree" if apart <= SAME_LOSS else "**the losses differ**: the sides did not do the same"
    targets = " and ".join(f"{at_most:.3f}" for at_most in dict.fromkeys(side.at_most for side in sides) if at_most is not None)
    return (
        f"Target: at most {targets} of the time by hand. MFU: `dt.monitors.transformer_flops`, which counts as nanochat does, "
        f"over the dense bf16 rate of `dt.monitors.peak_flops`, also for fp8. After as many steps {same}, by {apart:.1e}."
    )


MIDDLE = GPTConfig(n_layer=12, n_head=12, dim=768, max_seq=1024)
MIDDLE_WORK = gpt_work("12-layer GPT, dim 768", MIDDLE, at_most=1.01)


def overhead(setting: Setting) -> Iterator[Table]:
    """Time of a composed step over the same step by hand, without CUDA graphs, for tiny and middle models."""
    works = [WORKS["mlp"]] if setting.toy else [*WORKS.values(), MIDDLE_WORK]
    works = [replace(work, device=str(setting.device), build=partial(setting.build, work.build)) for work in works]
    yield Table(
        title="Composed step (loss, clipping, average, 4 microbatches) against the same step by hand, float32 with TF32",
        columns=("model", "clock", "by hand, ms", "dtrain, ms", "dtrain over by hand", "A/A band", "difference, us", "verdict"),
        rows=(row for work in works for row in _overhead_rows(setting, work, share=1 / len(works))),
        note=(
            "Host: until Python goes on. Device: between CUDA events before the first and after the last of the steps of one "
            "call, between which the host does not wait."
        ),
    )


def _overhead_rows(setting: Setting, work: Work, *, share: float) -> list[list[Cell]]:
    # Kernels of a GPU add in another order on each side. A wrong weight shows as 1e-4 and more.
    check_arithmetic(work, [Composed, Hand], steps=2 if setting.toy or work.name == MIDDLE_WORK.name else 20, tolerance=1e-8)
    setting.release()
    # Steps per call: a tiny step is short beside the wait for the device after a call.
    steps = 1 if setting.toy else 10 if work.name == WORKS["mlp"].name else 2
    before = dt.dist.use_tf32()
    try:
        sides = {"dtrain": Composed(work, torch.float32), "by hand": Hand(work, torch.float32)}
        runs = {name: partial(_repeat, looped(side, work.batches()), steps) for name, side in sides.items()}
        timings = setting.timed(runs, share=share)
    finally:
        dt.dist.use_tf32(before)
    rows: list[list[Cell]] = []
    for clock, by_name in timings.items():
        found = compare(by_name["dtrain"], by_name["by hand"])
        apart = found.difference
        micros = Figure(**{edge: 1e6 * getattr(apart, edge) / steps for edge in ("value", "low", "high")})
        millis = [1e3 * found.b_s / steps, 1e3 * found.a_s / steps]
        rows.append([work.name, clock, *millis, found.ratio, band(found), micros, verdict(found.ratio, at_most=work.at_most)])
    return rows


def _repeat(run: Callable[[], object], times: int) -> None:
    for _ in range(times):
        run()
