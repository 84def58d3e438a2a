"""Measure the cost of every method per step against the same method written by hand, and weight averages against the peers.

    python benchmarks/algorithms.py                             # everything: about ten minutes on two free cores
    python benchmarks/algorithms.py --only ema mixup            # some
    python benchmarks/algorithms.py --out results/algorithms.json   # for docs/recipes/*.md

A transform is listed in a composed step, and a loop in plain PyTorch does the same (benchmarks/algorithms_by_hand.py); the
ratio is of whole steps of a small convolutional network (for sequences: of a small block of a transformer) in processor time.
A surgery is measured against the same network without it, so its ratio is the cost of the method itself. Both have the A/A band
of the same run beside them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from datetime import date
from functools import partial
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dtrain as dt
from algorithms_by_hand import CLASSES, METHODS, Batch, Hand
from measure import CPU, Comparison, compare, interleaved, machine, verdict_line

AGAINST = "the same step written by hand (a surgery: against the model without it)"
SAME = 1e-6  # relative, after some float64 steps; another method leaves 1e-4 and more
STEPS = 20  # of the check that both sides do the same arithmetic


class Small(nn.Module):
    """Four convolutions with batch norm, and dropout before the last layer."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [(3, 16, 1), (16, 32, 2), (32, 64, 2), (64, 64, 1)]
        stages = [
            nn.Sequential(nn.Conv2d(i, o, 3, s, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU()) for i, o, s in sizes
        ]
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(64, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stages(x).mean((2, 3)))


class Rms(nn.Module):
    """A norm written out in Python."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.eps = 1e-6
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class Block(nn.Module):
    """A block of a transformer: attention, norms of each kind, a wide layer, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(100, 64), nn.Embedding(64, 64)
        self.attention, self.rms = nn.MultiheadAttention(64, 4, batch_first=True), Rms(64)
        self.norm, self.group_norm = nn.LayerNorm(64), nn.GroupNorm(4, 64)
        self.inner, self.act, self.outer = nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)
        self.dropout, self.head = nn.Dropout(0.1), nn.Linear(64, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) + self.places(torch.arange(x.shape[1]))
        x = x + self.attention(*[self.rms(x)] * 3, need_weights=False)[0]
        x = x + self.dropout(self.outer(self.act(self.inner(self.norm(x)))))
        return self.head(self.group_norm(x.transpose(1, 2)).transpose(1, 2))


class Mixture(Block):
    """The block with experts in place of its wide layer."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = dt.experts.Router(64, 8, top_k=2), dt.experts.Experts(64, 128, 8)
        self.inner, self.outer = nn.Identity(), nn.Identity()
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) + self.places(torch.arange(x.shape[1]))
        x = x + self.attention(*[self.rms(x)] * 3, need_weights=False)[0]
        rows = self.norm(x)
        x = x + self.experts(rows, self.router(rows))
        return self.head(self.group_norm(x.transpose(1, 2)).transpose(1, 2))


def images(generator: torch.Generator) -> Batch:
    x = torch.rand(32, 3, 16, 16, generator=generator)
    return {"x": x, "y": torch.randint(CLASSES, (32,), generator=generator)}


def texts(generator: torch.Generator) -> Batch:
    x = torch.randint(100, (16, 64), generator=generator)
    return {"x": x, "y": x % CLASSES}


def batches(draw: Callable[[torch.Generator], Batch]) -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    return [draw(generator) for _ in range(8)]


def model_of(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def loss_fn(model: nn.Module, batch: dt.typing.Batch) -> dt.LossSum:
    return dt.soft_cross_entropy(model(batch["x"]), batch["y"])


def sample_losses(model: nn.Module, batch: dt.typing.Batch) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A transform to measure.

    Args:
        make: makes it; None is a step without any.
        kind: of the model.
        draw: of a batch.
        exact: if True, both sides must reach the same parameters. False for methods that draw random numbers.
    """

    make: Callable[[], dt.Transform | None]
    kind: type[nn.Module] = Small
    draw: Callable[[torch.Generator], Batch] = images
    exact: bool = True


DRAWN = partial(Case, exact=False)
TRANSFORMS: dict[str, Case] = {
    "nothing": Case(make=lambda: None),  # the cost of the composed step itself, which all other rows include
    "clip_by_norm": Case(make=lambda: dt.transforms.clip_by_norm(0.5)),
    "clip_by_value": Case(make=lambda: dt.transforms.clip_by_value(0.01)),
    "adaptive_clip": Case(make=lambda: dt.transforms.adaptive_clip(0.01)),
    "nonfinite": Case(make=lambda: dt.transforms.nonfinite("skip")),
    "centralize_gradients": Case(make=dt.transforms.centralize_gradients),
    "noise_scale": Case(
        make=lambda: dt.transforms.noise_scale(every=2), exact=False
    ),  # halves have batch statistics of their own
    "sam": Case(make=lambda: dt.transforms.sam(0.05), exact=False),  # the second forward counts in the batch norms once
    "ema": Case(make=lambda: dt.transforms.ema(0.999)),
    "swa": Case(make=lambda: dt.transforms.swa(start=0, end=10**9, every=5)),
    "balance_experts": Case(make=lambda: dt.transforms.balance_experts(0.001), kind=Mixture, draw=texts),
    "freeze": Case(make=lambda: dt.transforms.freeze("stages.**")),
    "freeze_layers": Case(make=lambda: dt.transforms.freeze_layers(start=10**6, end=2 * 10**6)),
    "local_sgd": Case(make=lambda: dt.transforms.local_sgd(5)),
    "diloco": Case(make=lambda: dt.transforms.diloco(5)),
    "selective_backprop": DRAWN(make=lambda: dt.transforms.selective_backprop(sample_losses)),
    "label_smoothing": Case(make=lambda: dt.transforms.label_smoothing(0.1, num_classes=CLASSES)),
    "mixup": DRAWN(make=lambda: dt.transforms.mixup(0.2, num_classes=CLASSES)),
    "cutmix": DRAWN(make=lambda: dt.transforms.cutmix(num_classes=CLASSES)),
    "cutout": DRAWN(make=dt.transforms.cutout),
    "colout": DRAWN(make=dt.transforms.colout),
    "rand_augment": DRAWN(make=dt.transforms.rand_augment),
    "augmix": DRAWN(make=dt.transforms.augmix),
    "progressive_resizing": Case(make=lambda: dt.transforms.progressive_resizing(start=10**6, end=2 * 10**6)),
    "sequence_length_warmup": DRAWN(
        make=lambda: dt.transforms.sequence_length_warmup(dt.schedules.constant(32), input_key="x"), kind=Block, draw=texts
    ),
    "scale_lr": Case(make=lambda: dt.transforms.scale_lr(dt.schedules.cosine(1.0, 0.1, 10_000))),
    "scale_option": Case(make=lambda: dt.transforms.scale_option("weight_decay", dt.schedules.linear(1.0, 0.0, 10_000))),
    "set_option": Case(make=lambda: dt.transforms.set_option("weight_decay", dt.schedules.linear(1e-2, 0.0, 10_000))),
    "autocast": Case(make=lambda: dt.transforms.autocast("bf16"), exact=False),
    "loss_scale": Case(make=lambda: dt.transforms.loss_scale(2.0**16, grow_every=10**6)),
}
SURGERIES: dict[str, tuple[Callable[[nn.Module], nn.Module], type[nn.Module], Callable[[torch.Generator], Batch]]] = {
    "blur_pool": (dt.surgery.blur_pool, Small, images),
    "channels_last": (dt.surgery.channels_last, Small, images),
    "factorize": (lambda m: dt.surgery.factorize(m, min_channels=32, latent_channels=0.5), Small, images),
    "ghost_batch_norm": (lambda m: dt.surgery.ghost_batch_norm(m, ghost_batch_size=16), Small, images),
    "squeeze_excite": (lambda m: dt.surgery.squeeze_excite(m, min_channels=32), Small, images),
    "stochastic_depth": (lambda m: dt.surgery.stochastic_depth(m, ["stages.3"], drop_rate=0.5), Small, images),
    "weight_standardization": (dt.surgery.weight_standardization, Small, images),
    "alibi": (lambda m: dt.surgery.alibi(m, attentions={nn.MultiheadAttention: "num_heads"}, positions="places"), Block, texts),
    "gated_linear_units": (lambda m: dt.surgery.gated_linear_units(m, networks={Block: ("inner", "act")}), Block, texts),
    "gyro_dropout": (dt.surgery.gyro_dropout, Block, texts),
    "low_precision_layer_norm": (dt.surgery.low_precision_layer_norm, Block, texts),
    "low_precision_group_norm": (dt.surgery.low_precision_group_norm, Block, texts),
    "fused_layer_norm": (dt.surgery.fused_layer_norm, Block, texts),
}


class Composed:
    """The step as dtrain composes it."""

    def __init__(self, model: nn.Module, transforms: Sequence[dt.Transform]) -> None:
        self.composed = dt.compose_step(loss_fn, transforms)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        self.state = self.composed.init(model, optimizer)
        self.params = list(self.state.params.values())

    def step(self, batch: Batch) -> None:
        self.state, _ = self.composed(self.state, batch)


def looped(side: Any, given: list[Batch]) -> Callable[[], object]:
    """Return a function that runs one step of ``side`` per call, and repeats the batches."""
    endless = cycle(given)
    return lambda: side.step(next(endless))


def transforms_of(case: Case) -> list[dt.Transform]:
    made = case.make()
    return [] if made is None else [made]


def check_same(name: str, case: Case, given: list[Batch]) -> None:
    """Stop here if both sides do not reach the same parameters in float64: then they did different arithmetic."""
    sides = [Composed(model_of(case.kind).double(), transforms_of(case)), METHODS[name](model_of(case.kind).double())]
    for batch in (given * STEPS)[:STEPS]:
        wide = {key: value.double() if value.is_floating_point() else value for key, value in batch.items()}
        for side in sides:
            side.step(wide)
    ours, theirs = (torch.cat([p.detach().flatten() for p in side.params]) for side in sides)
    apart = float((ours - theirs).norm() / theirs.norm())
    if not apart <= SAME:
        raise SystemExit(f"{name}: the step by hand does something else: parameters differ by {apart:.1e} (relative)")


def of_transform(name: str, rounds: int) -> Comparison:
    """A composed step with the transform against the step by hand."""
    case, given = TRANSFORMS[name], batches(TRANSFORMS[name].draw)
    if case.exact:
        check_same(name, case, given)
    sides = {"dtrain": Composed(model_of(case.kind), transforms_of(case)), "hand": METHODS[name](model_of(case.kind))}
    runs = {which: looped(side, given) for which, side in sides.items()}
    seen = interleaved(runs, rounds=rounds, warmup=5, clocks={"cpu": CPU})["cpu"]
    return compare(seen["dtrain"], seen["hand"])


def of_surgery(name: str, rounds: int) -> Comparison:
    """A step of the model with the surgery against one of the model without."""
    surgery, kind, draw = SURGERIES[name]
    sides = {"with": Hand(surgery(model_of(kind))), "without": Hand(model_of(kind))}
    runs = {which: looped(side, batches(draw)) for which, side in sides.items()}
    seen = interleaved(runs, rounds=rounds, warmup=5, clocks={"cpu": CPU})["cpu"]
    return compare(seen["with"], seen["without"])


def averages(rounds: int) -> None:
    """An average of 500 tensors, against torch's and Composer's."""
    generator = torch.Generator().manual_seed(0)
    model = nn.ParameterList([nn.Parameter(torch.randn(64, 64, generator=generator)) for _ in range(500)])
    params = dict(model.named_parameters())
    kept = {name: p.detach().clone() for name, p in params.items()}
    runs: dict[str, Callable[[], object]] = {"dtrain": lambda: dt.transforms.update_ema_(kept, params, 0.99)}
    peer = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.99))
    runs["torch"] = lambda: peer.update_parameters(model)
    if find_spec("composer"):
        from composer.algorithms.ema import compute_ema

        other = deepcopy(model)
        runs["composer"] = lambda: compute_ema(model, other, smoothing=0.99)
    seen = interleaved(runs, rounds=rounds, warmup=5, clocks={"cpu": CPU})["cpu"]
    for name in [name for name in runs if name != "dtrain"]:
        comparison = compare(seen["dtrain"], seen[name])
        print(f"EMA of 500 tensors, dtrain against {name}: {comparison}")
        print(verdict_line(f"EMA of 500 tensors, against {name}", comparison.ratio, at_most=1.0))
    if "composer" not in runs:
        print("EMA of 500 tensors, against composer: not installed")


def written(path: Path) -> dict[str, dict[str, float]]:
    """The figures that a file has already; none where there is no file yet."""
    return json.loads(path.read_text())["costs"] if path.exists() else {}


def write(path: Path, costs: dict[str, dict[str, float]]) -> None:
    """The file for the table, with the figures so far."""
    seen_on = f"{' / '.join(machine().removeprefix('machine: ').splitlines())}, {date.today()}"
    path.write_text(json.dumps({"against": AGAINST, "machine": seen_on, "costs": costs}, indent=1) + "\n")


def main() -> None:
    names = [*TRANSFORMS, *SURGERIES]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[*names, "averages"], metavar="NAME", help="(default: all)")
    parser.add_argument("--pairs", type=int, default=300, help="ratios per figure, rounded up to even (%(default)s)")
    parser.add_argument("--out", type=Path, help="a file of JSON; figures that are there already stay unless measured again")
    args = parser.parse_args()
    if args.pairs < 1:
        parser.error(f"--pairs must be at least 1, got {args.pairs}")
    if args.out is not None and not args.out.parent.is_dir():
        parser.error(f"--out is in a folder that is not there: {args.out}")
    costs = {} if args.out is None else written(args.out)
    rounds = (args.pairs + 1) // 2  # of two ratios each
    torch.set_num_threads(1)  # processor time is then the work that is done, not how long threads wait for each other
    print(machine())
    for name in args.only or [*names, "averages"]:
        if name == "averages":
            averages(rounds)
            continue
        comparison = of_transform(name, rounds) if name in TRANSFORMS else of_surgery(name, rounds)
        print(f"{name}: {comparison}", flush=True)
        ratio = comparison.ratio
        costs[name] = {
            key: round(value, 3) for key, value in (("ratio", ratio.value), ("low", ratio.low), ("high", ratio.high))
        }
        if args.out is not None:
            write(args.out, costs)  # after each case, so that an interrupted run keeps its results


if __name__ == "__main__":
    main()
