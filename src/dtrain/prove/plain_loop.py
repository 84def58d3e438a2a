"""Observe the steps of a loop by hand (``PlainLoop``): forwards, backwards and updates outside of dtrain's step.

Some facts show in one run that a loop is wrong: orders of epochs, early clipping, losses with parameters, kept state dicts.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import sys
import weakref
from collections.abc import Iterator, Mapping
from itertools import islice
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import IterableDataset

from dtrain.data.batch import list_tensors
from dtrain.dist.dtensor import to_local
from dtrain.prove.experiments import kept_states
from dtrain.prove.recording import RankRecorder, UpdateObserver
from dtrain.prove.run_log import StepFacts, column_hashes, count_items, count_samples, sample_hashes
from dtrain.prove.run_records import matching_name
from dtrain.prove.script_values import script_line

# Indices of an epoch that are compared. A sampler may have no end.
_MAX_ORDER = 1 << 14
# A limit this many times the norm only measures the norm.
_NO_LIMIT = 100.0


class PlainLoop(UpdateObserver):
    """Steps of a loop by hand: a step is everything between two updates of an optimizer.

    Args:
        recorder: recorder of this rank.

    Mutates: torch's hooks of all optimizers.
    """

    def __init__(self, recorder: RankRecorder) -> None:
        self._recorder = recorder
        self._clips, self.criteria = EarlyClips(recorder), Criteria(recorder)
        self._number: int | None = None
        self._batch: Any = None
        # Loaders since the last forward with gradient, the last batch last; True if a forward without gradient came after it.
        self._evaluated: dict[int, bool] = {}
        self._of_step: set[int] = set()
        # Number of the first optimizer that a loader's batches train.
        self._trained_by: dict[int, int] = {}
        # Backwards of the last update. Recomputation repeats forwards.
        self.microbatches = 1
        # Models whose parameters are theirs again once the forward has ended.
        self.functional: list[nn.Module] = []
        register_optimizer_step_pre_hook(self._update_begins)
        register_optimizer_step_post_hook(self._update_ends)

    def forward(self, inputs: list[Tensor]) -> None:
        """Observe a forward with gradient of a whole model."""
        recorder = self._recorder
        if not recorder.facts.forwards:
            recorder.stop_if_done()
            recorder.flush_evaluation()
            recorder.facts.rng = recorder.rng_digest()
            recorder.slope.shift_(recorder.models)
        # A teacher may run before the model.
        unused = [loader for loader, was_evaluated in self._evaluated.items() if not was_evaluated]
        self._of_step.update(unused or list(self._evaluated)[-1:])
        self._evaluated = {}
        facts = recorder.facts
        facts.forwards += 1
        # A model may get a part of each sample that depends on the padding, such as all tokens but the last.
        is_whole = bool(inputs) and count_samples(self._batch) == count_samples(inputs)
        facts.add_batch(self._batch if is_whole else inputs)
        facts.columns += column_hashes(self._batch if is_whole else inputs)
        facts.counts.append(count_items(self._batch if is_whole else inputs))
        # A rank may compute a part of each sequence.
        if is_whole and inputs[0].shape not in {tensor.shape for tensor in list_tensors(self._batch)}:
            facts.parts += sample_hashes(inputs)
        facts.shapes += [list(tensor.shape[1:]) for tensor in inputs[:1]]
        if self._number is not None:
            facts.epochs.append(self._number)

    def backward(self, loss: Tensor) -> None:
        """Observe a backward."""
        facts = self._recorder.facts
        self._recorder.keep_averages()
        self._clips.backward_begins()
        facts.backwards += 1
        facts.lines["backward"] = script_line(self._recorder.config.script)
        if loss.numel() == 1:
            facts.losses.append((float(loss.detach()), None))

    def batch_loaded(self, loader: int, number: int, batch: Any) -> None:
        """Observe a batch of a loader of torch, in its pass ``number``."""
        self._evaluated.pop(loader, None)
        self._evaluated[loader] = False
        self._number, self._batch = number, batch

    def evaluates(self) -> None:
        """Observe a forward without gradient, as of an evaluation."""
        self._evaluated = dict.fromkeys(self._evaluated, True)

    def is_over(self, loader: int) -> bool:
        """Return True if a loader of training batches must end, because the run has all its steps."""
        if self._recorder.steps_of_dtrain:
            return False
        index = self._trained_by.get(loader)
        return index is not None and self._recorder.updates[index] >= self._recorder.config.steps

    def _update_begins(self, optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        recorder = self._recorder
        if _is_update_of_torch():
            return None
        recorder.write_later_changes()
        recorder.note("update_by_hand", optimizer=type(optimizer).__name__)
        if recorder.steps_of_dtrain:
            return None
        optimizer_index = recorder.log.optimizer_index = recorder.index_of(optimizer)
        recorder.log.step = recorder.updates.setdefault(optimizer_index, recorder.first_step_of(optimizer))
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._write_update(optimizer)
            return None
        is_first = True

        @functools.wraps(closure)
        def observed() -> Any:
            nonlocal is_first
            loss = closure()
            if is_first:
                self._write_update(optimizer)
            is_first = False
            return loss

        # The forwards of the step run in the closure, the first one before the parameters change.
        return (args[0], observed, *args[2:]), {name: value for name, value in kwargs.items() if name != "closure"}

    def _write_update(self, optimizer: Any) -> None:
        recorder = self._recorder
        for module in self.functional:
            recorder.models.add(module)
        self.functional.clear()
        for loader in self._of_step:
            self._trained_by.setdefault(loader, recorder.log.optimizer_index)
        recorder.facts.loaders = sorted(self._of_step)
        self._of_step = set()
        self.microbatches = recorder.facts.backwards
        self._clips.update_begins(optimizer)
        if recorder.records_updates():
            self.criteria.update_begins()
            recorder.write_early_averages(optimizer)
            recorder.write_initial(optimizer)
            recorder.write_step(optimizer)
            recorder.write_gradients(optimizer)
        recorder.facts = StepFacts()

    def _update_ends(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        recorder = self._recorder
        if recorder.steps_of_dtrain or _is_update_of_torch():
            return
        # Further forwards of a closure are not those of the next update.
        recorder.facts = StepFacts()
        optimizer_index = recorder.log.optimizer_index = recorder.index_of(optimizer)
        if recorder.records_updates():
            recorder.write_parameters()
        recorder.update_ends(recorder.updates[optimizer_index] + 1)


def _is_update_of_torch() -> bool:
    """Return True in a step that the script did not ask for.

    ``ZeroRedundancyOptimizer`` runs another optimizer in its own step, and ``get_state_dict`` makes a state by a step without
    gradients.
    """
    frame: FrameType | None = sys._getframe(1)
    steps = 0
    while frame is not None and steps < 2:
        module = frame.f_globals.get("__name__")
        steps += module == "torch.optim.optimizer" and frame.f_code.co_name == "wrapper"
        steps += 2 * (module == "torch.distributed.checkpoint.state_dict")
        frame = frame.f_back
    return steps > 1


def describe_pass(loader: Any, *, with_order: bool) -> dict[str, Any]:
    """Return what a pass over a loader of torch reads: its sampler and workers, and the order of its epoch.

    ``repeats`` is True if the sampler has this order in each pass, until ``set_epoch`` gives it another one. If ``with_order``,
    copies of the sampler show this.
    """
    sampler, samples = loader.sampler, len(loader.dataset) if hasattr(loader.dataset, "__len__") else None
    fields = {name: getattr(sampler, name, None) for name in ("epoch", "seed")}
    row = {"sampler": type(sampler).__name__, **fields, "shuffle": bool(getattr(sampler, "shuffle", False)), "samples": samples}
    row["workers"] = loader.num_workers if isinstance(loader.dataset, IterableDataset) else 0
    with_epoch = (
        one for one in _samplers(loader) if hasattr(one, "set_epoch") and isinstance(getattr(one, "epoch", None), int)
    )
    own = next(with_epoch, None)
    if own is None or not with_order:
        return row
    try:
        with kept_states():
            # The dataset may be large, and the sampler reads no sample.
            copied = copy.deepcopy(own, {id(loader.dataset): loader.dataset})
            orders = [_digest_order(copied) for _ in range(2)]
            copied.set_epoch(own.epoch + 1)
            later = _digest_order(copied)
    except Exception:  # noqa: BLE001 - any error of a sampler's copy
        return row
    return row | {"order": orders[0], "repeats": orders[0] == orders[1] != later, "ordered_by": type(own).__name__}


def _samplers(loader: Any) -> Iterator[Any]:
    for first in (loader.batch_sampler, loader.sampler):
        sampler, seen = first, 0
        while sampler is not None and seen < 4:
            yield sampler
            sampler, seen = getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None), seen + 1


def _digest_order(sampler: Any) -> str:
    order = list(islice(sampler, _MAX_ORDER))
    return hashlib.blake2b(repr(order).encode(), digest_size=8).hexdigest()


class EarlyClips:
    """Gradients that are clipped before the last backward of their step has added to them.

    Args:
        recorder: recorder of this rank. Runs on several ranks show nothing more.

    Mutates: ``torch.nn.utils.clip_grad_norm_``.
    """

    def __init__(self, recorder: RankRecorder) -> None:
        self._recorder = recorder
        # By the parameter's ``id``: gradients since the last clip, and those to which a later backward adds.
        self._clipped: dict[int, _ClippedGrad] = {}
        self._added: dict[int, _ClippedGrad] = {}
        if recorder.config.ranks > 1:
            return
        clip = torch.nn.utils.clip_grad_norm_

        @functools.wraps(clip)
        def clipped(parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> Tensor:
            params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            norm = clip(params, max_norm, *args, **kwargs)
            if max_norm < _NO_LIMIT * float(norm):
                backwards = recorder.facts.backwards
                for param in params:
                    if param.grad is not None:
                        self._clipped[id(param)] = _ClippedGrad(param, param.grad, param.grad._version, backwards)
            return norm

        torch.nn.utils.clip_grad_norm_ = clipped

    def backward_begins(self) -> None:
        """Remember the clipped gradients to which a backward may add."""
        for key, clipped in self._clipped.items():
            if clipped.is_kept and bool(to_local(clipped.grad).any()):
                self._added.setdefault(key, clipped)
        self._clipped = {}

    def update_begins(self, optimizer: Any) -> None:
        """Write that gradients of ``optimizer`` have changed since they were clipped."""
        params = [id(param) for group in optimizer.param_groups for param in group["params"]]
        early = [clipped for key in params if (clipped := self._added.pop(key, None)) is not None and not clipped.is_kept]
        self._clipped = {}
        if early:
            backwards = self._recorder.facts.backwards
            self._recorder.log.write("early_clip", after=early[0].backwards, backwards=backwards)


class _ClippedGrad(NamedTuple):
    """The gradient of a parameter after it was clipped, with the version of its memory and the number of backwards before."""

    param: Tensor
    grad: Tensor
    version: int
    backwards: int

    @property
    def is_kept(self) -> bool:
        """True if nothing has changed the gradient, as a further backward or ``zero_grad`` does."""
        return self.param.grad is self.grad and self.grad._version == self.version


class Criteria:
    """Modules whose output is a loss, and that have parameters of their own, such as weights of tasks.

    Args:
        recorder: recorder of this rank.
    """

    def __init__(self, recorder: RankRecorder) -> None:
        self._recorder = recorder
        self._modules: dict[int, nn.Module] = {}

    def called(self, module: nn.Module, output: Any) -> None:
        """Observe a forward with gradient of a whole model."""
        if isinstance(output, Tensor) and output.numel() == 1 and output.requires_grad and module.training:
            own = list(module.parameters(recurse=False))
            # The layers of a loss, as of a perceptual one, may be frozen.
            if own and len(own) == len(list(module.parameters())):
                self._modules[id(module)] = module

    def update_begins(self) -> None:
        """Write the parameters of losses that get a gradient, and that no optimizer has."""
        recorder = self._recorder
        for module in self._modules.values() if recorder.config.ranks == 1 else ():
            params = module.parameters()
            if any(id(param) in recorder.optimized for param in params):
                continue
            for name, param in recorder.models.parameters_of(module).items():
                if param.requires_grad and param.grad is not None and (norm := float(to_local(param.grad).norm())):
                    recorder.log.write("untrained", name=name, norm=norm)


class KeptWeights:
    """State dicts of models, whose tensors are those of the model, and that the script uses after further updates.

    Args:
        recorder: recorder of this rank.

    Mutates: ``nn.Module.state_dict`` and ``load_state_dict``.
    """

    def __init__(self, recorder: RankRecorder) -> None:
        self._recorder = recorder
        self._taken: dict[int, tuple[weakref.ref[Any], weakref.ref[nn.Module], int]] = {}
        self._is_inside = False
        if recorder.config.ranks > 1:
            return
        take, load = nn.Module.state_dict, nn.Module.load_state_dict

        @functools.wraps(take)
        def taken(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self._is_inside:
                return take(module, *args, **kwargs)
            self._is_inside = True
            try:
                result = take(module, *args, **kwargs)
            finally:
                self._is_inside = False
            if not args and "destination" not in kwargs:
                # A wrapper may return a plain dict, which has no weak references.
                with contextlib.suppress(TypeError):
                    self._taken[id(result)] = weakref.ref(result), weakref.ref(module), recorder.updates_of(module)
            return result

        @functools.wraps(load)
        def loaded(module: nn.Module, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
            self.used(state_dict, "load_state_dict")
            return load(module, state_dict, *args, **kwargs)

        nn.Module.state_dict = taken  # type: ignore[method-assign, assignment]
        nn.Module.load_state_dict = loaded  # type: ignore[method-assign, assignment]

    def used(self, value: Any, place: str) -> None:
        """Write that the script saves or loads a state dict of an earlier step that has changed since."""
        for part in (value, *(value.values() if isinstance(value, Mapping) else ())):
            reference, owner, step = self._taken.get(id(part), (None, None, 0))
            is_taken = reference is not None and id(reference()) == id(part)
            module = owner() if is_taken and owner is not None else None
            if module is not None and 0 < step < (now := self._recorder.updates_of(module)):
                addresses = {to_local(param.detach()).data_ptr() for param in module.parameters()}
                if any(isinstance(tensor, Tensor) and to_local(tensor).data_ptr() in addresses for tensor in part.values()):
                    self._recorder.log.write("stale_weights", taken=step, used=now, place=place)


def observe_names(recorder: RankRecorder) -> None:
    """Observe names of a state dict that have another prefix than those of the model, and that ``strict=False`` passes over.

    Mutates: ``nn.Module.load_state_dict``.
    """
    load = nn.Module.load_state_dict

    @functools.wraps(load)
    def loaded(module: nn.Module, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        result = load(module, state_dict, *args, **kwargs)
        missing, unexpected = list(result.missing_keys), list(result.unexpected_keys)
        lost = [name for name in missing if matching_name(name, unexpected) is not None]
        if lost:
            found = matching_name(lost[0], unexpected)
            recorder.note("unmatched", unexpected=f"{len(unexpected)} names, as {found}", missing=f"{len(lost)}, as {lost[0]}")
        return result

    nn.Module.load_state_dict = loaded  # type: ignore[method-assign, assignment]
