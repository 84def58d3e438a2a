"""Observe and change a script that uses dtrain, by hooks in the place of dtrain's functions (``observe_dtrain``).

dtrain does not know that it is observed. The hooks are installed before the script runs, and stay until the process ends.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from typing import Any

import torch
from torch import nn

import dtrain.step.evaluate as evaluation
from dtrain.checkpoint.save import Checkpointer, save_sharded
from dtrain.data import batch_source
from dtrain.data.loader import Loader
from dtrain.data.position import is_reached, parse_length
from dtrain.loggers.logger import FaultTolerantLogger, null_logger
from dtrain.monitors.reduce_metrics import reduce_metrics
from dtrain.prove.preload import loaded_modules, replace_functions
from dtrain.prove.recording import MAX_ROLLOUTS, RankRecorder
from dtrain.shard.fsdp import shard_model
from dtrain.state import TrainState, init_state
from dtrain.step.auto_microbatch import auto_microbatch
from dtrain.step.compose import apply_gradients_of
from dtrain.step.grad_cache import grad_cache_step
from dtrain.step.microbatch_step import microbatch_step
from dtrain.step.normalization import divide_grads
from dtrain.step.optimizer import apply_gradients, tick
from dtrain.step.step_clock import begin_step
from dtrain.step.transform import make_step_context
from dtrain.typing import LossFn, LossSum

Hook = Callable[..., Any]


def observe_dtrain(recorder: RankRecorder) -> None:
    """Install all hooks. Mutates: modules, classes and default arguments of dtrain, in this process."""
    hooks = {
        **_hooks_of_set_up(recorder),
        **_hooks_of_steps(recorder),
        **_hooks_of_numbers(recorder),
        make_step_context: _observe_draws(recorder),
    }
    replace_functions(
        {id(function): functools.wraps(function)(hook) for function, hook in hooks.items()},
        [module for module in loaded_modules({"dtrain"}) if not module.__name__.startswith("dtrain.prove")],
    )
    _observe_loaders(recorder)
    TrainState.crossed = lambda state, every: recorder.crosses(state.step)  # type: ignore[method-assign, assignment]


def _hooks_of_set_up(recorder: RankRecorder) -> dict[Hook, Hook]:
    """Return the hooks that learn of models, and that replace the strategy, the precision and the search of a size."""
    signature = inspect.signature(shard_model)

    def sharded(model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        given = {"strategy": signature.parameters["strategy"].default, **kwargs}
        given["strategy"], given["precision"] = recorder.sharding(
            model, given["strategy"], given.get("precision"), given.get("buffers")
        )
        return shard_model(model, *args, **given)

    def initialized(model: nn.Module, optimizer: Any, **options: Any) -> TrainState:
        # The function refuses other arguments.
        if isinstance(model, nn.Module):
            recorder.run_starts(model, optimizer)
        return init_state(model, optimizer, **options)

    def searched(**options: Any) -> Any:
        transform = auto_microbatch(**options)
        return transform if recorder.config.microbatch_size is None else replace(transform, grad=None)

    return {shard_model: sharded, init_state: initialized, auto_microbatch: searched}


def _hooks_of_steps(recorder: RankRecorder) -> dict[Hook, Hook]:
    """Return the hooks of a step: its batch, the losses of its forwards, its gradients, and its result."""

    def begun(state: TrainState, batch: Any, **options: Any) -> TrainState:
        recorder.step_begins(state, batch)
        return begin_step(state, batch, **options)

    def with_recorded_loss(loss_fn: LossFn, *, is_forward: bool) -> LossFn:
        @functools.wraps(loss_fn)
        def recorded(model: nn.Module, batch: Any) -> LossSum:
            # Checks of the first step run the loss without gradients.
            is_of_step = torch.is_grad_enabled()
            if is_of_step and is_forward:
                recorder.forward_begins(batch)
            loss = loss_fn(model, batch)
            if is_of_step and isinstance(loss, LossSum):
                recorder.loss(loss)
            return loss

        return recorded

    def stepped(state: Any, batch: Any, *, loss_fn: LossFn, microbatch_size: int | None = None, **options: Any) -> Any:
        size = recorder.microbatch_size(microbatch_size)
        return microbatch_step(
            state, batch, loss_fn=with_recorded_loss(loss_fn, is_forward=True), microbatch_size=size, **options
        )

    def cached(state: Any, batch: Any, *, loss_fn: LossFn, **options: Any) -> Any:
        # The loss calls the model in microbatches, and each call is a forward.
        recorder.cached_model = getattr(state, "model", None)
        try:
            return grad_cache_step(state, batch, loss_fn=with_recorded_loss(loss_fn, is_forward=False), **options)
        finally:
            recorder.cached_model = None

    def applied(state: Any, *args: Any, **options: Any) -> Any:
        if not isinstance(state, TrainState):
            return apply_gradients(state, *args, **options)
        # The recorder reads the gradients.
        state = divide_grads(state)
        with recorder.update(state):
            return apply_gradients(state, *args, **options)

    def applied_in_part(state: TrainState, done: set[int], params: Any) -> None:
        if not params:
            return
        with recorder.update(state, params):
            apply_gradients_of(state, done, params)

    def ticked(state: TrainState) -> TrainState:
        state = tick(state)
        recorder.step_ends(state)
        return state

    return {
        begin_step: begun,
        microbatch_step: stepped,
        grad_cache_step: cached,
        apply_gradients: applied,
        apply_gradients_of: applied_in_part,
        tick: ticked,
    }


def _hooks_of_numbers(recorder: RankRecorder) -> dict[Hook, Hook]:
    """Return the hooks of evaluations, metrics, logs and saves. Mutates: the classes of loggers and checkpointers."""

    pad = evaluation.pad_to_longest_rank

    def padded(*args: Any, **kwargs: Any) -> Iterator[tuple[Any, int, bool]]:
        for batch, samples, is_real in pad(*args, **kwargs):
            recorder.evaluation_batch(batch if is_real else None)
            yield batch, samples, is_real

    def reduced(metrics: Any) -> dict[str, float]:
        means = reduce_metrics(metrics)
        recorder.metrics("reduce_metrics", means)
        return means

    def saved(root: Any, state: Any, **options: Any) -> Any:
        _record_save(recorder, root, state)
        return save_sharded(root, state, **options)

    log, save = FaultTolerantLogger.__call__, Checkpointer.save

    def logged(logger: Any, step: int, numbers: Mapping[str, Any], /) -> None:
        recorder.metrics("log", numbers)
        log(logger, step, numbers)

    def logged_elsewhere(step: int, numbers: Mapping[str, Any], /) -> None:
        # Rank 0 logs for all ranks, whose numbers should be equal.
        recorder.metrics("log", numbers)

    @functools.wraps(save)
    def saved_again(checkpointer: Checkpointer, state: Any, **options: Any) -> Any:
        _record_save(recorder, checkpointer.root, state)
        return save(checkpointer, state, **options)

    FaultTolerantLogger.__call__ = logged  # type: ignore[method-assign]
    Checkpointer.save = saved_again  # type: ignore[method-assign, assignment]
    # Only the batches of ``evaluate`` are an evaluation; the update of batch norm pads its batches, too.
    evaluation.pad_to_longest_rank = padded
    return {reduce_metrics: reduced, save_sharded: saved, null_logger: logged_elsewhere}


def _record_save(recorder: RankRecorder, root: Any, state: Any) -> None:
    states = list(state.values()) if isinstance(state, Mapping) else [state]
    # The save refuses other values.
    if states and all(isinstance(value, TrainState) for value in states):
        recorder.log.write("saved", step=max(value.step for value in states), path=str(root))


def _observe_draws(recorder: RankRecorder) -> Hook:
    """Return the hook that notes transforms that draw per rank, such as mixup, whose result depends on the layout by design."""
    made: dict[str, tuple[torch.Generator, torch.Tensor]] = {}

    def observed(state: Any, name: str) -> Any:
        for other, (generator, before) in made.items():
            if not torch.equal(generator.get_state(), before):
                recorder.note("transform_draws", name=other)
        context = make_step_context(state, name)
        # A transform has one generator in a step.
        made[name] = context.generator, context.generator.get_state()
        return context

    return observed


def _observe_loaders(recorder: RankRecorder) -> None:
    """Shorten the loops over dtrain's loaders, and observe their batches. Mutates: the class of loaders."""
    numbers: dict[int, int] = {}
    until, one_pass, one_epoch, request = Loader.until, Loader.__iter__, Loader.one_epoch, vars(batch_source)["BatchRequest"]

    @functools.wraps(until)
    def shortened(loader: Loader, run_length: Any, **options: Any) -> Any:
        name, length = f"dtrain-{numbers.setdefault(id(loader), len(numbers))}", parse_length(run_length)
        goal = recorder.run_goal(loader, length)
        if is_reached(goal, loader.position) and not is_reached(length, loader.position):
            recorder.pass_is_empty(MAX_ROLLOUTS)
        return recorded(until(loader, goal, **options), name)

    @functools.wraps(one_pass)
    def cut(loader: Loader) -> Iterator[Any]:
        with closing(recorded(one_pass(loader))) as batches:
            while not is_reached(recorder.last_step, loader.position) and (batch := next(batches, None)) is not None:
                yield batch

    def recorded(batches: Any, name: str = "") -> Any:
        with closing(batches):
            for batch in batches:
                yield recorder.batch_loaded(batch, name)

    def requested(epoch: int, start: int, indices: Any, repeats: int = 1) -> Any:
        # A rank without a sample reads one that does not count.
        recorder.sample_ids(epoch, indices.tolist() if repeats == 1 else [])
        return request(epoch, start, indices, repeats)

    Loader.until, Loader.__iter__ = shortened, cut  # type: ignore[method-assign, assignment]
    Loader.one_epoch = functools.wraps(one_epoch)(lambda loader: recorded(one_epoch(loader)))  # type: ignore[method-assign, assignment]
    vars(batch_source)["BatchRequest"] = requested
