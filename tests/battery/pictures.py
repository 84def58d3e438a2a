"""Pictures of the recipe cards as PNG: four drawn images above, and the same images after a batch method below.

The images are computed, so nothing is downloaded, and the methods draw from seeded generators.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from einops import repeat
from torch import Tensor

import dtrain as dt
from battery.curves import IMAGES
from draws import generator

SIDE, GAP = 96, 8
SIGNATURE = b"\x89PNG\r\n\x1a\n"


def drawn() -> Tensor:
    """Return four images ``[4, 3, SIDE, SIDE]`` from 0 to 1: a disc, stripes, a ring and a square, on colored grounds."""
    coordinates = (torch.arange(SIDE) + 0.5) / SIDE * 2 - 1
    y, x = torch.meshgrid(coordinates, coordinates, indexing="ij")
    radius = (x.square() + y.square()).sqrt()
    shapes = [
        (radius < 0.6, (0.95, 0.75, 0.2), (0.15, 0.35, 0.65)),
        (((x + y) * 3).remainder(1.0) < 0.5, (0.85, 0.25, 0.2), (0.95, 0.9, 0.8)),
        ((radius > 0.4) & (radius < 0.75), (0.9, 0.95, 0.95), (0.1, 0.45, 0.35)),
        ((x.abs() < 0.55) & (y.abs() < 0.55), (0.45, 0.2, 0.55), (0.75, 0.85, 0.55)),
    ]
    shade = (0.85 + 0.15 * y).expand(SIDE, SIDE)
    images = []
    for inside, color, ground in shapes:
        image = torch.where(inside, torch.tensor(color).reshape(3, 1, 1), torch.tensor(ground).reshape(3, 1, 1))
        images.append(image * shade)
    return torch.stack(images)


def blurred(images: Tensor) -> Tensor:
    """Return stripes that a stride of 4 alone subsamples (two images), and after a blur (two images)."""
    coordinates = torch.arange(SIDE, dtype=torch.float32)
    stripes = (0.5 + 0.5 * (coordinates * 2.2).sin()).expand(SIDE, SIDE)
    checks = stripes * stripes.T
    fine = torch.stack([stripes, checks])[:, None].expand(2, 3, SIDE, SIDE)
    plain, smooth = fine[..., ::4, ::4], dt.surgery.blur_2d(fine, stride=4, kernel=dt.surgery.blur_kernel(5))
    return torch.cat([fine, *(repeat(x, "n c h w -> n c (h i) (w j)", i=4, j=4) for x in (plain, smooth))])


BATCHES: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "mixup": (
        "`mixup_batch` with `coefficient=0.7`: each image is mixed with the next one.",
        lambda x: dt.transforms.mixup_batch(
            {"x": x, "y": torch.arange(4)}, num_classes=4, coefficient=0.7, order=torch.tensor([1, 2, 3, 0])
        )["x"],
    ),
    "cutmix": (
        "`cutmix_batch` with a box of the next image, a fifth of the area.",
        lambda x: dt.transforms.cutmix_batch(
            {"x": x, "y": torch.arange(4)}, num_classes=4, box=(40, 30, 83, 73), order=torch.tensor([1, 2, 3, 0])
        )["x"],
    ),
    "cutout": (
        "`cutout_batch` with `length=0.4`.",
        lambda x: dt.transforms.cutout_batch(x, length=0.4, generator=generator(1)),
    ),
    "colout": (
        "`colout_batch` with `p_row=0.3` and `p_col=0.3`: the images are smaller.",
        lambda x: dt.transforms.colout_batch(x, p_row=0.3, p_col=0.3, generator=generator(1)),
    ),
    "rand_augment": (
        "`rand_augment_batch` with `magnitude=9` and `depth=2`.",
        lambda x: dt.transforms.rand_augment_batch(x, magnitude=9, generator=generator(3)),
    ),
    "augmix": (
        "`augmix_batch` with `severity=6`.",
        lambda x: dt.transforms.augmix_batch(x, severity=6, generator=generator(3)),
    ),
    "progressive_resizing": (
        "`resize_batch` with `scale=0.5`: the images are smaller.",
        lambda x: dt.transforms.resize_batch(x, scale=0.5),
    ),
}
"""By card: the sentence below the picture, and the method."""


def row(images: Tensor) -> Tensor:
    """Return images side by side as RGBA ``[4, SIDE, width]``; smaller images are at the top left of their place."""
    count = len(images)
    out = torch.zeros(4, SIDE, count * SIDE + (count - 1) * GAP)
    for k, image in enumerate(images.clamp(0, 1)):
        height, width = image.shape[-2:]
        place = out[:, :height, k * (SIDE + GAP) : k * (SIDE + GAP) + width]
        place[:3], place[3] = image, 1.0
    return out


def picture(above: Tensor, below: Tensor) -> Tensor:
    """Return two rows of images as bytes ``[height, width, 4]`` with a transparent gap."""
    first, second = row(above), row(below)
    both = torch.cat([first, torch.zeros(4, GAP, first.shape[-1]), second], dim=1)
    return (both * 255).round().to(torch.uint8).permute(1, 2, 0)


def pictures() -> Iterator[tuple[Path, Tensor]]:
    """Yield each picture and its pixels."""
    images = drawn()
    for name, (_, method) in BATCHES.items():
        yield IMAGES / f"{name}.png", picture(images, method(images))
    fine = blurred(images)
    yield IMAGES / "blur_pool.png", picture(fine[[0, 2, 4]], fine[[1, 3, 5]])


def encode(pixels: Tensor) -> bytes:
    """Return an RGBA PNG ``[height, width, 4]``. Each row is stored as its difference from the row above."""
    height, width, _ = pixels.shape
    rows = torch.cat([torch.zeros_like(pixels[:1]), pixels])
    changes = (rows[1:] - rows[:-1]).reshape(height, width * 4)  # uint8 wraps, as the format needs
    lines = b"".join(b"\x02" + bytes(line.tolist()) for line in changes)
    header = struct.pack(">IIBBBBB", width, height, 8, 6, 0, 0, 0)
    return SIGNATURE + _chunk(b"IHDR", header) + _chunk(b"IDAT", zlib.compress(lines, 9)) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def decode(data: bytes) -> Tensor:
    """Return the pixels of a PNG that ``encode`` wrote."""
    width, height = struct.unpack(">II", data[16:24])
    size = struct.unpack(">I", data[33:37])[0]
    lines = torch.frombuffer(bytearray(zlib.decompress(data[41 : 41 + size])), dtype=torch.uint8).reshape(height, -1)
    return lines[:, 1:].cumsum(0).remainder(256).to(torch.uint8).reshape(height, width, 4)


def alike(ours: Tensor, kept: Tensor) -> bool:
    """Return True if two pictures have one size and few pixels that differ visibly."""
    if ours.shape != kept.shape:
        return False
    different = (ours.int() - kept.int()).abs().amax(-1) > 8
    return bool(different.float().mean() < 0.01)
