"""``Calls``: what a loss asked of its model, cut into microbatches, and how each of them is run again for its gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from dtrain.batch import count_samples, narrow_batch, tensors_of, zeros_like_samples
from dtrain.dist.rng import KeptRandomness
from dtrain.errors import ConfigError

_WHERE = "cached_microbatch_step"
_PLAIN = (bool, int, float, str, type(None))  # what a model may return beside tensors


@dataclass(slots=True, kw_only=True, eq=False)
class _Call:
    """One call of the model by the loss.

    Args:
        inputs: ``[args, kwargs]`` for the whole local batch.
        places: first row and number of rows of each microbatch; none of a rank without rows.
        autocast: makes a context with the autocast that the loss called in.
        drawn: the random generators before each forward.
        outputs: of the only forward, with their graph, where there is one microbatch.
        kept: what was returned and may get a gradient, whole, by its place among the outputs.
        grads: the gradients of ``kept``, of those that the loss made use of.
    """

    inputs: list[Any]
    places: Sequence[tuple[int, int]]
    autocast: Callable[[], AbstractContextManager[Any]]
    drawn: list[KeptRandomness] = field(default_factory=list)
    outputs: Sequence[Any] = ()
    kept: dict[int, Tensor] = field(default_factory=dict)
    grads: dict[int, Tensor] = field(default_factory=dict)

    def place(self, index: int) -> tuple[int, int] | None:
        """The rows of microbatch ``index``; None for one that counts nothing: other ranks have more."""
        place = self.places[index] if index < len(self.places) else (0, 0)
        return place if place[1] else None

    def part(self, index: int) -> list[Any]:
        """Its inputs; in place of one that counts nothing the first that does, or zeros."""
        place = self.place(index) or next((place for place in self.places if place[1]), None)
        return list(narrow_batch(self.inputs, *place) if place else zeros_like_samples(self.inputs))


class Calls:
    """The calls of ``model`` in one step.

    Args:
        bounds: the samples at which this rank's microbatches begin, and their number.
        microbatches: how many forwards each call makes, the same on all ranks.
    """

    def __init__(self, model: nn.Module, bounds: Sequence[int], microbatches: int) -> None:
        self.model = model
        self.cached = microbatches > 1  # a single microbatch keeps its graph, and is not run again
        self._bounds, self._microbatches = bounds, microbatches
        self._calls: list[_Call] = []

    def embed(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What the model returns for the whole local batch: leaves, from which a gradient is taken.

        Mutates: these calls; the random generators, as the forwards do.
        """
        wanted, inputs = torch.is_grad_enabled(), [args, dict(kwargs)]
        if any(tensor.requires_grad for tensor in tensors_of(inputs)):
            raise ConfigError(
                f"{_WHERE}: an argument of model(...) needs a gradient, which would stop there; call the model on data, and "
                "let it do all that is to be cut into microbatches"
            )
        places = self._places(inputs)
        call = _Call(inputs=inputs, places=places, autocast=_autocast_like_now(tensors_of(inputs)[0].device))
        own, empty = list[list[Any]](), list[Any]()
        for index in range(self._microbatches):
            if wanted and self.cached:
                call.drawn.append(KeptRandomness())
            with torch.set_grad_enabled(wanted and not self.cached):
                flat, tree = _forward(self.model, call, index)
            if call.place(index):
                own.append([leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in flat])
            elif not empty:
                empty = [leaf.detach()[:0] if isinstance(leaf, Tensor) else leaf for leaf in flat]
            if not self.cached:
                call.outputs = flat
        joined = [_joined(leaves) for leaves in zip(*(own or [empty]), strict=True)]
        if wanted:
            call.kept = {at: leaf.requires_grad_() for at, leaf in enumerate(joined) if _differentiable(leaf)}
            self._calls.append(call)
        return tree_unflatten(joined, tree)

    def kept(self) -> list[Tensor]:
        """All that was returned and may get a gradient."""
        return [leaf for call in self._calls for leaf in call.kept.values()]

    def take(self, grads: Sequence[Tensor | None]) -> None:
        """The gradients of ``kept()``, None where the loss made no use of it. Mutates: these calls, which forget the rest."""
        left = iter(grads)
        for call in self._calls:
            found = {at: next(left) for at in call.kept}
            call.grads = {at: grad for at, grad in found.items() if grad is not None}
            call.kept.clear()

    def counts(self, index: int) -> bool:
        """Whether microbatch ``index`` is one of this rank's own."""
        return index < len(self._bounds) - 1

    def again(self, index: int) -> list[tuple[Tensor, Tensor]]:
        """What microbatch ``index`` returns, with its graph, and the gradient of it: zeros where it counts nothing.

        Mutates: buffers, as its forwards do; no random generator.
        """
        pairs: list[tuple[Tensor, Tensor]] = []
        for call in self._calls:
            outputs = call.outputs
            if self.cached:
                with _drawing_again(call.drawn[index]):
                    outputs, _ = _forward(self.model, call, index)
            place = call.place(index)
            for at, grad in call.grads.items():
                if outputs[at].requires_grad:
                    pairs.append((outputs[at], grad.narrow(0, *place) if place else torch.zeros_like(outputs[at])))
        return pairs

    def _places(self, inputs: list[Any]) -> list[tuple[int, int]]:
        """Where the rows of ``inputs`` are cut: as the samples are, also when there are several rows to each."""
        try:
            rows = count_samples(inputs)
        except ConfigError:
            shapes = ", ".join(str(list(tensor.shape)) for tensor in tensors_of(inputs))
            raise ConfigError(
                f"{_WHERE}: the tensors that model(...) is called with must have one number of rows (first axis), got shapes "
                f"{shapes or 'of no tensor'}; give each of them a row per sample"
            ) from None
        samples = self._bounds[-1]
        cuts = [bound * rows // samples for bound in self._bounds] if samples else [0, rows]
        return [(start, end - start) for start, end in pairwise(cuts)]


class StandIn:
    """What a loss gets in place of the model: called, it embeds in microbatches; for the rest it is the model."""

    __slots__ = ("_dtrain_calls",)

    def __init__(self, calls: Calls) -> None:
        self._dtrain_calls = calls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._dtrain_calls.embed(args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dtrain_calls.model, name)

    @property  # type: ignore[misc]  # for isinstance(model, nn.Module), as weakref.proxy does it
    def __class__(self) -> type:
        return type(self._dtrain_calls.model)


def _forward(model: nn.Module, call: _Call, index: int) -> tuple[list[Any], TreeSpec]:
    args, kwargs = call.part(index)
    with call.autocast():
        flat, tree = tree_flatten(model(*args, **kwargs))
    rows = count_samples([args, kwargs])
    for leaf in flat:
        if not isinstance(leaf, (Tensor, *_PLAIN)) or (isinstance(leaf, Tensor) and leaf.shape[:1] != (rows,)):
            got = f"shape {list(leaf.shape)}" if isinstance(leaf, Tensor) else f"a {type(leaf).__name__}"
            raise ConfigError(
                f"{_WHERE}: the model must return tensors with a row for each row that it was called with ({rows}), got {got}; "
                "return embeddings, and compute the loss of them in loss_fn"
            )
    return flat, tree


def _joined(leaves: Sequence[Any]) -> Any:
    return torch.cat(list(leaves)) if len(leaves) > 1 and isinstance(leaves[0], Tensor) else leaves[0]


def _differentiable(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def _autocast_like_now(device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    """Makes contexts with the autocast of now. Weights cast without a graph must not be found again where one is wanted."""
    kind = device.type
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    return lambda: torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False)


@contextmanager
def _drawing_again(drawn: KeptRandomness) -> Iterator[None]:
    """A context in which the random generators go on from where they were. Mutates: them, while it lasts."""
    now = KeptRandomness()
    drawn.put_back()
    try:
        yield
    finally:
        now.put_back()
