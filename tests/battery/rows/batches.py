"""Rows of transforms that change the batch."""

from __future__ import annotations

import math

import torch

from battery.row import Points, Row
from dtrain.losses import soft_cross_entropy
from dtrain.schedules.clock import Clock
from dtrain.schedules.durations import Duration, RunLength
from dtrain.transforms.batches.cutout import colout, colout_batch, cutout, cutout_batch
from dtrain.transforms.batches.mixup import cutmix, cutmix_batch, label_smoothing, mixup, mixup_batch, smooth_labels
from dtrain.transforms.batches.progressive_resizing import linear_growth, progressive_resizing, resize_batch
from dtrain.transforms.batches.rand_augment import augmix, augmix_batch, jensen_shannon, rand_augment, rand_augment_batch
from dtrain.transforms.combinators import every

SWAP = torch.tensor([1, 0])


def _pair(height: int = 2, width: int = 4) -> dict[str, torch.Tensor]:
    """An image of zeros with label 0, and one of ones with label 2."""
    return {"x": torch.arange(2.0).reshape(2, 1, 1, 1).expand(2, 1, height, width), "y": torch.tensor([0, 2])}


def _mixup_points() -> Points:
    made = mixup_batch(_pair(), num_classes=3, coefficient=0.7, order=SWAP)
    return [
        (made["x"][:, 0, 0, 0], [0.3, 0.7]),
        (made["y"], [[0.7, 0.0, 0.3], [0.3, 0.0, 0.7]]),
        # The loss of mixed targets is the mixed loss: -0.7 log(1/2) - 0.3 log(1/4) for the first.
        (soft_cross_entropy(torch.tensor([[2.0, 1.0, 1.0]]).log(), made["y"][:1]).total, 1.3 * math.log(2)),
    ]


def _cutmix_points() -> Points:
    made = cutmix_batch(_pair(), num_classes=3, box=(1, 2, 7, 4), order=SWAP)  # two of eight pixels are in the image
    long = cutmix_batch(_pair(10, 20), num_classes=3, length=0.4, order=SWAP, generator=torch.Generator().manual_seed(0))
    return [
        (made["x"][0, 0], [[0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0]]),
        (made["y"], [[0.75, 0.0, 0.25], [0.25, 0.0, 0.75]]),
        (long["x"][0].sum(), 4 * 8),  # four tenths of both sides
        (long["y"][0, 2], 0.16),
    ]


def _cutout_points() -> Points:
    clipped = cutout_batch(torch.ones(1, 3, 3), boxes=(-1, 1, 1, 9), fill=5.0)
    inside = cutout_batch(torch.ones(3, 8, 10), length=0.25, placement="inside", generator=torch.Generator().manual_seed(0))
    return [
        (clipped[0], [[1.0, 5.0, 5.0], [1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]),
        (inside.sum(), 3 * (80 - 4)),  # a quarter of eight pixels is two
    ]


def _colout_points() -> Points:
    image = torch.arange(12.0).reshape(1, 3, 4)
    made = colout_batch(image, rows=torch.tensor([0, 2]), columns=torch.tensor([1, 3]))
    drawn = colout_batch(torch.ones(1, 20, 40), generator=torch.Generator().manual_seed(0))
    return [(made[0], [[1.0, 3.0], [9.0, 11.0]]), (drawn.shape, [1, 17, 34])]


def _smoothing_points() -> Points:
    logits = torch.tensor([[2.0, 1.0, 1.0]]).log()
    return [
        (smooth_labels(torch.tensor([1, -100]), 0.3, num_classes=3), [[0.1, 0.8, 0.1], [0.0, 0.0, 0.0]]),
        (smooth_labels(torch.tensor([[0.5, 0.5, 0.0]]), 0.3), [[0.45, 0.45, 0.1]]),
        # 0.8 log 2 + 0.2 log 4, with smoothed targets or with a loss that smooths
        (soft_cross_entropy(logits, torch.tensor([0]), smoothing=0.3).total, 1.2 * math.log(2)),
    ]


def _rand_augment_points() -> Points:
    chains = [[("brightness", 0.5), ("solarize", 0.0)], [("posterize", 1), ("identity", 0.0)]]
    turned = rand_augment_batch(torch.tensor([[[0.1, 0.2], [0.3, 0.4]]]), chains=[[("rotate", 90.0)]])
    return [
        (rand_augment_batch(torch.full((2, 1, 1, 1), 0.6), chains=chains)[:, 0, 0, 0], [0.7, 128 / 255]),
        (turned[0], [[0.2, 0.4], [0.1, 0.3]]),
    ]


def _augmix_points() -> Points:
    invert, same = [("solarize", 0.0)], [("solarize", 256.0)]
    chains, weights = [[invert, same], [same, invert]], [[0.25, 0.5], [0.75, 0.5]]
    made = augmix_batch(torch.full((2, 1, 1, 1), 0.2), chains=chains, weights=weights, image_weights=[0.5, 0.2])
    sure = torch.tensor([[100.0, 0.0, 0.0]])
    return [
        (made[:, 0, 0, 0], [0.5 * 0.2 + 0.5 * (0.25 * 0.8 + 0.75 * 0.2), 0.2 * 0.2 + 0.8 * 0.5]),
        (jensen_shannon([sure, sure.roll(1, 1), sure.roll(2, 1)]).total, math.log(3)),
    ]


def _resizing_points() -> Points:
    scale = linear_growth(0.5, Duration.parse("0.5dur"), Duration.parse("0.8dur"))
    run = RunLength(total=20)
    return [
        ([scale(Clock(step=step, run_length=run)) for step in (0, 10, 13, 16, 19)], [0.5, 0.5, 0.75, 1.0, 1.0]),
        (resize_batch(torch.arange(4.0).expand(1, 2, 4), scale=0.5, size_increment=1)[0, 0], [5 / 7, 16 / 7]),
    ]


# Of smaller images dropout draws other numbers than in a run without the method, as in a second forward: reruns.
ROWS: dict[str, Row] = {
    "mixup": Row(make=lambda: mixup(0.5, num_classes=3), of=("mixup",), points=_mixup_points, task="image", per_rank=True),
    "mixup-each-scheduled": Row(make=lambda: mixup(lambda step: 0.2 + 0.1 * step, per_sample=True), per_rank=True),
    "every-mixup": Row(make=lambda: every(2, mixup(0.5, num_classes=3)), task="image", per_rank=True),
    "cutmix": Row(make=lambda: cutmix(num_classes=3), of=("cutmix",), points=_cutmix_points, task="image", per_rank=True),
    "cutmix-length": Row(make=lambda: cutmix(num_classes=3, length=0.5, per_sample=True), task="image", per_rank=True),
    "cutout": Row(make=lambda: cutout(), of=("cutout",), points=_cutout_points, task="image", per_rank=True),
    "colout": Row(make=lambda: colout(0.4), of=("colout",), points=_colout_points, task="image", per_rank=True, reruns=True),
    "label_smoothing": Row(
        make=lambda: label_smoothing(0.1, num_classes=3), of=("label_smoothing",), points=_smoothing_points, task="image"
    ),
    "rand_augment": Row(
        make=lambda: rand_augment(), of=("rand_augment",), points=_rand_augment_points, task="image", per_rank=True
    ),
    "augmix": Row(make=lambda: augmix(), of=("augmix",), points=_augmix_points, task="image", per_rank=True),
    "progressive_resizing": Row(
        make=lambda: progressive_resizing(start="0.2dur", size_increment=1),
        of=("progressive_resizing",),
        points=_resizing_points,
        task="image",
        reruns=True,
    ),
    "progressive_resizing-crop": Row(
        make=lambda: progressive_resizing(method="crop", size_increment=1), task="image", per_rank=True, reruns=True
    ),
}
