"""Observe torch: forwards of whole models, backwards, optimizers, loaders, collectives and saved files (``observe_torch``).

A loop that does not use dtrain's step is recorded by these hooks alone (``PlainLoop``). They are installed in the processes of
a proof, before the script runs, and stay until the process ends.
"""

from __future__ import annotations

import builtins
import functools
import linecache
import os
import sys
import weakref
from collections.abc import Hashable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as collectives_with_grad
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from dtrain.checkpoint.conversion import convert as conversion
from dtrain.data.batch import list_tensors
from dtrain.dist import collectives
from dtrain.prove.causes import OF_REACH
from dtrain.prove.overrides import cast_floats, observe_recompute
from dtrain.prove.recording import EndOfProof, RankRecorder, StepFacts, UpdateObserver
from dtrain.prove.run_log import count_items, count_samples, sample_hashes, script_frames

# Passes of a training loader without a batch, after which the script waits for steps that never come.
_MAX_EMPTY_PASSES = 1000
_COLLECTIVES = ("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "reduce", "broadcast", "gather")


def observe_torch(recorder: RankRecorder) -> None:
    """Install all hooks. Mutates: classes and functions of torch, in this process."""
    loop = PlainLoop(recorder)
    _Forwards(recorder, loop)
    _observe_updates(recorder, loop)
    _Loaders(recorder, loop)
    _observe_events(recorder)
    _observe_targets(recorder)
    _observe_files(recorder)
    _observe_print(recorder)
    observe_recompute(partial(recorder.note, "recompute"), active=recorder.config.recompute)


class _Forwards:
    """Calls of modules: the samples of each call of a whole model, and the names of the modules that ran.

    A *root* is a module with parameters that no other module calls.
    """

    def __init__(self, recorder: RankRecorder, loop: PlainLoop) -> None:
        self._recorder, self._loop = recorder, loop
        self._depth = 0
        self._has_reach = False
        self._names: dict[int, str | None] = {}
        self._exports = recorder.evaluations.exports
        call = nn.Module.__call__

        def observed(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self._depth == 0:
                return self._root(call, module, args, kwargs)
            self._depth += 1
            try:
                output = call(module, *args, **kwargs)
            finally:
                self._depth -= 1
            return self._after(module, output)

        nn.Module.__call__ = observed  # type: ignore[method-assign]

    def _root(self, call: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
        recorder = self._recorder
        if next(module.parameters(), None) is None or (self._exports is not None and self._exports.running):
            return call(module, *args, **kwargs)
        if recorder.dtype is not None:
            args, kwargs = cast_floats(args, recorder.dtype), cast_floats(kwargs, recorder.dtype)
        recorder.models.add(module)
        inputs = [tensor for tensor in list_tensors([list(args), kwargs]) if isinstance(tensor, Tensor)]
        if self._exports is not None:
            self._exports.hold(module, args, kwargs)
        alone, of_cache = not recorder.in_step, module is recorder.cached_model
        self._measure_reach(call, module, args, kwargs)
        if alone:
            self._observe(module, inputs)
        elif of_cache:
            recorder.forward_begins([args, kwargs])
        self._depth += 1
        recorder.in_forward = True
        try:
            output = call(module, *args, **kwargs)
        finally:
            self._depth -= 1
            recorder.in_forward = False
            if of_cache or (alone and not called_from("dtrain.step.evaluate")):
                recorder.random.end()
        return self._after(module, output)

    def _measure_reach(self, call: Any, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Write how many positions of the first sample a change of its first element reaches, once, for an experiment."""
        has_rows = bool(args) and isinstance(args[0], Tensor) and args[0].ndim > 1 and torch.is_grad_enabled()
        if self._recorder.config.experiment not in OF_REACH or self._has_reach or not has_rows:
            return
        self._has_reach = True
        self._depth += 1
        with torch.no_grad():
            outputs = [list_tensors([call(module, *inputs, **kwargs)])[0][0] for inputs in (args, self._changed(args))]
        self._depth -= 1
        reached = (outputs[0] != outputs[1]).reshape(len(outputs[0]), -1).any(1)
        self._recorder.log.write("reach", reached=int(reached.sum()))

    def _changed(self, args: Any) -> Any:
        """Return the inputs with another first element of the first sample, on rank 0, which has the begin of a sequence."""
        first = args[0].clone()
        others = first[first != first[0, 0]]
        if not self._recorder.log.rank and len(others):
            first[0, 0] = others[0]
        return first, *args[1:]

    def _observe(self, module: nn.Module, inputs: list[Tensor]) -> None:
        recorder = self._recorder
        is_data = bool(inputs) and not any(tensor.requires_grad for tensor in inputs)
        if torch.is_grad_enabled():
            if not recorder.steps_of_dtrain:
                self._loop.forward(inputs if is_data else [])
        elif is_data and not recorder.in_step:
            self._loop.evaluates()
            recorder.evaluations.forward_begins(module)
            recorder.evaluations.write_weights(module)
            if not called_from("dtrain.step.evaluate"):
                recorder.add_evaluated(inputs)
        if inputs and inputs[0].ndim and not called_from("dtrain.step.evaluate"):
            recorder.random.begin(recorder.log.step, inputs[0].shape[0])

    def _after(self, module: nn.Module, output: Any) -> Any:
        recorder = self._recorder
        if not torch.is_grad_enabled():
            return output
        if id(module) not in self._names:
            self._names[id(module)] = recorder.models.name_of(module)
        name = self._names[id(module)]
        if name is None:
            return output
        recorder.facts.modules.append(name)
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training and not recorder.averages_statistics:
            recorder.note("batch_norm")
        return recorder.outputs.after(module, name, output, forwards=recorder.facts.forwards)


def called_from(module: str, *, depth: int = 12) -> bool:
    """Return True if a frame of ``module`` is among the next ``depth`` callers."""
    frame, left = sys._getframe(1), depth
    while frame is not None and left:
        if frame.f_globals.get("__name__") == module:
            return True
        frame, left = frame.f_back, left - 1  # type: ignore[assignment]
    return False


def _observe_updates(recorder: RankRecorder, loop: PlainLoop) -> None:
    """Observe backwards that dtrain does not run, and steps of schedulers."""
    backward, step = Tensor.backward, torch.optim.lr_scheduler.LRScheduler.step
    is_observed = False

    def observed(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        nonlocal is_observed
        # With a mode of functions, torch calls ``Tensor.backward`` again from within.
        if is_observed or recorder.in_step:
            return backward(tensor, *args, **kwargs)  # type: ignore[no-untyped-call]
        is_observed = True
        try:
            loop.backward(tensor)
            return backward(tensor, *args, **kwargs)  # type: ignore[no-untyped-call]
        finally:
            is_observed = False

    def scheduled(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        recorder.facts.events.append("schedule")
        return step(scheduler, *args, **kwargs)

    Tensor.backward = observed  # type: ignore[method-assign, assignment]
    torch.optim.lr_scheduler.LRScheduler.step = scheduled  # type: ignore[method-assign, assignment]


class _Loaders:
    """Loaders of torch: batches in the dtype of the run, the end of the training loop, and the epochs of their samplers."""

    def __init__(self, recorder: RankRecorder, loop: PlainLoop) -> None:
        self._recorder, self._loop = recorder, loop
        self._passes: dict[Hashable, int] = {}
        self._loaders: dict[Hashable, list[weakref.ref[Any]]] = {}
        self._empty_passes = 0
        iterate = DataLoader.__iter__

        @functools.wraps(iterate)
        def observed(loader: Any) -> Any:
            if sys._getframe(1).f_globals.get("__name__", "").startswith(("dtrain.", "torch.")):
                return iterate(loader)
            key = self._key_of(loader, sys._getframe(1))
            if loop.is_over(key):
                return self._empty_pass()
            return self._batches(loader, key, iterate(loader))

        DataLoader.__iter__ = observed  # type: ignore[method-assign]

    def _key_of(self, loader: Any, frame: FrameType) -> Hashable:
        """Return what is equal for all passes over a loader, also if the script makes the loader anew for each epoch.

        Loaders of one loop and size are different if they live at the same time.
        """
        place = next(iter(script_frames(frame, self._recorder.config.script)), frame)
        length = len(loader.dataset) if hasattr(loader.dataset, "__len__") else None
        key = (place.f_code.co_filename, place.f_lineno, type(loader.sampler).__name__, loader.batch_size, length)
        others = self._loaders.setdefault(key, [])
        alive = [other() for other in others]
        index = next((number for number, other in enumerate(alive) if other is loader), None)
        if index is None:
            index = alive.index(None) if None in alive else len(alive)
            others[index : index + 1] = [weakref.ref(loader)]
        return *key, index

    def _empty_pass(self) -> Iterator[Any]:
        self._empty_passes += 1
        reader = sys._getframe(1)
        # After a loop the script goes on, and after ``next`` it fails.
        in_loop = "next(" not in linecache.getline(reader.f_code.co_filename, reader.f_lineno)
        if not in_loop or self._empty_passes > _MAX_EMPTY_PASSES:
            self._recorder.note("loop_cut")
            raise EndOfProof(0)
        yield from ()

    def _batches(self, loader: Any, key: Hashable, batches: Iterator[Any]) -> Iterator[Any]:
        recorder, sampler = self._recorder, loader.sampler
        number = self._passes[key] = self._passes.get(key, -1) + 1
        recorder.log.write(
            "pass",
            loader=list(self._passes).index(key),
            number=number,
            sampler=type(sampler).__name__,
            epoch=getattr(sampler, "epoch", None),
            seed=getattr(sampler, "seed", None),
            shuffle=bool(getattr(sampler, "shuffle", False)),
            samples=len(loader.dataset) if hasattr(loader.dataset, "__len__") else None,
        )
        for batch in batches:
            if self._loop.is_over(key):
                return
            self._loop.batch_loaded(key, number, batch)
            recorder.random.batch_loaded(recorder.log.step, count_samples(batch))
            yield cast_floats(batch, recorder.dtype) if recorder.dtype is not None else batch


def _observe_events(recorder: RankRecorder) -> None:
    """Observe calls whose order within a step matters: collectives of the script, clipping, loss scaling."""

    def wrap(owner: Any, name: str, event: str, *, of_script: bool = False) -> None:
        function = getattr(owner, name)

        @functools.wraps(function)
        def observed(*args: Any, **kwargs: Any) -> Any:
            if not of_script or script_frames(sys._getframe(1), recorder.config.script)[:1] == [sys._getframe(1)]:
                wanted = any(isinstance(value, Tensor) and value.requires_grad for value in args)
                inside = ":forward" if recorder.in_forward else ""
                recorder.facts.events.append(f"{event}{inside}:grad" if wanted else f"{event}{inside}")
            return function(*args, **kwargs)

        setattr(owner, name, observed)

    for name in _COLLECTIVES:
        wrap(dist, name, name, of_script=True)
    for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        wrap(collectives_with_grad, name, f"autograd_{name}", of_script=True)
    for name in ("reduce_sum", "reduce_mean"):
        wrap(collectives, name, name)
    wrap(torch.nn.utils, "clip_grad_norm_", "clip")
    for name, event in (("scale", "scale"), ("unscale_", "unscale")):
        wrap(torch.amp.GradScaler, name, event)
    step = torch.amp.GradScaler.step

    @functools.wraps(step)
    def scaled_step(scaler: Any, *args: Any, **kwargs: Any) -> Any:
        facts = recorder.facts
        result = step(scaler, *args, **kwargs)
        # An update begins new facts. The microbatches of a skipped step are not those of the next update.
        if recorder.facts is facts and not recorder.in_step:
            recorder.facts = StepFacts()
        return result

    torch.amp.GradScaler.step = scaled_step  # type: ignore[method-assign, assignment]


def _observe_targets(recorder: RankRecorder) -> None:
    """Observe how many labels the cross entropy of a step has."""
    compute = F.cross_entropy

    @functools.wraps(compute)
    def counted(input: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if input.requires_grad:
            recorder.facts.targets += int((target != kwargs.get("ignore_index", -100)).sum())
        return compute(input, target, *args, **kwargs)

    F.cross_entropy = counted


def _observe_print(recorder: RankRecorder) -> None:
    """Observe lines that the script prints, which are metrics of many loops."""
    write = builtins.print

    @functools.wraps(write)
    def printed(*values: Any, **options: Any) -> None:
        if options.get("file") in (None, sys.stdout):
            recorder.printed(" ".join(str(value) for value in values))
        write(*values, **options)

    builtins.print = printed


def _observe_files(recorder: RankRecorder) -> None:
    """Observe files of weights: checkpoints of ``torch.save``, and exports in safetensors or as a state dict."""
    save = torch.save
    own: set[str] = set()

    def note_overwrite(file: Any) -> None:
        if isinstance(file, str | os.PathLike):
            path = os.path.realpath(file)
            if path not in own and os.path.exists(path):
                recorder.note("overwrite", path=os.path.basename(path))
            own.add(path)

    @functools.wraps(save)
    def saved(obj: Any, file: Any, *args: Any, **kwargs: Any) -> Any:
        note_overwrite(file)
        result = save(obj, file, *args, **kwargs)
        # A state dict of a model has names with tensors, and nothing else.
        is_weights = isinstance(obj, Mapping) and obj and all(isinstance(value, Tensor) for value in obj.values())
        if is_weights and isinstance(file, str | os.PathLike):
            recorder.evaluations.exported(str(file), obj.items())
        elif not called_from("dtrain.checkpoint"):
            recorder.log.write("saved", step=recorder.updates_done(), path=str(file))
        return result

    torch.save = saved  # type: ignore[assignment]
    save_file, convert = safetensors.torch.save_file, conversion.convert

    @functools.wraps(save_file)
    def written(tensors: Any, filename: Any, *args: Any, **kwargs: Any) -> Any:
        result = save_file(tensors, filename, *args, **kwargs)
        recorder.evaluations.exported(str(filename), tensors.items())
        return result

    @functools.wraps(convert)
    def converted(path: Any, destination: Any, **kwargs: Any) -> Any:
        result = convert(path, destination, **kwargs)
        written_to = Path(destination)
        for file in sorted(written_to.glob("*.safetensors")) if written_to.is_dir() else [written_to]:
            if file.suffix == ".safetensors":
                recorder.evaluations.exported(str(file), safetensors.torch.load_file(file).items())
        return result

    safetensors.torch.save_file = written
    conversion.convert = converted


class PlainLoop(UpdateObserver):
    """Steps of a loop by hand: a step is everything between two updates of an optimizer.

    Args:
        recorder: recorder of this rank.

    Mutates: torch's hooks of all optimizers.
    """

    def __init__(self, recorder: RankRecorder) -> None:
        self._recorder = recorder
        self._number: int | None = None
        self._batch: Any = None
        # Loaders since the last forward with gradient, the last batch last; True if a forward without gradient came after it.
        self._evaluated: dict[Hashable, bool] = {}
        self._of_step: set[Hashable] = set()
        self._training_loaders: set[Hashable] = set()
        register_optimizer_step_pre_hook(self._update_begins)
        register_optimizer_step_post_hook(self._update_ends)

    def forward(self, inputs: list[Tensor]) -> None:
        """Observe a forward with gradient of a whole model."""
        recorder = self._recorder
        if not recorder.facts.forwards:
            recorder.stop_if_done()
            recorder.flush_evaluation()
            recorder.facts.rng = recorder.rng_digest()
        # A teacher may run before the model.
        unused = [loader for loader, was_evaluated in self._evaluated.items() if not was_evaluated]
        self._of_step.update(unused or list(self._evaluated)[-1:])
        self._evaluated = {}
        facts = recorder.facts
        facts.forwards += 1
        # A model may get a part of each sample that depends on the padding, such as all tokens but the last.
        is_whole = bool(inputs) and count_samples(self._batch) == count_samples(inputs)
        facts.samples += sample_hashes(self._batch if is_whole else inputs)
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
        facts.backwards += 1
        if loss.numel() == 1:
            facts.losses.append((float(loss.detach()), None))

    def batch_loaded(self, loader: Hashable, number: int, batch: Any) -> None:
        """Observe a batch of a loader of torch, in its pass ``number``."""
        self._evaluated.pop(loader, None)
        self._evaluated[loader] = False
        self._number, self._batch = number, batch

    def evaluates(self) -> None:
        """Observe a forward without gradient, as of an evaluation."""
        self._evaluated = dict.fromkeys(self._evaluated, True)

    def is_over(self, loader: Hashable) -> bool:
        """Return True if a loader of training batches must end, because the run has all its steps."""
        if self._recorder.steps_of_dtrain:
            return False
        return loader in self._training_loaders and self._recorder.updates_done() >= self._recorder.config.steps

    def _update_begins(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        recorder = self._recorder
        recorder.note("update_by_hand", optimizer=type(optimizer).__name__)
        if recorder.steps_of_dtrain:
            return
        optimizer_index = recorder.log.optimizer_index = recorder.index_of(optimizer)
        recorder.log.step = recorder.updates.setdefault(optimizer_index, recorder.config.first_step)
        self._training_loaders |= self._of_step
        self._of_step = set()
        if recorder.records_updates():
            recorder.write_initial(optimizer)
            recorder.write_step(optimizer)
            recorder.write_gradients(optimizer)
        recorder.facts = StepFacts()

    def _update_ends(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        recorder = self._recorder
        if recorder.steps_of_dtrain:
            return
        optimizer_index = recorder.log.optimizer_index = recorder.index_of(optimizer)
        if recorder.records_updates():
            recorder.write_parameters()
        recorder.update_ends(recorder.updates[optimizer_index] + 1)
