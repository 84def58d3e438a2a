"""Observe torch: forwards of whole models, backwards, optimizers, loaders, collectives and saved files (``observe_torch``).

A loop that does not use dtrain's step is recorded by these hooks alone (``plain_loop``). They are installed in the processes of
a proof, before the script runs, and stay until the process ends.
"""

from __future__ import annotations

import builtins
import functools
import io
import linecache
import os
import sys
import weakref
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as collectives_with_grad
import torch.distributed.tensor.parallel as tensor_parallel
import torch.nn.functional as F
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils.data import DataLoader, RandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from dtrain.checkpoint.conversion import convert as conversion
from dtrain.data.batch import list_tensors
from dtrain.dist import collectives
from dtrain.dist.rng import derive_seed
from dtrain.prove.evaluations import list_random_modules
from dtrain.prove.experiments import Reach
from dtrain.prove.overrides import cast_floats, observe_recompute
from dtrain.prove.plain_loop import KeptWeights, PlainLoop, describe_pass, observe_names
from dtrain.prove.recording import MAX_EPOCHS, RankRecorder
from dtrain.prove.run_log import StepFacts, sample_hashes
from dtrain.prove.script_values import script_frames, script_line

_COLLECTIVES = ("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "reduce", "broadcast", "gather")


def observe_torch(recorder: RankRecorder) -> None:
    """Install all hooks. Mutates: classes and functions of torch, in this process."""
    loop = PlainLoop(recorder)
    _Forwards(recorder, loop)
    _observe_updates(recorder, loop)
    _Loaders(recorder, loop)
    _observe_events(recorder)
    _observe_tensor_parallelism(recorder)
    _observe_targets(recorder)
    _observe_files(recorder, KeptWeights(recorder))
    observe_names(recorder)
    _observe_print(recorder)
    observe_recompute(partial(recorder.note, "recompute"), active=recorder.config.recompute)


class _Forwards:
    """Calls of modules: the samples of each call of a whole model, and the names of the modules that ran.

    A *root* is a module with parameters that no other module calls.
    """

    def __init__(self, recorder: RankRecorder, loop: PlainLoop) -> None:
        self._recorder, self._loop = recorder, loop
        self._depth = 0
        self._reach = Reach(recorder.config, recorder.log)
        self._names: dict[int, str | None] = {}
        self._exports = recorder.evaluations.exports
        self._teachers = set[int]()
        call = nn.Module.__call__

        def observed(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self._depth == 0:
                return self._root(call, module, args, kwargs)
            return self._after(module, self._inside(call, module, *args, **kwargs))

        nn.Module.__call__ = observed  # type: ignore[method-assign]

    def _inside(self, call: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a module, within which no other module is a root."""
        self._depth += 1
        try:
            return call(*args, **kwargs)
        finally:
            self._depth -= 1

    def _root(self, call: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
        recorder = self._recorder
        if next(module.parameters(), None) is None or (self._exports is not None and self._exports.running):
            return call(module, *args, **kwargs)
        if recorder.dtype is not None:
            args, kwargs = cast_floats(args, recorder.dtype), cast_floats(kwargs, recorder.dtype)
        if _is_transformed():
            return self._transformed(call, module, args, kwargs)
        recorder.write_later_changes()
        recorder.models.add(module)
        self._note_teacher(module)
        inputs = [tensor for tensor in list_tensors([list(args), kwargs]) if isinstance(tensor, Tensor)]
        if torch.is_grad_enabled() and "forward" not in recorder.facts.lines:
            recorder.facts.lines["forward"] = script_line(recorder.config.script)
        if self._exports is not None:
            self._exports.hold(module, args, kwargs)
        alone, of_cache = not recorder.in_step, module is recorder.cached_model
        self._inside(self._reach.measure, partial(call, module), args, kwargs)
        if alone:
            self._observe(module, inputs)
        elif of_cache:
            recorder.forward_begins([args, kwargs])
        recorder.in_forward = True
        try:
            output = self._inside(call, module, *args, **kwargs)
        finally:
            recorder.in_forward = False
            if of_cache or (alone and not called_from("dtrain.step.evaluate")):
                recorder.random.end()
        if torch.is_grad_enabled():
            self._loop.criteria.called(module, output)
        return self._after(module, output)

    def _transformed(self, call: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Run a forward within ``torch.func.grad`` or ``vmap``. Its parameters are not those of the module."""
        recorder = self._recorder
        if not (recorder.in_step or recorder.steps_of_dtrain):
            is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
            self._loop.functional.append(module)
            with temporarily_clear_interpreter_stack():
                self._loop.forward([tensor for tensor in list_tensors([list(args), kwargs]) if not is_wrapped(tensor)])
        return self._inside(call, module, *args, **kwargs)

    def _note_teacher(self, module: nn.Module) -> None:
        """Note a model of no optimizer that runs with dropout, or that updates statistics."""
        params = list(module.parameters())
        trains = any(param.requires_grad for param in params)
        is_noted = id(module) in self._teachers or any(id(param) in self._recorder.optimized for param in params)
        if is_noted or (trains and torch.is_grad_enabled()):
            return
        # The statistics of frozen batch norm are checked in all models.
        modules = list_random_modules(module, statistics=trains)
        if modules:
            self._teachers.add(id(module))
            self._recorder.note("teacher", modules=modules, parameters=list(self._recorder.models.parameters_of(module)))

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
        if not torch.is_grad_enabled() or _is_transformed():
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


def _is_transformed() -> bool:
    return torch._C._functorch.peek_interpreter_stack() is not None


def called_from(module: str, *, depth: int = 12) -> bool:
    """Return True if a frame of ``module`` is among the next ``depth`` callers."""
    frame, left = sys._getframe(1), depth
    while frame is not None and left:
        if frame.f_globals.get("__name__") == module:
            return True
        frame, left = frame.f_back, left - 1  # type: ignore[assignment]
    return False


def _observe_updates(recorder: RankRecorder, loop: PlainLoop) -> None:
    """Observe backwards that dtrain does not run, steps of schedulers, and the parameters of new optimizers."""
    add = torch.optim.Optimizer.add_param_group
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

    @functools.wraps(add)
    def added(optimizer: Any, group: Any) -> None:
        add(optimizer, group)
        recorder.optimized.update(id(param) for param in optimizer.param_groups[-1]["params"])

    torch.optim.Optimizer.add_param_group = added  # type: ignore[method-assign, assignment]
    Tensor.backward = observed  # type: ignore[method-assign, assignment]
    torch.optim.lr_scheduler.LRScheduler.step = scheduled  # type: ignore[method-assign, assignment]


class _Loaders:
    """Loaders of torch: batches in the dtype of the run, the end of the training loop, and the epochs of their samplers."""

    def __init__(self, recorder: RankRecorder, loop: PlainLoop) -> None:
        self._recorder, self._loop = recorder, loop
        self._passes = Counter[int]()
        self._numbers: dict[Hashable, int] = {}
        self._loaders: dict[Hashable, list[weakref.ref[Any]]] = {}
        for kind in (DataLoader, StatefulDataLoader):
            kind.__iter__ = self._observed(kind.__iter__)  # type: ignore[method-assign]

    def _observed(self, iterate: Any) -> Any:
        recorder, loop = self._recorder, self._loop

        @functools.wraps(iterate)
        def observed(loader: Any) -> Any:
            if sys._getframe(1).f_globals.get("__name__", "").startswith(("dtrain.", "torch.")):
                return iterate(loader)
            key = self._number_of(loader, sys._getframe(1))
            # Accelerate's loader of rank 0 sends shares of its batches. Only rank 0 would see a shorter pass.
            is_sent = sys._getframe(1).f_code.co_qualname == "DataLoaderDispatcher.__iter__"
            if loop.is_over(key) and not is_sent:
                # Its sampler shows if the script has set the next epoch.
                self._pass_begins(loader, key, is_over=True)
                return self._empty_pass()
            is_ahead = _is_of_accelerate(sys._getframe(1))
            if is_ahead:
                _observe_gather_for_metrics(recorder)
                self._order_alike(loader, self._passes[key])
            return self._batches(loader, key, iterate(loader), is_sent=is_sent, is_ahead=is_ahead)

        return observed

    def _number_of(self, loader: Any, frame: FrameType) -> int:
        """Return a number that is equal for all passes over a loader, also if the script makes the loader anew for each epoch.

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
        return self._numbers.setdefault((*key, index), len(self._numbers))

    def _order_alike(self, loader: Any, number: int) -> None:
        """Order a pass alike on all numbers of ranks: Accelerate's default sampler has another generator on one rank."""
        batch_sampler = loader.batch_sampler
        while hasattr(batch_sampler, "batch_sampler"):
            batch_sampler = batch_sampler.batch_sampler
        sampler = getattr(batch_sampler, "sampler", None)
        if type(sampler) is RandomSampler:
            self._recorder.note("draws")
            if self._recorder.config.even_random:
                sampler.generator = torch.Generator("cpu").manual_seed(derive_seed("prove order", number))

    def _empty_pass(self) -> Iterator[Any]:
        reader = sys._getframe(1)
        # After a loop the script goes on, and after ``next`` it fails. Accelerate knows the end of its loaders.
        in_loop = _is_of_accelerate(reader) or "next(" not in linecache.getline(reader.f_code.co_filename, reader.f_lineno)
        self._recorder.pass_is_empty(MAX_EPOCHS if in_loop else 0)
        yield from ()

    def _pass_begins(self, loader: Any, key: int, *, is_over: bool = False) -> int:
        """Write what a pass reads, and return its number."""
        number = self._passes[key]
        self._passes[key] += 1
        # After the last step, a script may ask for batches again and again.
        if not self._recorder.empty_passes:
            row = describe_pass(loader, with_order=self._recorder.config.ranks == 1)
            grad = torch.is_grad_enabled()
            self._recorder.log.write("pass", loader=key, number=number, is_over=is_over, grad=grad, **row)
        return number

    def _batches(self, loader: Any, key: int, batches: Iterator[Any], *, is_sent: bool, is_ahead: bool) -> Iterator[Any]:
        recorder, number = self._recorder, self._pass_begins(loader, key)
        over = 0
        for batch in batches:
            over += not is_sent and self._loop.is_over(key)
            # Accelerate reads one batch ahead. With it, the others complete an update.
            if over >= (self._loop.microbatches if is_ahead and over else 1):
                # A further batch of the workers of a stream shows if they all read the same.
                recorder.log.write("read", loader=f"loader-{key}", number=number, samples=sample_hashes(batch))
                return
            if key in recorder.config.loaders:
                batch = recorder.replay.exchange(f"loader-{key}", batch)
            batch = recorder.padding.widen(batch)
            self._loop.batch_loaded(key, number, None if is_sent else batch)
            recorder.batch_read(batch, f"loader-{key}", number)
            yield cast_floats(batch, recorder.dtype) if recorder.dtype is not None else batch


def _is_of_accelerate(frame: FrameType) -> bool:
    return bool(frame.f_globals.get("__name__") == "accelerate.data_loader")


def _observe_gather_for_metrics(recorder: RankRecorder) -> None:
    """Observe that Accelerate drops the samples that it repeats to fill the last batch of an evaluation."""
    accelerator = sys.modules["accelerate"].Accelerator
    gather = accelerator.gather_for_metrics
    if hasattr(gather, "__wrapped__"):
        return

    @functools.wraps(gather)
    def gathered(*args: Any, **kwargs: Any) -> Any:
        recorder.note("gather_for_metrics")
        return gather(*args, **kwargs)

    accelerator.gather_for_metrics = gathered


def _observe_events(recorder: RankRecorder) -> None:
    """Observe calls whose order within a step matters: collectives of the script, clipping, loss scaling."""

    def wrap(owner: Any, name: str, event: str, *, of_script: bool = False) -> None:
        function, is_collective = getattr(owner, name), owner in (dist, collectives_with_grad, collectives)

        @functools.wraps(function)
        def observed(*args: Any, **kwargs: Any) -> Any:
            if not of_script or script_frames(sys._getframe(1), recorder.config.script)[:1] == [sys._getframe(1)]:
                wanted = any(isinstance(value, Tensor) and value.requires_grad for value in args)
                inside = ":forward" if recorder.in_forward else ""
                recorder.facts.events.append(f"{event}{inside}:grad" if wanted else f"{event}{inside}")
            # Before its first forward, a step may distribute weights or samples.
            recorder.facts.collectives += bool(is_collective and recorder.facts.forwards)
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
        if not any(scaler is other for other in recorder.scalers):
            recorder.scalers.append(scaler)
        result = step(scaler, *args, **kwargs)
        # An update begins new facts. The microbatches of a skipped step are not those of the next update.
        if recorder.facts is facts and not recorder.in_step:
            recorder.facts = StepFacts()
        return result

    torch.amp.GradScaler.step = scaled_step  # type: ignore[method-assign, assignment]


def _observe_tensor_parallelism(recorder: RankRecorder) -> None:
    """Observe which ranks share a batch, because a loop by hand shards layers over them."""
    parallelize = tensor_parallel.parallelize_module

    @functools.wraps(parallelize)
    def parallelized(module: nn.Module, device_mesh: Any = None, *args: Any, **kwargs: Any) -> Any:
        if device_mesh is not None:
            recorder.log.write("shared_batch", data_rank=int(device_mesh.mesh.min()))
        return parallelize(module, device_mesh, *args, **kwargs)

    tensor_parallel.parallelize_module = parallelized


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
        # A library may print into a string, such as a hash of code.
        if options.get("file") in (None, sys.stdout) and not isinstance(sys.stdout, io.StringIO):
            recorder.printed(" ".join(str(value) for value in values))
        write(*values, **options)

    builtins.print = printed


def _observe_files(recorder: RankRecorder, kept: KeptWeights) -> None:
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
        # Ranks exchange a pickled object, and a pickled tensor saves its storage: no checkpoint.
        if isinstance(obj, torch.UntypedStorage | torch.TypedStorage) and called_from("torch.distributed.distributed_c10d"):
            return save(obj, file, *args, **kwargs)
        note_overwrite(file)
        kept.used(obj, os.path.basename(str(file)))
        result = save(obj, file, *args, **kwargs)
        # A state dict of a model has names with tensors, and nothing else.
        is_weights = isinstance(obj, Mapping) and obj and all(isinstance(value, Tensor) for value in obj.values())
        if is_weights and isinstance(file, str | os.PathLike):
            recorder.evaluations.exported(str(file), obj.items())
        elif not called_from("dtrain.checkpoint"):
            recorder.log.write("saved", path=str(file))
        return result

    torch.save = saved  # type: ignore[assignment]
    save_file, convert = safetensors.torch.save_file, conversion.convert

    @functools.wraps(save_file)
    def written(tensors: Any, filename: Any, *args: Any, **kwargs: Any) -> Any:
        kept.used(tensors, os.path.basename(str(filename)))
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
