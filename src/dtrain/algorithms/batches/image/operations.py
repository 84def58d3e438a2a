"""The operations of AutoAugment and its successors by name, with their ranges; and images that each go through some of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from dtrain.algorithms.batches.image import colour, geometry, tones
from dtrain.algorithms.batches.image.values import on_device
from dtrain.errors import ConfigError
from dtrain.schedules.hyper import is_number

TOP = 10  # the highest level of strength

Chain: TypeAlias = Sequence[tuple[str, float]]
"""Operations that one image goes through in this order, each with its amount: ``[("rotate", -30.0), ("posterize", 4)]``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """An operation on images from 0 to 1, and how its amount follows from a level of strength, 0 to 10.

    Args:
        apply: ``(images [n, channels, height, width], amounts [n], fill) -> images``.
        none: the amount at level 0, which changes nothing.
        most: how far the amount is from that at level 10.
        signed: whether it may be that far to either side.
        whole: whether it is rounded to a whole number.
    """

    apply: Callable[[Tensor, Tensor, float], Tensor]
    none: float = 0.0
    most: float = 0.0
    signed: bool = False
    whole: bool = False

    def amount(self, level: float, drawn: random.Random) -> float:
        """What ``level`` comes to; a signed one draws its side."""
        distance = self.most * level / TOP
        if self.signed and drawn.random() < 0.5:
            distance = -distance
        return round(self.none + distance) if self.whole else self.none + distance


def _blend(apply: Callable[[Tensor, Tensor], Tensor]) -> Operation:
    return Operation(apply=lambda images, amount, fill: apply(images, amount), none=1.0, most=0.9, signed=True)


def _moving(apply: Callable[[Tensor, Tensor, float], Tensor], most: float) -> Operation:
    return Operation(apply=apply, most=most, signed=True)


OPERATIONS: dict[str, Operation] = {
    "identity": Operation(apply=lambda images, amount, fill: images),
    "autocontrast": Operation(apply=lambda images, amount, fill: tones.autocontrast(images)),
    "equalize": Operation(apply=lambda images, amount, fill: tones.equalize(images)),
    "rotate": _moving(geometry.rotate, 30.0),
    "solarize": Operation(apply=lambda images, amount, fill: tones.solarize(images, amount), none=256.0, most=-256.0),
    "colour": _blend(colour.colour),
    "posterize": Operation(apply=lambda images, amount, fill: tones.posterize(images, amount), none=8.0, most=-4.0, whole=True),
    "contrast": _blend(colour.contrast),
    "brightness": _blend(colour.brightness),
    "sharpness": _blend(colour.sharpness),
    "shear_x": _moving(geometry.shear_x, 0.3),
    "shear_y": _moving(geometry.shear_y, 0.3),
    "translate_x": _moving(geometry.translate_x, 150 / 331),  # AutoAugment's 150 pixels of images of 331
    "translate_y": _moving(geometry.translate_y, 150 / 331),
}
"""Ranges are those of Cubuk et al. 2019 (AutoAugment, arXiv:1805.09501, table 6)."""


def through_chains(images: Tensor, chains: Sequence[Chain], fill: float) -> Tensor:
    """Each image through its own chain; those with one operation in common go through it together.

    Args:
        images: ``[n, channels, height, width]`` from 0 to 1.
        chains: one for each image.
        fill: what is seen beside an image that was moved.

    Host sync: none.
    """
    for at in range(max(map(len, chains), default=0)):
        together: dict[str, list[int]] = {}
        for index, chain in enumerate(chains):
            if at < len(chain):
                together.setdefault(chain[at][0], []).append(index)
        images = _applied(images, {name: [(i, chains[i][at][1]) for i in them] for name, them in together.items()}, fill)
    return images


def _applied(images: Tensor, groups: dict[str, list[tuple[int, float]]], fill: float) -> Tensor:
    made = images.clone()
    for name, members in groups.items():
        amounts = on_device([amount for _, amount in members], images.dtype, images.device)
        if len(members) == len(images):
            return OPERATIONS[name].apply(images, amounts, fill)
        which = on_device([index for index, _ in members], torch.int64, images.device)
        made.index_copy_(0, which, OPERATIONS[name].apply(images.index_select(0, which), amounts, fill))
    return made


def check_operations(names: Sequence[str], where: str) -> None:
    """Raise ``ConfigError`` unless all are names of operations, and there are some."""
    unknown = [name for name in names if name not in OPERATIONS]
    if unknown or isinstance(names, str) or not names:
        raise ConfigError(f"{where}: operations are some of {', '.join(OPERATIONS)}; got {unknown[0] if unknown else names!r}")


def check_chains(chains: Sequence[Chain], count: int, where: str) -> None:
    """Raise ``ConfigError`` unless there is a chain of known operations for each of ``count`` images."""
    if len(chains) != count:
        raise ConfigError(f"{where}: needs a chain for each of {count} images, got {len(chains)}")
    for chain in chains:
        for name, _ in chain:
            check_operations([name], where)


def check_level(level: float, where: str, name: str) -> None:
    """Raise ``ConfigError`` unless ``level`` is in ``[0, 10]``."""
    if not is_number(level) or not 0 <= level <= TOP:
        raise ConfigError(f"{where}: needs {name} in [0, {TOP}], got {name}={level!r}")
