"""A rank that fails between two collectives must not leave its peers waiting: it plays its part to the end, or warns them.

Two ways, chosen by what is known. *By warning*: at first, before each collective the ranks exchange on the control group
whether one has failed, and write down which collectives there are. *By heart*: when these were the same twice, nothing is
exchanged any more and nothing is looked at; a rank that fails knows from the groups' own sequence numbers how many of the
collectives it has issued, and issues the rest with zeros, so that the peers come to the vote that follows. Nobody uses what
they computed.

The collectives of a stretch (a forward, a backward) must be the same whenever it runs: those of FSDP2 depend on the parameters
alone, and on what is gathered already. Where they turn out to differ, or come from the user's code, whose sizes may be another
batch's next time, the ranks go on by warning; after a try that failed, too, since it has left nothing gathered.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map

from dtrain.dist.collectives import all_gather_numbers
from dtrain.dist.dispatch import Watch, arguments, group_of, is_collective
from dtrain.dist.init import current


class PeerFailed(Exception):  # not for users: what a rank that is fine is left by
    """Another rank has failed, and says so before a collective that this rank was about to issue."""


@dataclass(frozen=True, slots=True)
class _Hole:
    """Where a tensor was among the arguments of a collective."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def zeros(self) -> Tensor:
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """One collective: what to issue in its place, and what makes it the same as another."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    group: dist.ProcessGroup
    sameness: tuple[object, ...]


Stretch = tuple[_Call, ...]

_OF_PARAMETERS = ("dtrain.step.weights", "torch.nn.modules._functions")
_ON_THE_WAY = {  # between whoever asks for a collective and our look at it
    __name__,
    "dtrain.dist.dispatch",
    "torch._compile",
    "torch._dynamo.eval_frame",
    "torch._library.autograd",
    "torch._ops",
    "torch.distributed._functional_collectives",
    "torch.distributed.c10d_logger",
    "torch.distributed.distributed_c10d",
    "torch.utils._contextlib",
    "torch.utils._python_dispatch",
}


@dataclass(slots=True, eq=False)
class Replay:
    """What this process knows of the collectives of one model, stretch by stretch.

    Args:
        known: by the name of a stretch.
        sure: those that were seen twice.
        always_warn: the stretches differ again and again, or cannot be played: their sizes depend on the batch.
        patience: how often they may still differ.
        kind: what the runs that are known have in common.
    """

    known: dict[str, Stretch] = field(default_factory=dict)
    sure: set[str] = field(default_factory=set)
    always_warn: bool = False
    patience: int = 5
    kind: object = None

    def begin(self, kind: object) -> None:
        """The next run is of ``kind``: what is known of runs of another one is forgotten. Alike on every rank."""
        if kind != self.kind:
            self.kind = kind
            self.forget()

    def knows(self, script: Sequence[str]) -> bool:
        """Whether a rank that fails in ``script`` could play the rest of it. The same on all ranks."""
        return not self.always_warn and self.sure.issuperset(script)

    def forget(self) -> None:
        """The next runs may be others. Every rank must call it, or none."""
        self.known.clear()
        self.sure.clear()


class Part:
    """This rank's part in one run of a script: a list of stretches. ``open_part`` makes it."""

    __slots__ = ("_before", "_begun", "_calls", "_due", "_exchanged", "_foreign", "_replay", "_script", "_totals", "warns")

    def __init__(self, replay: Replay, script: Sequence[str]) -> None:
        self._replay, self._script = replay, tuple(script)
        self.warns = not replay.knows(script)
        self._exchanged = False  # this rank has told of its failure, or heard of another's
        self._foreign = False  # a collective was none of FSDP2's or ours
        self._due: tuple[_Call, int] | None = None  # the others are about to issue it: its number there
        self._calls: dict[int, list[_Call]] = {}
        self._begun = -1
        self._totals = {} if self.warns else _totals(call.group for name in script for call in replay.known[name])
        self._before = {group: _sequence(group) for group in self._totals}

    def enter(self, name: str) -> None:
        """The next stretch of the script begins.

        Raises:
            ValueError: it is another than ``name``.
        """
        self._begun += 1
        if self._script[self._begun] != name:
            raise ValueError(f"replay: {name!r} in place of {self._script[self._begun]!r}")

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Look at every operation where the ranks warn each other; nothing where they know the script by heart."""
        if not self.warns:
            yield
            return
        info = current()
        own = [group for group in (info.control, info.background) if group is not None]

        def look(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if is_collective(func):
                group = group_of(arguments(func, args, kwargs))
                if group is not None and group not in own:
                    self._warn()
                    self._foreign |= not _depends_on_parameters_alone(sys._getframe(1))
                    call = _call(func, args, kwargs, group)
                    self._due = call, _sequence(group)
                    self._calls.setdefault(self._begun, []).append(call)

        with Watch(look):
            yield

    def done(self) -> bool:
        """This rank has come to the end. Whether that was another run than the ones before.

        Collective: where the ranks warn, one record on the control group.

        Raises:
            PeerFailed: another rank has not.
        """
        if self.warns:
            self._warn()
            return self._learn() or self._foreign
        return any(_sequence(group) - self._before[group] != total for group, total in self._totals.items())

    def differed(self) -> None:
        """On some rank it was another run: do not rely on what is known. Every rank must call it, or none."""
        self._replay.patience -= 1
        self._replay.always_warn |= self._replay.patience <= 0
        self._replay.forget()

    def abandoned(self) -> None:
        """It has failed on some rank. Every rank must call it, or none."""
        self._replay.forget()

    def stand_in(self) -> None:
        """This rank has failed, and dropped what it held: let the others come to the end.

        Collective: those that this rank has not issued; where the ranks warn, one record on the control group.
        """
        if self.warns:
            if self._due is not None and _sequence(self._due[0].group) == self._due[1]:
                # Memory ran out in the collective itself, after this rank had said that it would come.
                _wait(_play(self._due[0]))
            if not self._exchanged:
                self._exchanged = True
                all_gather_numbers([True], where="step")
            return
        issued = {group: _sequence(group) - before for group, before in self._before.items()}
        for call in (call for name in self._script for call in self._replay.known[name]):
            if issued[call.group] > 0:
                issued[call.group] -= 1
            else:
                _wait(_play(call))  # one at a time: there is no memory to spare

    def _warn(self) -> None:
        if self._exchanged:
            return  # what communicates after a failure, to clean up, does so on all ranks
        self._due = None
        rows = all_gather_numbers([False], where="step")
        if any(row[0] for row in rows):
            self._exchanged = True
            raise PeerFailed

    def _learn(self) -> bool:
        """Keep what was seen; whether it contradicts itself, or what was seen before."""
        contradicts = False
        for at, name in enumerate(self._script):
            seen = tuple(self._calls.get(at, ()))
            if name in self._replay.known:
                self._replay.sure.add(name)
            known = self._replay.known.setdefault(name, seen)
            contradicts |= [call.sameness for call in known] != [call.sameness for call in seen]
        return contradicts


def _depends_on_parameters_alone(frame: FrameType | None) -> bool:
    """Whether a collective is of FSDP2, of torch's SyncBatchNorm or of our sum of weights: these have the same sizes always."""
    while frame is not None and (name := frame.f_globals.get("__name__", "")) in _ON_THE_WAY:
        frame = frame.f_back
    return frame is not None and (name in _OF_PARAMETERS or name.startswith("torch.distributed.fsdp."))


def open_part(replay: Replay, script: Sequence[str]) -> Part:
    """Begin ``script`` on this rank. Every rank must, with the same names."""
    return Part(replay, script)


def _totals(groups: Iterator[dist.ProcessGroup]) -> dict[dist.ProcessGroup, int]:
    totals: dict[dist.ProcessGroup, int] = {}
    for group in groups:
        totals[group] = totals.get(group, 0) + 1
    return totals


def _sequence(group: dist.ProcessGroup) -> int:
    """How many collectives this rank has issued on ``group``: gloo and NCCL count them, torch's types do not know it."""
    return int(group._get_sequence_number_for_group())  # type: ignore[attr-defined]


def _call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], group: dist.ProcessGroup) -> _Call:
    """What to issue in the place of a collective. It holds no tensor: those of a step are large."""
    shapes: list[object] = []

    def hole(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        shapes.append((tuple(value.shape), value.dtype))
        return _Hole(value.shape, value.dtype, value.device)

    holed_args, holed_kwargs = tree_map(hole, (args, kwargs))
    return _Call(func, holed_args, holed_kwargs, group, (func.name(), group.group_name, *shapes))


def _play(call: _Call) -> Any:
    args, kwargs = tree_map(lambda value: value.zeros() if isinstance(value, _Hole) else value, (call.args, call.kwargs))
    return call.func(*args, **kwargs)


def _wait(result: Any) -> None:
    """Until a collective that was issued is over; its tensors must live so long."""
    if isinstance(result, Tensor):
        torch.ops._c10d_functional.wait_tensor(result)
        return
    for value in result if isinstance(result, tuple | list) else (result,):
        if isinstance(value, torch.ScriptObject):
            dist.Work.unbox(value).wait()
        elif isinstance(value, list | tuple):
            _wait(value)
