"""Take a supposed cause out of a run (``take_out``), or give it other seeds (``Seeds``) or batches (``Replay``, ``Padding``).

Runs that differ run again in these ways, which shows their cause (``causes.EXPERIMENTS``), or what differs besides.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as collectives_with_grad
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor
from torch.nn.utils import rnn
from torch.utils.data._utils.fetch import _MapDatasetFetcher

from dtrain.data import fetcher as fetchers
from dtrain.data.batch import MicrobatchList, _map_leaves, list_tensors, select_samples
from dtrain.data.dataset import read_samples
from dtrain.dist.dtensor import full_tensor, to_local
from dtrain.dist.rng import derive_seed
from dtrain.prove.causes import OF_REACH
from dtrain.prove.overrides import FrozenStatistics, replace_checkpoint
from dtrain.prove.run_config import RunConfig
from dtrain.prove.run_log import RunLog, count_samples
from dtrain.prove.script_values import ScriptModels, script_frames

# Hooks take the place of these functions.
_save, _load, _seed_python = torch.save, torch.load, random.seed


class Replay:
    """Batches that a run on one rank has read, in the place of those that the ranks of another run read.

    The first batch of a loader on one rank is dealt to the ranks for their first batch, and so on.

    Args:
        config: the run. On one rank, batches are written.
        rank: this rank.
    """

    def __init__(self, config: RunConfig, rank: int) -> None:
        self._config, self._rank = config, rank
        self._numbers = Counter[str]()

    def exchange(self, loader: str, batch: Any) -> Any:
        """Return this rank's samples for the next batch of a loader, which has read ``batch``.

        If the ranks cannot share the batch equally, a rank keeps its own, and the samples still differ.
        """
        if not self._config.batches:
            return batch
        path = Path(self._config.batches, f"{loader}-{self._numbers[loader]}.pt")
        self._numbers[loader] += 1
        if self._config.ranks == 1:
            _write_batch(path, batch)
        elif path.exists():
            whole = _load(path, weights_only=False)
            samples, ranks = count_samples(whole), self._config.ranks
            own = torch.arange(self._rank, samples, ranks, device="cpu")
            if samples % ranks == 0 or len(own) == count_samples(batch):
                return select_samples(whole, own)
        return batch


def _write_batch(path: Path, batch: Any) -> None:
    # An experiment runs with the batches that are there.
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".part")
    # Not every object of a script is a batch with rows, or can be written.
    with contextlib.suppress(Exception):
        # A copy does not have the position in the loader.
        _save(select_samples(batch, torch.arange(count_samples(batch), device="cpu")), unfinished)
        unfinished.rename(path)


class Reach:
    """Positions of an output that a change of one input reaches, for the experiments ``OF_REACH``.

    Args:
        config: the run.
        log: files of the rank.
    """

    def __init__(self, config: RunConfig, log: RunLog) -> None:
        self._log, self._is_due = log, config.experiment in OF_REACH

    def measure(self, model: Callable[..., Any], args: Any, kwargs: Any) -> None:
        """Write how many positions of the first sample a change of its first element reaches, in the first forward.

        The change is that of rank 0, which has the begin of a sequence. The other ranks run the model twice, too, because it
        may have collectives.
        """
        if not self._is_due or not args or not isinstance(args[0], Tensor) or args[0].ndim < 2 or not torch.is_grad_enabled():
            return
        self._is_due = False
        changed = args[0].clone()
        others = changed[changed != changed[0, 0]]
        if not self._log.rank and len(others):
            changed[0, 0] = others[0]
        with torch.no_grad():
            outputs = [list_tensors([model(first, *args[1:], **kwargs)])[0][0] for first in (args[0], changed)]
        reached = (outputs[0] != outputs[1]).reshape(len(outputs[0]), -1).any(1)
        self._log.write("reach", reached=int(reached.sum()))


class Slope:
    """The move of one parameter before the first step, and the gradient along it, for a finite difference of the loss.

    Each element moves by a share of itself and of ``_LEAST_MOVE``, so that parameters of 0 move, too.

    Args:
        config: the run, whose ``shifted`` names the parameter and the share.
        log: files of the rank.
    """

    _LEAST_MOVE = 0.1

    def __init__(self, config: RunConfig, log: RunLog) -> None:
        self._shifted, self._log = config.shifted, log
        self._direction: Tensor | None = None

    def shift_(self, models: ScriptModels) -> None:
        """Move the parameter, once. Mutates it. Collective for a DTensor, as in ``full_tensor``."""
        if self._shifted is None or self._direction is not None:
            return
        name, share = self._shifted
        params = models.parameters()
        if name not in params:
            return
        param = params[name].detach()
        self._direction = full_tensor(param).clone() + self._LEAST_MOVE
        local = to_local(param)
        local += share * (local + self._LEAST_MOVE)

    def measure(self, name: str, gradient: Tensor) -> None:
        """Write the gradient along the move, if it is that of the parameter. Collective for a DTensor."""
        if self._direction is not None and self._shifted is not None and name == self._shifted[0]:
            self._log.write("slope", slope=float((full_tensor(gradient.detach()) * self._direction).sum()))


class Padding:
    """Batches that are padded to one width, for the experiment ``padding_in_loss``: all layouts then have equal paddings.

    Args:
        config: the run, whose ``width`` is that of its widest batch; 0 changes nothing.

    Mutates: ``pad_sequence``, with a width.
    """

    def __init__(self, config: RunConfig) -> None:
        self._width = config.width
        # By the place of the tensor in its batch. A batch of samples of one length has no padding.
        self._values: dict[int, float] = {}
        if self._width:
            self._widen_pad_sequence()

    def widen(self, batch: Any) -> Any:
        """Return a batch whose tensors are longer along their second axis, if that is the axis of its sequences."""
        first = next((tensor for tensor in list_tensors(batch) if tensor.ndim > 1), None)
        if not self._width or first is None:
            return batch
        if type(batch) is MicrobatchList:
            return MicrobatchList(map(self.widen, batch))
        places, width = iter(range(len(list_tensors(batch)))), first.shape[1]

        def pad(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            place = next(places)
            if leaf.ndim < 2 or leaf.shape[1] != width:
                return leaf
            value = padding_value(leaf)
            value = self._values.setdefault(place, value) if value is not None else self._values.get(place, 0)
            # A mask of attention has two axes of this length.
            amounts = [(0, max(0, self._width - size) if size == width else 0) for size in leaf.shape[:0:-1]]
            return F.pad(leaf, list(chain(*amounts)), value=value)

        return _map_leaves(batch, pad, lambda tensors: tensors.apply(pad))

    def _widen_pad_sequence(self) -> None:
        pad = rnn.pad_sequence

        @functools.wraps(pad)
        def widened(sequences: Any, batch_first: bool = False, padding_value: float = 0.0, **options: Any) -> Tensor:
            padded = pad(sequences, batch_first, padding_value, **options)
            axis = 1 if batch_first else 0
            missing = max(0, self._width - padded.shape[axis])
            return F.pad(padded, [0, 0] * (padded.ndim - axis - 1) + [0, missing], value=padding_value)

        rnn.pad_sequence = widened  # type: ignore[assignment]


def padding_value(tensor: Tensor) -> float | None:
    """Return the number at the end of the rows of ``tensor`` ``[n, width, ...]`` that looks like padding; None if none does."""
    if tensor.is_floating_point() or tensor.ndim > 2 or tensor.shape[1] < 2:
        return 0.0
    last = tensor[:, -1]
    if tensor.dtype == torch.bool or bool(((tensor == 0) | (tensor == 1)).all()):
        # A mask, which is 1 at the end of the longest sample.
        return 0.0
    if bool((last == -100).any()):
        return -100.0
    ends = Counter(last[last == tensor[:, -2]].tolist())
    return float(ends.most_common(1)[0][0]) if ends else None


class Seeds:
    """Seeds that the script gives to generators. They are recorded, and replaced by those of ``config.seeds``.

    Args:
        config: the run.
        log: files of the rank.

    Mutates: functions and classes of torch, NumPy and ``random``.
    """

    def __init__(self, config: RunConfig, log: RunLog) -> None:
        self._config, self._log = config, log
        self._calls = Counter[str]()
        torch.manual_seed = self._first_argument(torch.manual_seed)
        random.seed = self._first_argument(random.seed)
        np.random.seed = self._first_argument(np.random.seed)
        np.random.default_rng = self._first_argument(np.random.default_rng)
        random.Random = _seeded_random(self._seed)  # type: ignore[misc]
        torch.Generator = _seeded_generator(self._seed)  # type: ignore[misc]

    def _first_argument(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def seeded(*args: Any, **kwargs: Any) -> Any:
            return function(self._seed(args[0]), *args[1:], **kwargs) if args else function(**kwargs)

        return seeded

    def _seed(self, seed: Any) -> Any:
        """Return the seed that replaces ``seed``, and record it by its place in the script and the number of the call there."""
        frames = script_frames(sys._getframe(2), self._config.script) if isinstance(seed, int) else []
        if not frames:
            return seed
        place = f"{frames[0].f_code.co_filename}:{frames[0].f_lineno}"
        number = self._calls[place]
        self._calls[place] += 1
        self._log.write("seed", place=place, seed=seed)
        others = self._config.seeds.get(place, ())
        return others[number] if number < len(others) else seed


def _seeded_random(seed: Callable[[Any], Any]) -> type[random.Random]:
    class Random(random.Random):
        def seed(self, a: Any = None, version: int = 2) -> None:
            super().seed(seed(a), version)

    return Random


def _seeded_generator(seed: Callable[[Any], Any]) -> type[torch.Generator]:
    class OfGenerators(type(torch._C.Generator)):  # type: ignore[misc]
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, torch._C.Generator)

    class Generator(torch._C.Generator, metaclass=OfGenerators):
        def manual_seed(self, value: int) -> torch.Generator:
            return super().manual_seed(seed(value))

    return Generator


def _return_gradients_through_gathers() -> None:
    """Let ``all_gather`` and ``all_gather_into_tensor`` return gradients to the ranks whose tensors they gather."""
    gather, gather_into = dist.all_gather, dist.all_gather_into_tensor

    @functools.wraps(gather)
    def gathered(tensor_list: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False) -> Any:
        if not (tensor.requires_grad and torch.is_grad_enabled()):
            return gather(tensor_list, tensor, group, async_op)
        tensor_list[:] = collectives_with_grad.all_gather(tensor, group or dist.group.WORLD)
        return None

    @functools.wraps(gather_into)
    def gathered_into(output: Tensor, tensor: Tensor, group: Any = None, async_op: bool = False) -> Any:
        if not (tensor.requires_grad and torch.is_grad_enabled()):
            return gather_into(output, tensor, group, async_op)
        parts = collectives_with_grad.all_gather(tensor, group or dist.group.WORLD)
        output.copy_(torch.cat([part.reshape(-1) for part in parts]).view_as(output))
        return None

    dist.all_gather, dist.all_gather_into_tensor = gathered, gathered_into  # type: ignore[assignment]


def _clip_nothing() -> None:
    clip = torch.nn.utils.clip_grad_norm_

    @functools.wraps(clip)
    def measured(parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> Tensor:
        return clip(parameters, float("inf"), *args, **kwargs)

    torch.nn.utils.clip_grad_norm_ = measured
    torch.nn.utils.clip_grad_value_ = lambda *args, **kwargs: None


def _keep_random_state() -> None:
    """Let activation checkpointing restore the random state before it computes a block again."""
    checkpoint = torch.utils.checkpoint.checkpoint

    @functools.wraps(checkpoint)
    def restored(function: Any, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(function, *args, **{**kwargs, "preserve_rng_state": True})

    replace_checkpoint(restored)


def _seed_samples() -> None:
    """Give the global generators a seed of the sample before a dataset reads it, and their states back after the batch."""
    fetch, read = _MapDatasetFetcher.fetch, read_samples

    @functools.wraps(fetch)
    def fetched(fetcher: Any, indices: Any) -> Any:
        dataset = fetcher.dataset
        fetcher.dataset = _SeededSamples(dataset)
        try:
            with kept_states():
                return fetch(fetcher, indices)  # type: ignore[no-untyped-call]
        finally:
            fetcher.dataset = dataset

    @functools.wraps(read)
    def read_seeded(dataset: Any, indices: list[int]) -> list[Any]:
        with kept_states():
            return [_SeededSamples(dataset)[index] for index in indices]

    _MapDatasetFetcher.fetch = fetched  # type: ignore[method-assign]
    fetchers.read_samples = read_seeded  # type: ignore[attr-defined]


class _SeededSamples:
    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitem__(self, index: Any) -> Any:
        seed = derive_seed("prove sample", str(index)) % 2**32
        torch.default_generator.manual_seed(seed)
        np.random.mtrand._rand.seed(seed)
        _seed_python(seed)
        return self._dataset[index]


@contextlib.contextmanager
def kept_states() -> Iterator[None]:
    """Give the global generators of torch, NumPy and Python their states back at the end."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])


def take_out(code: str) -> None:
    """Take the cause with a code out of the script. Mutates: functions and classes of torch and dtrain, in this process."""
    if code in CHANGES:
        CHANGES[code]()


CHANGES: Mapping[str, Callable[[], object]] = {
    "local_batch_norm": FrozenStatistics,
    "gather_without_gradient": _return_gradients_through_gathers,
    "clip_local_norm": _clip_nothing,
    "augmentation_by_worker": _seed_samples,
    "recompute_draws_again": _keep_random_state,
}
"""Functions that take out a cause, by its code. Seeds are changed where the script sets them (``Seeds``), batches where it
reads them (``Padding``).
"""
