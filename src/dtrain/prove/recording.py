"""Record the facts of one rank of a run for ``dtrain prove`` (``RankRecorder``), which hooks of dtrain and torch observe.

Facts have the step before whose update they belong, counted from 0, and the number of the optimizer, because a script may
train several models. ``dtrain_hooks`` observes dtrain's step, ``torch_hooks`` all other loops.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from dtrain.data.batch import FailedBatch, copy_batch_info, get_batch_infos, list_tensors
from dtrain.dist.dtensor import to_local
from dtrain.errors import ConfigError
from dtrain.fqn import buffers_by_fqn, modules_by_fqn
from dtrain.prove.evaluations import Evaluations, reshard
from dtrain.prove.experiments import Padding, Replay, Slope
from dtrain.prove.overrides import EvenRandom, FrozenStatistics, LowSums, cast_floats, enter_for_good, use_one_dtype
from dtrain.prove.run_config import RECORDED_LENGTHS, SAVE_INTERVAL, RunConfig
from dtrain.prove.run_log import (
    RunLog,
    StepFacts,
    count_items,
    count_samples,
    digest,
    flatten,
    is_number,
    named_tensors,
    sample_hashes,
    to_number,
)
from dtrain.prove.script_values import (
    ScriptModels,
    copies_of_weights,
    global_generators,
    model_values,
    modes_of,
    moves_toward,
    params_of,
    scaler_values,
    script_closures,
    script_frames,
    script_line,
    script_variables,
    signature_of,
)
from dtrain.schedules.durations import Duration
from dtrain.shard.buffers import buffer_choice
from dtrain.shard.spec import ShardSpec
from dtrain.state import TrainState
from dtrain.typing import LossSum

# Updates of a loop that prepares the loop of dtrain's step, such as that of a codec.
_MAX_PREPARATION = 2000
MAX_ROLLOUTS = 100
"""Loops over a loader of dtrain without a batch, after which the script waits for steps that never come."""

MAX_EPOCHS = 1000
"""The same for a loader of torch. Many scripts count epochs, whose end the script reaches without a batch."""

_STEP_HOOKS: tuple[dict[Any, Any], dict[Any, Any]] = (_global_optimizer_pre_hooks, _global_optimizer_post_hooks)


class EndOfProof(SystemExit):
    """Ends a script whose loop cannot be shortened. Exit handlers run as after ``sys.exit()``."""


class UpdateObserver:
    """Base of an object whose methods are hooks of optimizers, which dtrain's own update removes while it runs."""


class RankRecorder:
    """Recorder of the facts of one rank, which also holds what the run changes in the script.

    Args:
        config: the run.
        rank: this rank.
    """

    def __init__(self, config: RunConfig, rank: int) -> None:
        self.config = config
        self.log = RunLog(Path(config.folder), rank)
        self.log.step = config.first_step
        self.log.whole = config.whole if config.ranks > 1 else None
        self.facts = StepFacts()
        self.in_step = self._in_update = self.in_forward = False
        self.steps_of_dtrain = False
        self._has_dtrain_loop = config.has_dtrain_loop or config.may_have_dtrain_loop
        # By number. They are kept, so that no other optimizer gets the address of one.
        self._optimizers: list[list[Any]] = []
        self.updates: dict[int, int] = {}
        self._initial: set[int] = set()
        # Parameters and buffers whose initial values are written, by ``id``.
        self._begun = set[int]()
        self._names: dict[int, str] = {}
        self._trained: dict[int, list[nn.Module]] = {}
        # Parameters of all optimizers, also of those that have not run yet.
        self.optimized = set[int]()
        self._averages: dict[str, Tensor] = {}
        # Step, number of the optimizer and digests of plain parameters after the last update by hand.
        self._updated: tuple[int, int, dict[str, str]] | None = None
        self._notes: set[str] = set()
        # Loops over a shortened loader that has no batch left.
        self.empty_passes = 0
        self._read_line = ""
        # The last batch that the script has read. It is kept, so that no other tensor gets the address of one of its tensors.
        self._read: Any = None
        self._lost_sums: set[str] = set()
        self.dtype = use_one_dtype(config.dtype, self._on_low)
        if self.dtype is None and config.ranks == 1:
            enter_for_good(LowSums(self._on_lost_sum))
        self.models = ScriptModels(self.dtype)
        self.random = EvenRandom(self._on_draw, active=config.even_random)
        self.replay = Replay(config, rank)
        self.slope, self.padding = Slope(config, self.log), Padding(config)
        self.averages_statistics = False
        self.scalers: list[torch.amp.GradScaler] = []
        if config.experiment == "local_batch_norm":
            self.note("frozen_statistics")
        # Model whose calls are forwards of the step in progress, because the loss sees the whole batch.
        self.cached_model: nn.Module | None = None
        self.outputs = ModuleOutputs(config, self.log)
        self.evaluations = Evaluations(config, self.log, self.note)

    # ---- what the script cannot keep ----

    def note(self, code: str, **content: Any) -> None:
        """Write a fact about the whole run, once."""
        key = f"{code}{sorted(content.items())}"
        if key not in self._notes:
            self._notes.add(key)
            self.log.write("note", code=code, **content)

    def _on_low(self, dtype: torch.dtype) -> None:
        self.note("low_precision", dtype=str(dtype).removeprefix("torch."))

    def _on_lost_sum(self, value: Tensor, total: float, terms: int) -> None:
        place = script_line(self.config.script)
        if place and place not in self._lost_sums:
            self._lost_sums.add(place)
            dtype = str(value.dtype).removeprefix("torch.")
            self.log.write("lost_sum", place=place, dtype=dtype, value=float(value), total=total, terms=terms)

    def _on_draw(self, use: str) -> None:
        self.note("draws")
        # Evaluations run without gradients.
        self.facts.draws += torch.is_grad_enabled()
        self.facts.drops += use == "dropout" and torch.is_grad_enabled()

    def sharding(self, model: nn.Module, strategy: str, precision: Any, buffers: Any) -> tuple[str, Any]:
        """Return the strategy and the precision with which ``shard_model`` shards ``model``."""
        choices = {name: buffer_choice(ShardSpec(buffers=buffers), name) for name in buffers_by_fqn(model)}
        own = [name for name, choice in choices.items() if choice == "own"]
        self.note("sharding", strategy=strategy, precision=repr(precision), own_buffers=own)
        self.models.add(model)
        norms = (name for name, module in modules_by_fqn(model) if isinstance(module, nn.modules.batchnorm._BatchNorm))
        if any(choices.get(f"{name}.running_mean".removeprefix(".")) == "mean" for name in norms):
            self.note("frozen_statistics")
            self.averages_statistics = True
            if self.config.even_random:
                FrozenStatistics()
        if self.dtype is not None:
            if precision is not None and precision.param not in (None, "fp32"):
                self._on_low(getattr(torch, {"bf16": "bfloat16", "fp16": "float16"}[precision.param]))
            precision = None
        return self.config.strategy or strategy, precision

    def run_starts(self, model: nn.Module, optimizer: Any) -> None:
        """Observe the model and the optimizer of a new ``TrainState``, before the state is made."""
        self._start_dtrain_loop()
        self.models.add(model)
        self.index_of(optimizer)

    @property
    def last_step(self) -> Duration:
        """Length of the run."""
        return Duration(self.config.steps, "ba")

    def run_goal(self, loader: Any, goal: Duration) -> Duration:
        """Return the length to which a loop over ``loader`` runs instead of ``goal``."""
        try:
            return Duration(min(loader.total_steps(goal), self.config.steps), "ba")
        # The dataset has no length.
        except ConfigError:
            return self.last_step

    def crosses(self, step: int) -> bool:
        """Return True if ``state.crossed`` is True after ``step``, so that a short run saves and evaluates, too."""
        return step > 0 and (step % SAVE_INTERVAL == 0 or step == self.config.steps)

    def microbatch_size(self, size: int | None) -> int | None:
        """Return the microbatch size of a step instead of ``size``."""
        self.note("microbatches", size=size)
        return self.config.microbatch_size or size

    def batch_loaded(self, batch: Any, loader: str = "") -> Any:
        """Return the batch of a dtrain loader in the dtype of the run, with its position. A loader of training has a name."""
        if isinstance(batch, FailedBatch):
            return batch
        if loader:
            batch = copy_batch_info(batch, self.padding.widen(self.replay.exchange(loader, batch)))
        if self.dtype is not None:
            for info in get_batch_infos(batch):
                if info.padding_sample is not None:
                    info.padding_sample = cast_floats(info.padding_sample, self.dtype)
            batch = copy_batch_info(batch, cast_floats(batch, self.dtype))
        self.batch_read(batch, loader)
        return batch

    def batch_read(self, batch: Any, loader: str, number: int = 0) -> None:
        """Observe that the script reads a batch of a loader, in its pass ``number``. A loader of training has a name."""
        self._read_line = script_line(self.config.script)
        self._read = batch
        if loader:
            self.log.write("read", loader=loader, number=number, samples=sample_hashes(batch))
        self.random.batch_loaded(self.log.step, count_samples(batch))

    def sample_ids(self, epoch: int, indices: Sequence[int]) -> None:
        """Observe the indices of the samples that a loader reads for a batch."""
        # The loader plans batches ahead, and evaluations plan batches, too; the ids name an order, not a step.
        self.log.write("planned", epoch=epoch, ids=list(indices))

    # ---- optimizers ----

    def index_of(self, optimizer: Any) -> int:
        """Return the number of an optimizer, in the order of the first use.

        An optimizer with a parameter of an earlier one goes on with its number, as after layers are unfrozen.
        """
        for index, others in enumerate(self._optimizers):
            if any(optimizer is other for other in others):
                return index
        own = params_of(optimizer)
        earlier = [index for index, others in enumerate(self._optimizers) if own & params_of(others[-1])]
        if not earlier:
            self._optimizers.append([])
        index = earlier[0] if earlier else len(self._optimizers) - 1
        self._optimizers[index].append(optimizer)
        return index

    def _start_dtrain_loop(self) -> None:
        """Forget a loop by hand that prepares the training, such as that of a codec on rank 0: other ranks may not run it."""
        if not self.steps_of_dtrain:
            self.steps_of_dtrain, self.log.optimizer_index, self.log.step = True, 0, self.config.first_step
            for seen in (self._optimizers, self.updates, self._initial, self._begun):
                seen.clear()
            self.log.write("loop_starts")

    # ---- a step ----

    def step_begins(self, state: TrainState, batch: Any) -> None:
        """Observe the batch of a step, before the transforms and the forward."""
        self._start_dtrain_loop()
        self.log.optimizer_index = self.index_of(state.optimizer)
        self.log.step = state.step
        self.facts = StepFacts()
        self.in_step = True
        self.stop_if_done()
        self.write_initial(state.optimizer)
        self.slope.shift_(self.models)
        self.log.write(
            "layout",
            data_rank=state.spec.data_rank,
            data_ranks=state.spec.data_ranks,
            counts=state.spec.counts_in_loss,
        )
        self.facts.add_batch(batch)
        of_loader = {id(tensor) for tensor in list_tensors(self._read)}
        tensors = list_tensors(batch)
        read = [tensor for tensor in tensors if id(tensor) in of_loader]
        self.facts.loaded = sample_hashes(read) if len(read) < len(tensors) else []
        self.facts.rng = self.rng_digest()

    def stop_if_done(self) -> None:
        """End the process at the step of the kill, or a loop that goes on beyond the limit."""
        in_loop = self.in_step or (not self.config.has_dtrain_loop and self._is_of_loop())
        if in_loop and self.log.step == self.config.kill_after:
            if dist.is_initialized():
                dist.barrier()
            self.log.write("killed")
            if self.log.rank == self.config.kill_rank:
                os.kill(os.getpid(), signal.SIGKILL)
        prepares = self._has_dtrain_loop and not self.steps_of_dtrain
        limit = _MAX_PREPARATION if prepares else self.config.cut_after or self.config.steps * RECORDED_LENGTHS
        if max(self.updates.values(), default=0) >= limit:
            self.note("loop_cut")
            raise EndOfProof(0)

    def _is_of_loop(self) -> bool:
        """Return True if the last update was not of a loop by hand that prepares the loop that is killed."""
        last = self._optimizers[self.log.optimizer_index :][:1]
        return not self.config.loop or any(signature_of(optimizers[-1]) in self.config.loop for optimizers in last)

    def first_step_of(self, optimizer: Any) -> int:
        """Return the number of the first step of an optimizer. After a resume, a loop before the training begins again."""
        return self.config.loop.get(signature_of(optimizer), 0) if self.config.loop else self.config.first_step

    def pass_is_empty(self, limit: int) -> None:
        """End a script that asks a shortened loop more than ``limit`` times for batches, as a loop over rollouts does."""
        self.empty_passes += 1
        if self.empty_passes > limit:
            self.note("loop_cut")
            raise EndOfProof(0)

    def write_initial(self, optimizer: Any) -> None:
        """Write the variables of the script, and before the first step of an optimizer the initial parameters."""
        self.flush_evaluation()
        optimizer_index = self.log.optimizer_index
        if optimizer_index == 0:
            self._write_variables()
        if optimizer_index in self._initial:
            return
        self._initial.add(optimizer_index)
        for model in self.models.modules:
            # A forward before the first step, as in a rollout, leaves the root unsharded.
            reshard(model)
        self._trained[optimizer_index] = self.models.trained_by(optimizer)
        named = self.models.parameters()
        names = self._names = {id(param): name for name, param in named.items()}
        own = [id(param) for group in optimizer.param_groups for param in group["params"]]
        self.log.write(
            "optimizer",
            optimizer=type(optimizer).__name__,
            signature=signature_of(optimizer),
            params=len(own),
            unknown=[index for index, param in enumerate(own) if param not in names],
            names=[names[param] for param in own if param in names],
            model_params=len(named),
        )
        # All ranks write the parameters of a sharded model here, whichever of them have run other optimizers before.
        for name, param in named.items():
            if not param.is_meta and id(param) not in self._begun:
                self.log.write_tensor("initial", name, param, trains=param.requires_grad)
        self._write_buffers("initial", without=self._begun)
        self._begun |= {id(tensor) for tensor in (*named.values(), *self.models.buffers().values())}
        if own and not any(param in names for param in own):
            for number, param in enumerate(param for group in optimizer.param_groups for param in group["params"]):
                self.log.write_tensor("initial", f"optimizer.{number}", param, trains=True)

    def _write_variables(self) -> None:
        frames = script_frames(sys._getframe(1), self.config.script)
        values = [read(frames, self.models.modules) for read in (script_variables, script_closures)]
        for variable in chain(model_values(self.models.modules), *values, global_generators(), scaler_values(self.scalers)):
            self.log.write("variable", **variable)

    def keep_averages(self) -> None:
        """Keep copies of the tensors that may be averages of weights, until the update of the step."""
        self._averages = {name: tensor.clone() for name, tensor in self._find_averages().items()}

    def _find_averages(self) -> dict[str, Tensor]:
        # On several ranks a copy may be a shard.
        if not self.optimized or self.config.ranks > 1 or not self.records_updates():
            return {}
        others = {name: param for name, param in self.models.parameters().items() if id(param) not in self.optimized}
        copies = copies_of_weights(script_frames(sys._getframe(1), self.config.script), self.models.modules)
        return {name: to_local(tensor.detach()) for name, tensor in (others | copies).items() if not tensor.is_meta}

    def write_early_averages(self, optimizer: Any) -> None:
        """Write which tensors have moved toward the weights that ``optimizer`` is about to change, since the last backward."""
        names = {id(param): name for name, param in self.models.parameters().items()}
        params = [param for group in optimizer.param_groups for param in group["params"]]
        for name, tensor in self._find_averages().items() if self._averages else ():
            before = self._averages.get(name)
            if before is None or before.shape != tensor.shape or torch.equal(before, tensor):
                continue
            for param in params:
                if param.shape == tensor.shape and moves_toward(before, tensor, to_local(param.detach())):
                    self.log.write("early_average", name=name, parameter=names.get(id(param), "the weights"))
        self._averages = {}

    def update_ends(self, updates: int) -> None:
        """Count the updates of the optimizer in progress. After the last one, variables show what the step has overwritten."""
        self.updates[self.log.optimizer_index] = self.log.step = updates
        if self.log.optimizer_index == 0 and updates == self.config.steps:
            self._write_variables()

    def rng_digest(self) -> str:
        """Return a digest of the state of torch's global generator."""
        return digest(flatten(torch.get_rng_state()))

    def forward_begins(self, batch: Any) -> None:
        """Observe the start of a forward of the step."""
        self.facts.forwards += 1
        self.facts.shapes += [list(tensor.shape[1:]) for tensor in list_tensors(batch)[:1]]
        self.facts.counts.append(count_items(batch))
        self.random.begin(self.log.step, count_samples(batch))

    def loss(self, loss: LossSum) -> None:
        """Observe the loss of a microbatch, at the end of its forward."""
        self.random.end()
        self.facts.losses.append((to_number(loss.total), to_number(loss.weight)))
        self.facts.backwards += 1

    @contextmanager
    def update(self, state: TrainState, params: Sequence[Tensor] | None = None) -> Iterator[None]:
        """Write the gradients before the context applies them; an update in backward has several parts, each of ``params``."""
        self.log.optimizer_index = self.index_of(state.optimizer)
        if not self._in_update:
            self.write_step(state.optimizer)
            self.facts = StepFacts()
        self._in_update = params is not None
        self.write_gradients(state.optimizer, params)
        # The hooks of other optimizers would keep dtrain from updating shards directly.
        removed = [
            {key: hook for key, hook in hooks.items() if isinstance(getattr(hook, "__self__", None), UpdateObserver)}
            for hooks in _STEP_HOOKS
        ]
        for hooks, own in zip(_STEP_HOOKS, removed, strict=True):
            for key in own:
                del hooks[key]
        try:
            yield
        finally:
            for hooks, own in zip(_STEP_HOOKS, removed, strict=True):
                hooks.update(own)

    def write_step(self, optimizer: Any) -> None:
        """Write the facts of the step and the state of the optimizer, right before its update."""
        modules = hashlib.blake2b("\n".join(self.facts.modules).encode(), digest_size=8).hexdigest()
        rates = [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
        modes = modes_of(self._trained.get(self.log.optimizer_index, ()))
        lines = {**self.facts.lines, "read": self._read_line, "update": script_line(self.config.script)}
        models = self._trained.get(self.log.optimizer_index, [])
        alone = not (self.steps_of_dtrain or self.facts.collectives or self.models.share_gradients(models))
        content = {**asdict(self.facts), "modules": modules, "ties": self.models.ties(), "lr": rates, "lines": lines, **modes}
        content["alone"] = alone
        self.log.write("step", **content)
        self.log.write_optimizer_state(optimizer)

    def write_gradients(self, optimizer: Any, params: Sequence[Tensor] | None = None) -> None:
        """Write the gradients of ``params``, or of all parameters of the optimizer."""
        # In backward, some units of a model have unsharded parameters, which are other objects.
        names = self._names | {id(param): name for name, param in self.models.parameters().items()}
        chosen = None if params is None else {id(param) for param in params}
        for number, param in enumerate(param for group in optimizer.param_groups for param in group["params"]):
            if param.grad is not None and (chosen is None or id(param) in chosen):
                name = names.get(id(param), f"optimizer.{number}")
                self.log.write_tensor("gradient", name, param.grad, order=number)
                self.slope.measure(name, param.grad)

    def step_ends(self, state: TrainState) -> None:
        """Observe the state after a step."""
        self.log.optimizer_index = self.index_of(state.optimizer)
        self.in_step = self._in_update = False
        self.write_parameters()
        for name, tensor in named_tensors(state.transform_states):
            if not name.startswith("auto_microbatch"):
                self.log.write_tensor("transform", name, tensor)
        self.update_ends(state.step)

    def write_parameters(self) -> None:
        """Write all parameters and buffers after an update."""
        digests: dict[str, str] = {}
        for name, param in self.models.parameters().items():
            if not param.is_meta:
                word = self.log.write_tensor("parameter", name, param, trains=param.requires_grad)
                digests |= {name: word} if to_local(param) is param else {}
        self._updated = self.log.step, self.log.optimizer_index, digests
        self._write_buffers("buffer")

    def write_later_changes(self) -> None:
        """Write the plain parameters that the script has changed after the last update, as by a broadcast from their rank."""
        if self._updated is None or self.steps_of_dtrain:
            return
        (step, optimizer_index, digests), self._updated = self._updated, None
        for name, param in self.models.parameters().items():
            if name in digests and digest(flatten(param)) != digests[name]:
                self.log.write_tensor("changed", name, param, step=step, optimizer_index=optimizer_index)

    def _write_buffers(self, kind: str, without: Collection[int] = ()) -> None:
        saved = self.models.buffers(persistent_only=True)
        for name, buffer in self.models.buffers().items():
            if not buffer.is_meta and id(buffer) not in without:
                self.log.write_tensor(kind, name, buffer, buffer=True, saved=name in saved)

    # ---- evaluations, metrics, saves ----

    def evaluation_batch(self, batch: Any) -> None:
        """Observe a batch of ``evaluate``; None is a batch that does not count."""
        self.random.end()
        if batch is not None:
            self.add_evaluated(batch)
            self.random.begin(self.log.step, count_samples(batch))

    def add_evaluated(self, batch: Any) -> None:
        """Add the samples of a forward without gradient."""
        if self.evaluations.add(batch):
            self.facts.events.append("evaluation")

    def flush_evaluation(self) -> None:
        """End the evaluations since the last step."""
        self.random.end()
        self.evaluations.flush()

    def metrics(self, source: str, numbers: Mapping[str, Any]) -> None:
        """Observe numbers that a logger receives or ``reduce_metrics`` returns."""
        self.random.end()
        self.evaluations.number_shown()
        plain = {name: to_number(value) for name, value in numbers.items() if is_number(value)}
        line = script_line(self.config.script)
        self.log.write("metrics", source=source, numbers=plain, events=list(self.facts.events), line=line)
        if source == "log":
            self.facts.events = []

    def records_updates(self) -> bool:
        """Return True if the next update by hand is recorded. All runs count the updates, so that all cut a loop alike."""
        return (
            not self.config.has_dtrain_loop
            and self.updates.get(self.log.optimizer_index, 0) < self.config.steps * RECORDED_LENGTHS
        )

    def updates_of(self, module: nn.Module) -> int:
        """Return the number of complete updates of the optimizers that have a parameter of a module."""
        own = {id(param) for param in module.parameters()}
        return sum(
            self.updates.get(index, 0) for index, optimizers in enumerate(self._optimizers) if own & params_of(optimizers[-1])
        )

    def printed(self, text: str) -> None:
        """Observe a printed line."""
        self.random.end()
        self.evaluations.number_shown()
        line = script_line(self.config.script)
        self.log.write("printed", text=text[:2000], events=list(self.facts.events), line=line)


class ModuleOutputs:
    """Outputs of the modules of a run's models.

    Args:
        config: the run. ``activations`` records the first forward; ``perturb_seed`` changes the rounding of all forwards.
        log: files of the rank.
    """

    def __init__(self, config: RunConfig, log: RunLog) -> None:
        self._config, self._log = config, log
        self._generator = torch.Generator("cpu").manual_seed(config.perturb_seed or 0)

    def after(self, module: nn.Module, name: str, output: Any, *, forwards: int) -> Any:
        """Return the output of a module, after a forward with gradient."""
        if self._config.perturb_seed is not None and not module._modules:
            output = self._perturbed(output)
        # Activation checkpointing repeats forwards in backward.
        in_backward = torch._C._current_graph_task_id() != -1
        if self._config.activations and self._log.step == self._config.first_step and forwards <= 1 and not in_backward:
            self._record(module, name, output)
        return output

    def _record(self, module: nn.Module, name: str, output: Any) -> None:
        own = next(module.parameters(recurse=False), None) is not None
        kind = type(module).__name__.removeprefix("FSDP")
        for tensor in list_tensors([output])[:1]:
            if tensor.is_floating_point():
                self._log.write_tensor("activation", name, tensor, kind_of=kind, own=own, leaf=not module._modules)
                if tensor.requires_grad:
                    tensor.register_hook(partial(self._record_gradient, name))

    def _record_gradient(self, name: str, gradient: Tensor) -> None:
        self._log.write_tensor("activation_gradient", name, gradient)

    def _perturbed(self, output: Any) -> Any:
        """Return ``output`` with one number in twelve changed by a unit in the last place, up or down, and so its gradient.

        The variance of these changes is that of a rounding: a twelfth of the square of the unit.
        """
        if isinstance(output, Tensor) and output.is_floating_point():
            draws = torch.randint(-12, 12, output.shape, generator=self._generator, dtype=torch.int8, device="cpu")
            draws = draws.to(output.device)
            units = (draws == 0).to(output.dtype) - (draws == -1).to(output.dtype)
            return output * (1 + torch.finfo(output.dtype).eps * units)
        if type(output) in (tuple, list):
            return type(output)(map(self._perturbed, output))
        return output
