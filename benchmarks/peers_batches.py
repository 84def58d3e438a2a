"""Time dtrain's batch methods beside the functions of the same names in Composer, on a batch of small images."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock, patch

import torch
from torch import Tensor

import dtrain as dt
from measure import CPU, Rounds, Run, interleaved

IMAGES, CLASSES = (128, 3, 32, 32), 10
Method = Callable[[Tensor, Tensor, torch.Generator], object]

OURS: Mapping[str, Method] = {
    "cutout": lambda x, y, draw: dt.transforms.cutout_batch(x, generator=draw),
    "cutmix": lambda x, y, draw: dt.transforms.cutmix_batch((x, y), num_classes=CLASSES, generator=draw),
    "label_smoothing": lambda x, y, draw: dt.transforms.smooth_labels(y, 0.1, num_classes=CLASSES),
    "colout": lambda x, y, draw: dt.transforms.colout_batch(x, generator=draw),
    "mixup": lambda x, y, draw: dt.transforms.mixup_batch((x, y), num_classes=CLASSES, generator=draw),
}


def theirs(method: str) -> Run:
    """A call of Composer's function on the same images; it draws from global generators."""
    module, (x, y) = composer(method), batch()
    logits = torch.zeros(len(x), CLASSES)  # of which the function takes the shape
    calls: dict[str, Run] = {
        "cutout": lambda: module.cutout_batch(x),
        "cutmix": lambda: module.cutmix_batch(x, y),
        "label_smoothing": lambda: module.smooth_labels(logits, y, 0.1),
        "colout": lambda: module.colout_batch(x),
        "mixup": lambda: module.mixup_batch(x, y),
    }
    return calls[method]


def composer(method: str) -> Any:
    """Import the module of one of Composer's methods.

    Composer wants an older torch, and its trainer many packages. So the packages around the method are empty, and the modules
    that only the trainer and torchvision's datasets need are replaced: the timed functions call none of them.
    """
    (folder,) = find_spec("composer").submodule_search_locations  # type: ignore[union-attr, misc]
    names = ("", ".algorithms", f".algorithms.{method}", ".algorithms.utils", ".utils")
    packages: dict[str, Any] = {f"composer{name}": ModuleType(f"composer{name}") for name in names}
    for name in names:
        packages[f"composer{name}"].__path__ = [folder + name.replace(".", "/")]
    unused = ("composer.core", "composer.loggers", "torchvision", "torchvision.datasets", "torchvision.transforms.functional")
    stubs: dict[str, Any] = {name: MagicMock() for name in (*unused, "torchvision.transforms")}
    stubs["composer.core"].Algorithm = object
    with patch.dict(sys.modules, {**packages, **stubs}):
        packages["composer.utils"].add_vision_dataset_transform = None
        packages["composer.utils"].ensure_tuple = importlib.import_module("composer.utils.iter_helpers").ensure_tuple
        return importlib.import_module(f"composer.algorithms.{method}.{method}")


def batch() -> tuple[Tensor, Tensor]:
    """Images and class indices."""
    draw = torch.Generator().manual_seed(0)
    return torch.rand(IMAGES, generator=draw), torch.randint(CLASSES, (IMAGES[0],), generator=draw)


def batch_method(pairs: int, *, method: str) -> dict[str, dict[str, Rounds]]:
    """Time one method."""
    (x, y), draw = batch(), torch.Generator().manual_seed(0)
    runs: dict[str, Run] = {"dtrain": lambda: OURS[method](x, y, draw)}
    if find_spec("composer"):
        runs = {"Composer": theirs(method), **runs}
    return interleaved(runs, rounds=max(1, pairs // 2), warmup=5, clocks={"processor time": CPU})
