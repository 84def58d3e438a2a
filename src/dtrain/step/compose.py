"""Compose a training step from a loss function, a list of transforms, a gradient function and an update function.

``optimizer_in_backward`` composes a step that runs the optimizer on each unit's gradient during backward, so that few gradients
are in memory at once. Transforms that wrap the update wrap the whole step there, and see no gradient before or after. This is
correct for a learning rate or an average of parameters. Transforms that need the whole gradient are refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dtrain import spans
from dtrain.arguments import check_int, explain_arguments, warn
from dtrain.data.batch import BatchSpec, FailedBatch, list_tensors
from dtrain.device import use_on_current_stream
from dtrain.dist.context import current_context
from dtrain.dist.dtensor import is_dtensor, to_local
from dtrain.dist.init import get_dist_info
from dtrain.errors import ConfigError, StepError
from dtrain.named_optimizers import list_members
from dtrain.schedules.durations import RunLength
from dtrain.schedules.hyperparameters import check_over_run
from dtrain.shard.activations import time_compilation
from dtrain.shard.grad_sync import grad_sync_of
from dtrain.shard.params import check_no_hooks
from dtrain.state import TrainState, check_state, init_state
from dtrain.step.microbatch_step import microbatch_step
from dtrain.step.microbatches import BatchWatch, check_first_run
from dtrain.step.normalization import divide_grads
from dtrain.step.optimizer import DelayedInterrupt, apply_gradients, step_optimizer, tick
from dtrain.step.optimizer_state import check_update
from dtrain.step.step_clock import begin_step
from dtrain.step.transform import (
    BeforeDivision,
    GradFn,
    GradStep,
    Transform,
    UpdateFn,
    check_transform,
    explain_listed_once,
    make_step_context,
    needs_division,
    state_key,
)
from dtrain.typing import Batch, LossFn, Metrics, TransformState

_STATE_LOST = (
    "optimizer_in_backward: the optimizer had already run on some of the parameters, so this step can be neither finished nor "
    "repeated. Build a new state and load the last checkpoint."
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Step:
    """Training step with an ``init`` for its state, returned by ``compose_step``.

    ``step(state, batch)`` returns the next state and the step's metrics (local sums).

    Args:
        transforms: transforms of the step; the first is outermost.
        grad: gradient function with its loss, wrapped by the transforms.
        update: update function, wrapped by the transforms.
        updates_in_backward: if True, ``grad`` updates parameters, so Ctrl-C waits from its beginning.
        divides_late: if True, nothing reads ``.grad`` before a stage of the update that also divides by the global weight.
    """

    transforms: tuple[Transform, ...]
    grad: GradFn
    update: UpdateFn
    updates_in_backward: bool = False
    divides_late: bool = False

    @explain_arguments
    def init(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer],
        *,
        seed: int = 0,
        loader: Any = None,
        stateful: Mapping[str, Any] | None = None,
        run_length: RunLength | None = None,
        missing_ok: bool = False,
        allow_equal_batches: bool = False,
        replica_check_every: int = 100,
    ) -> TrainState:
        """Return the state at step 0.

        Args:
            model: sharded and materialized model; a plain module works in one process.
            optimizer: optimizer of this model's parameters, built after sharding; or several by name, each parameter in one of
                them: ``{"matrices": muon, "rest": adamw}``. The name is then the first part of the name of each group, so
                ``scale_lr({"matrices": schedule})`` is a schedule of one optimizer.
            seed: seed of the random streams of transforms.
            loader: loader of the run. Its position is saved and loaded with the state, and the clock counts its epochs, also if
                the step runs on slices or copies of its batches. A loader of ``build_loader``, torchdata's
                ``StatefulDataLoader``, or any iterable with ``state_dict`` and ``load_state_dict``, whose states may differ
                between ranks; or ``dt.checkpoint.not_saved(loader)`` for a loader that starts anew after a resume.
            stateful: further objects of the run by name, saved and loaded with the state: objects with ``state_dict`` and
                ``load_state_dict`` (an ``early_stop``, a second loader), or dicts, lists and tensors, which a load fills in
                place. They must be equal on all ranks, unless marked by ``dt.checkpoint.per_rank``.
            run_length: length of the run, for intervals that are a share of it (``"0.1dur"``): ``loader.run_length("3ep")``.
            missing_ok: if True, the optimizer may hold only some of the trainable parameters, because another state trains the
                rest. Freeze parameters that no state trains with ``requires_grad_(False)``.
            allow_equal_batches: if True, data-parallel ranks may train on equal batches; if False, equal batches warn.
            replica_check_every: number of steps between two comparisons of the parameters that several ranks hold, by one
                number in the record of the step. The first steps of a process and every save compare them, too. A difference
                raises. 0 compares nothing, for a method that lets parameters differ on purpose.

        Mutates: this process's handling of SIGTERM, until the end of ``init_dist``'s block: from now on a SIGTERM makes
        ``should_stop`` return True. Also ``loader``, which then issues a batch again that had no step; and of several
        optimizers the ``name`` of each group, and ``state``, which they share.

        Example:
            step = dt.compose_step(loss_fn, [dt.transforms.ema(0.999)])
            state = step.init(model, optimizer, loader=loader)
            state = dt.load_sharded("ckpt", state, missing_ok=True)
            for batch in loader.until("3ep"):
                state, metrics = step(state, batch)

        Raises:
            ConfigError: an argument that is not a model or an optimizer; parameters on the meta device; an optimizer with
                parameters of another model, or without some trainable parameters; a parameter in two optimizers, by
                name; a rank of a launcher without ``init_dist``; a ``loader`` without ``state_dict``, such as a plain
                ``DataLoader``, or an object that a load cannot put back; a negative ``replica_check_every``. With
                ``run_length``, a schedule whose value is invalid in some step.

        Warns: UserWarning, on rank 0, without ``run_length``: a schedule whose value is invalid once a run is long enough.
        """
        time_compilation()
        state = init_state(
            model, optimizer, seed=seed, run_length=run_length, missing_ok=missing_ok, loader=loader, stateful=stateful
        )
        for hyper in (hyper for transform in self.transforms for hyper in transform.hyperparameters):
            warning = check_over_run(hyper, run_length)
            if warning is not None and get_dist_info().rank == 0:
                warn(warning)
        state._run_context.replica_check_every = check_int("init", "replica_check_every", replica_check_every, minimum=0)
        if allow_equal_batches:
            state._run_context.monitor.equal_batches.steps_left = 0
        init_transforms = self._init_transform_states
        return state._replace(transform_states=init_transforms(state), _init_transform_states=init_transforms)._recorded()

    def _init_transform_states(self, state: TrainState) -> dict[str, TransformState]:
        states = [(t, t.init(state)) for t in self.transforms]
        for transform, content in states:
            if content and state_key(transform) != transform.name:
                raise ConfigError(
                    f"init: a transform must keep the name of its state, got {transform.name!r} for a transform made as "
                    f"{state_key(transform)!r}, whose functions read that name. Use "
                    f"dt.transforms.named({transform.name!r}, transform) instead of dataclasses.replace."
                )
        return {t.name: transform_state for t, transform_state in states if not t.read_only}

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """Run one step over ``batch``: gradients, update, and one tick of the clock. Spends ``state``.

        Gradients are dropped at the end, also if a transform skips the update or raises. Ctrl-C waits for the end of an update
        that has begun; see ``TrainState.newest``.

        Raises:
            StaleStateError: ``state`` was stepped already.
            ConfigError: ``state`` is not a state of this step's ``init``.
            StepError: the model or the optimizer got a parameter after ``init``.
        """
        if not isinstance(state, TrainState):
            if isinstance(batch, TrainState):
                raise ConfigError(
                    f"step: the arguments must be (state, batch), got ({type(state).__name__}, TrainState). Swap them: "
                    "`state, metrics = step(state, batch)`."
                )
            check_state(state, "step", "state, metrics = step(state, batch)")
        state._check_not_stale("step")
        missing = [t.name for t in self.transforms if t.name not in state.transform_states and not t.read_only]
        if missing:
            raise ConfigError(f"step: the state has no transform state for {missing}. Create it with this step's own init.")
        with DelayedInterrupt() as interrupt:
            spans.begin("step", 0)
            try:
                if self.updates_in_backward:
                    interrupt.begin()
                state = begin_step(state, batch, divides_late=self.divides_late)
                state, metrics = self.grad(state, batch)
                interrupt.begin()
                state, metrics = self.update(state, metrics)
                # An update that was skipped leaves gradients.
                state._drop_trainable_gradients()
            except BaseException:
                # A transform may have changed the trainable parameters after ``state``.
                state.drop_gradients()
                raise
            finally:
                spans.end("step")
            return tick(state), metrics

    def __repr__(self) -> str:
        return f"Step({', '.join(t.name for t in self.transforms)})"


@explain_arguments
def compose_step(
    loss_fn: LossFn,
    transforms: Sequence[Transform] = (),
    *,
    microbatch_size: int | None = None,
    batch_spec: BatchSpec | None = None,
    grad: GradStep = microbatch_step,
    update: UpdateFn = apply_gradients,
) -> Step:
    """Compose one training step. The first transform in the list is outermost.

    The clock ticks exactly once per call, even if a transform calls its inner function several times.

    Args:
        loss_fn: ``(model, microbatch) -> LossSum``.
        transforms: transforms with different names.
        microbatch_size: samples per forward and backward, passed to ``grad``; None uses the whole local batch, or the size of
            ``auto_microbatch``.
        batch_spec: description of the batch, passed to ``grad``; None uses the first axis.
        grad: function that computes gradients, such as ``dt.step.grad_cache_step``.
        update: function that applies gradients.

    Example:
        transforms = [dt.transforms.clip_by_norm(1.0), dt.auto_microbatch()]
        step = dt.compose_step(loss_fn, transforms)
        state = step.init(model, optimizer)
        for batch in loader:
            state, metrics = step(state, batch)

    Raises:
        ConfigError: an argument that is not a function or a transform, two transforms with one name, a ``microbatch_size``
            beside ``auto_microbatch``, or a ``grad`` that does not take ``microbatch_size`` or ``batch_spec``.
    """
    check_step_parts("compose_step", loss_fn, transforms, grad, update)
    if microbatch_size is not None and any(transform.name == "auto_microbatch" for transform in transforms):
        raise ConfigError(
            f"compose_step: microbatch_size must be None beside auto_microbatch, got {microbatch_size}. Leave it out, or write "
            f"auto_microbatch(initial_size={microbatch_size})."
        )
    grad = bind_grad_options("compose_step", grad, microbatch_size=microbatch_size, batch_spec=batch_spec)
    return Step(
        transforms=tuple(transforms),
        grad=wrap_grad(loss_fn, transforms, grad),
        update=wrap_update(transforms, update),
        divides_late=_divides_late(transforms, grad, update),
    )


def _divides_late(transforms: Sequence[Transform], grad: GradStep, update: UpdateFn) -> bool:
    """Return True if nothing reads the gradients of a step before a stage of the update that can divide them."""
    changes_early = any(needs_division(t, t.grad) and not t.read_only for t in transforms)
    if changes_early or any(not isinstance(t.grad_step, BeforeDivision | None) for t in transforms):
        return False
    users = [t for t in transforms if t.update and t.uses_grad and not t.read_only]
    return _is_of_dtrain(grad) and (not needs_division(users[0], users[0].update) if users else _takes_divisor(update))


def _takes_divisor(update: UpdateFn) -> bool:
    return getattr(update, "func", update) is apply_gradients


def bind_grad_options(
    caller: str, grad: GradStep, *, microbatch_size: int | None = None, batch_spec: BatchSpec | None = None
) -> GradStep:
    """Return ``grad`` with those options that are not None.

    Raises:
        ConfigError: ``grad`` does not take an option or has it already, or an option has another type.
    """
    options: dict[str, Any] = {}
    if microbatch_size is not None:
        options["microbatch_size"] = check_int(caller, "microbatch_size", microbatch_size)
    if batch_spec is not None:
        if not isinstance(batch_spec, BatchSpec):
            raise ConfigError(f"{caller}: batch_spec must be a BatchSpec, got {batch_spec!r}. Write dt.batch_spec(...).")
        options["batch_spec"] = batch_spec
    if not options:
        return grad
    parameters = inspect.signature(grad).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for name in options:
        if isinstance(grad, partial) and name in grad.keywords:
            raise ConfigError(f"{caller}: {name} must be given once, got it here and in grad. Leave it out of the partial.")
        if name not in parameters and not takes_any:
            raise ConfigError(
                f"{caller}: grad must take {name}= to use it, got {getattr(grad, '__name__', grad)}"
                f"{inspect.signature(grad)}. Add the parameter to grad, or leave {name} out."
            )
    return partial(grad, **options)


def should_stop(state: TrainState) -> bool:
    """Return True if a rank was told to stop before the step that led to ``state``; the result is equal on every rank.

    A run is told to stop by SIGTERM, or by the signal of ``dtrain launch --stop-signal``. Call the function in every iteration.
    If it returns True, save and leave ``init_dist``'s block. If a save was committed since, the block exits with code 75 on
    every rank.

    Args:
        state: the newest state of the run.

    Collective: none; the ranks agree in the record that they exchange before each step.

    Example:
        for batch in loader.until("3ep"):
            state, metrics = step(state, batch)
            if dt.should_stop(state):
                break
        dt.save_sharded("ckpt", state)

    Raises:
        StaleStateError: ``state`` was stepped already.
    """
    state._check_not_stale("should_stop")
    return current_context().preemption.poll()


def wrap_grad(loss_fn: LossFn, transforms: Sequence[Transform], grad: GradStep) -> GradFn:
    """Return ``grad`` with its loss, wrapped by the transforms; the first transform is outermost."""
    # dtrain's functions watch their batch themselves, so that an error reaches all ranks.
    is_watched = _is_of_dtrain(grad)
    for transform in reversed(transforms):
        grad = transform.grad_step(grad) if transform.grad_step else grad
    compute = _bind_loss(loss_fn, transforms, grad, is_watched=is_watched)
    for transform in reversed(transforms):
        if transform.grad and transform.read_only and needs_division(transform, transform.grad):
            compute = _lend_to_grad(transform.grad, compute)
        elif transform.grad:
            compute = transform.grad(compute)
    return compute


def _is_of_dtrain(grad: GradStep) -> bool:
    return getattr(getattr(grad, "func", grad), "__module__", "").startswith("dtrain.")


def wrap_update(transforms: Sequence[Transform], update: UpdateFn) -> UpdateFn:
    """Return ``update`` wrapped by the transforms; the first transform is outermost.

    Gradients that wait for their division are divided before the outermost function that needs the division.
    """
    users = [t for t in transforms if needs_division(t, t.update) and not t.read_only]
    if not users and not _takes_divisor(update):
        update = _divide_before(update)
    for transform in reversed(transforms):
        if transform.update and transform.read_only and needs_division(transform, transform.update):
            update = _lend_to_update(transform.update, update)
        elif transform.update:
            update = transform.update(update)
        if users and transform is users[0]:
            update = _divide_before(update)
    return update


def _divide_before(update: UpdateFn) -> UpdateFn:
    return lambda state, metrics: update(divide_grads(state), metrics)


def _lend_grads(state: TrainState) -> TrainState:
    """Put divided copies in the place of gradients that wait for their division, for a transform that only observes.

    With copies the observer does not change the rounding of the training result. Mutates: ``.grad``, if there is a divisor.
    """
    divisor = state._grad_divisor
    if divisor is None or (not isinstance(divisor, Tensor) and divisor == 1.0):
        return state
    originals = [(param, grad) for param in state._trainable.values() if (grad := param.grad) is not None]
    for param, grad in originals:
        param.grad = grad.clone()
    return divide_grads(state)._replace(_lent_grads=(originals, divisor))


def _take_grads_back(state: TrainState) -> TrainState:
    """Return ``state`` with the gradients of before ``_lend_grads``. Mutates: ``.grad``, if there are copies."""
    if state._lent_grads is None:
        return state
    originals, divisor = state._lent_grads
    for param, grad in originals:
        param.grad = grad
    return state._replace(_grad_divisor=divisor, _lent_grads=None)


def _lend_to_update(wrap: Callable[[UpdateFn], UpdateFn], inner: UpdateFn) -> UpdateFn:
    observed = wrap(lambda state, metrics: inner(_take_grads_back(state), metrics))
    return lambda state, metrics: observed(_lend_grads(state), metrics)


def _lend_to_grad(wrap: Callable[[GradFn], GradFn], inner: GradFn) -> GradFn:
    def compute(state: TrainState, batch: Batch, *, microbatch_size: int | None = None) -> tuple[TrainState, Metrics]:
        state, metrics = inner(_take_grads_back(state), batch, microbatch_size=microbatch_size)
        return _lend_grads(state), metrics

    observed = wrap(compute)

    def grad_fn(state: TrainState, batch: Batch, *, microbatch_size: int | None = None) -> tuple[TrainState, Metrics]:
        state, metrics = observed(state, batch, microbatch_size=microbatch_size)
        return _take_grads_back(state), metrics

    return grad_fn


def check_step_parts(caller: str, loss_fn: LossFn, transforms: Sequence[Transform], grad: GradStep, update: UpdateFn) -> None:
    """Check the arguments of a function that composes a step.

    Raises:
        ConfigError: an argument that is not a function or a transform, or two transforms with one name.
    """
    example = f"{caller}(loss_fn, [dt.transforms.ema(0.999)])"
    for name, function, shape in (
        ("loss_fn", loss_fn, "(model, batch) -> LossSum"),
        ("grad", grad, "(state, batch, *, loss_fn, microbatch_size) -> (state, metrics)"),
        ("update", update, "(state, metrics) -> (state, metrics)"),
    ):
        if not callable(function):
            raise ConfigError(f"{caller}: {name} must be a function {shape}, got {function!r}. Write {example}.")
    if isinstance(transforms, Transform) or not isinstance(transforms, Sequence):
        got = f"the Transform {transforms.name!r}" if isinstance(transforms, Transform) else repr(transforms)
        raise ConfigError(f"{caller}: transforms must be a list, got {got}. Write {example}.")
    for transform in transforms:
        check_transform(transform, caller, f"{caller}(loss_fn, [{{}}])")
    names = [t.name for t in transforms]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        advice = next(filter(None, (explain_listed_once(t) for t in transforms if t.name == repeated[0])), "")
        raise ConfigError(
            f"{caller}: transform names must differ (they key transform states), got {repeated[0]!r} twice. "
            + (advice or f"Rename one: dt.transforms.named('{repeated[0]}_2', transform).")
        )


def _bind_loss(loss_fn: LossFn, transforms: Sequence[Transform], grad: GradStep, *, is_watched: bool) -> GradFn:
    wrappers = [(t.name, t.loss) for t in reversed(transforms) if t.loss]

    def compute(state: TrainState, batch: Batch, *, microbatch_size: int | None = None) -> tuple[TrainState, Metrics]:
        loss = loss_fn
        for name, wrap in wrappers:
            loss = wrap(loss, make_step_context(state, name))
        size: dict[str, Any] = {} if microbatch_size is None else {"microbatch_size": microbatch_size}
        if is_watched:
            return grad(state, batch, loss_fn=loss, **size)
        return _compute_watched(state, batch, partial(grad, loss_fn=loss, **size))

    return compute


def _compute_watched(state: TrainState, batch: Batch, grad: GradFn) -> tuple[TrainState, Metrics]:
    """Run the user's own gradient function; refuse a batch that an earlier run of this step wrote into."""
    try:
        check_first_run(state, batch)
    except StepError as error:
        batch = FailedBatch(error)
    watch = BatchWatch(list_tensors(batch))
    try:
        return grad(state._with_trainable(), batch)
    finally:
        watch.record(state)


def optimizer_in_backward(
    loss_fn: LossFn,
    transforms: Sequence[Transform] = (),
    *,
    batch_spec: BatchSpec,
    microbatch_size: int | None = None,
) -> Step:
    """Compose a step like ``compose_step``, with the same result, that keeps the gradients of one unit instead of all.

    In the backward of the last microbatch, a unit's gradient is applied and dropped after its reduction; in a plain model
    this happens per parameter. The step saves the memory of this rank's gradients, and of the optimizer's temporary tensors,
    whose ``foreach`` form needs the size of the gradients once more. Under ``"shard_grad_op"`` the peak is at least the
    gathered parameters, which are freed as gradients arrive. With several microbatches, gradients that wait for the last
    microbatch use memory as usual (``accumulate="local"``: full gradients; ``"sharded"``: shards).

    The optimizer must update every parameter independently, as torch's optimizers do. Its ``step`` and the hooks
    of ``step`` run once per unit. Three kinds are updated after backward: parameters that this rank's samples did not
    reach, ignored parameters, and units with a forward but no backward.

    An error before backward leaves the state unchanged. A later error (in the model's backward, on another rank, or a loss with
    another weight than declared) leaves some parameters updated. The error has a note that says so, and the state is spent.

    Args:
        loss_fn: ``(model, microbatch) -> LossSum``.
        transforms: transforms that do not read the gradient: ``scale_lr``, ``ema``, ``on_batch``, transforms that wrap the
            loss, and any transform with ``uses_grad=False``. They wrap the whole step as its update, without earlier metrics.
        batch_spec: description of the batch. Its ``weight`` is required before the first backward, because the gradient cannot
            be divided afterwards.
        microbatch_size: as in ``microbatch_step``.

    Example:
        spec = dt.batch_spec(weight=lambda batch: len(batch["labels"]))
        step = dt.step.optimizer_in_backward(loss_fn, batch_spec=spec, microbatch_size=8)
        state = step.init(model, optimizer)
        for batch in loader:
            state, metrics = step(state, batch)

    Raises:
        ConfigError: a ``batch_spec`` without ``weight``, a transform that needs the gradient, or arguments that
            ``compose_step`` refuses; in a step, a model with tensor or context parallelism, or a gradient hook of a parameter.
        StepError: in a step, a unit whose gradient arrived in several parts.
    """
    check_step_parts("optimizer_in_backward", loss_fn, transforms, microbatch_step, apply_gradients)
    if not isinstance(batch_spec, BatchSpec) or batch_spec.weight is None:
        raise ConfigError(
            f"optimizer_in_backward: batch_spec must have a weight, got {batch_spec!r}. Pass "
            "dt.batch_spec(weight=...), because the gradient is applied before the weight of the losses is known."
        )
    for transform in transforms:
        if transform.grad_step or (transform.uses_grad and (transform.grad or transform.update)):
            raise ConfigError(
                f"optimizer_in_backward: the transform {transform.name!r} may need the gradient, which is never complete here. "
                "Use dt.compose_step, or leave it out. A transform that does not read .grad sets Transform(uses_grad=False)."
            )
    grad = partial(microbatch_step, batch_spec=batch_spec, microbatch_size=microbatch_size)
    compute = wrap_grad(loss_fn, transforms, grad)

    def update_all(state: TrainState, batch: Batch, *, microbatch_size: int | None = None) -> tuple[TrainState, Metrics]:
        def update_fn(state: TrainState, metrics: Metrics) -> tuple[TrainState, Metrics]:
            return _compute_and_apply(state, metrics, lambda: compute(state, batch))

        return wrap_update(transforms, update_fn)(state._with_trainable(), {})

    return Step(
        transforms=tuple(transforms),
        grad=update_all,
        update=lambda state, metrics: (state, metrics),
        updates_in_backward=True,
    )


def _compute_and_apply(
    state: TrainState, metrics: Metrics, compute: Callable[[], tuple[TrainState, Metrics]]
) -> tuple[TrainState, Metrics]:
    if state.spec.ranks_per_batch > 1:
        raise ConfigError("optimizer_in_backward: tensor and context parallelism are not supported. Use dt.compose_step.")
    check_no_hooks(state._trainable, "optimizer_in_backward")
    done: set[int] = set()
    try:
        with grad_sync_of(state.model).on_grad_ready(list(state._trainable.values()), partial(apply_gradients_of, state, done)):
            state, step_metrics = compute()
        remaining = [param for param in state._trainable.values() if param.grad is not None]
        # A forward outside of the step left parameters unsharded, as in apply_gradients.
        grad_sync_of(state.model).reshard()
        # The foreach form of an optimizer accepts no mix of DTensors and plain tensors.
        for kind in (True, False):
            apply_gradients_of(state, done, [param for param in remaining if is_dtensor(param) == kind])
        if not state._run_context.optimizer_checked:
            check_update(state, lambda: None, caller="optimizer_in_backward")
    except BaseException as error:
        # The optimizer has run on some parameters.
        if done:
            state._run_context.interrupted_write = _STATE_LOST
            error.add_note(_STATE_LOST)
        raise
    return state._next(), {**metrics, **step_metrics}


def apply_gradients_of(state: TrainState, done: set[int], params: Sequence[Tensor]) -> None:
    """Run the optimizer on ``params`` alone, and drop their gradients.

    Mutates: ``params``, their optimizer state and ``.grad``, ``done``.
    """
    if not done.isdisjoint(map(id, params)):
        raise StepError(
            "optimizer_in_backward: a parameter got a second gradient after the optimizer had run on it, because it is used "
            "outside of its unit. Use dt.compose_step."
        )
    if not params:
        return
    done.update(map(id, params))
    grads = [to_local(param.grad) for param in params if param.grad is not None]
    for member in list_members(state.optimizer):
        with _restrict_optimizer_to(member, {id(param) for param in params}) as nonempty:
            if nonempty:
                step_optimizer(member)
    for param, grad in zip(params, grads, strict=True):
        # FSDP2 may have allocated the gradient in another stream, which would reuse the memory too early.
        use_on_current_stream(grad)
        param.grad = None


@contextmanager
def _restrict_optimizer_to(optimizer: torch.optim.Optimizer, chosen: set[int]) -> Iterator[bool]:
    """Restrict ``optimizer`` to the ``chosen`` parameters inside a context; yield True if the optimizer has any of them.

    Mutates: ``optimizer.param_groups`` and the ``params`` of each group, inside the context.
    """
    groups = optimizer.param_groups
    all_params = [group["params"] for group in groups]
    try:
        for group, params in zip(groups, all_params, strict=True):
            group["params"] = [param for param in params if id(param) in chosen]
        optimizer.param_groups = [group for group in groups if group["params"]]
        yield bool(optimizer.param_groups)
    finally:
        optimizer.param_groups = groups
        for group, params in zip(groups, all_params, strict=True):
            group["params"] = params
