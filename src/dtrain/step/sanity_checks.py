"""Check the first steps: a loss that is a mean, or of parameters that no state holds; equal batches; parts of sequences.

A mean is found in the autograd graph of the loss, and proven by the two halves of the batch. Equal batches are found by a hash
of each rank's first batches.

``SequenceCheck`` compares a loss on the parts of a sequence with the loss on the whole sequence. Both forwards run on one
sample, in evaluation mode and without gradients. A hook on each module reduces its outputs to one number per position. So the
comparison finds the first module whose values depend on positions that the rank does not have.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Protocol, cast

import torch
import xxhash
from torch import Tensor, nn

from dtrain.arguments import format_count, warn
from dtrain.data.batch import FailedBatch, batch_spec, count_samples, list_tensors, narrow_batch, select_samples
from dtrain.dist.collectives import all_gather_json, all_gather_numbers
from dtrain.dist.context import current_context
from dtrain.dist.dtensor import full_tensor, to_local
from dtrain.dist.init import get_dist_info
from dtrain.dist.rng import RNGSnapshot, hash_rng_state
from dtrain.dist.step_sync import StepCounts
from dtrain.errors import ConfigError, DtrainError, OutOfMemoryError
from dtrain.fqn import modules_by_fqn
from dtrain.memory.device_memory import is_out_of_memory
from dtrain.shard.buffers import restore_buffers
from dtrain.shard.grad_sync import grad_sync_of
from dtrain.shard.unshard import eval_mode
from dtrain.state import TrainState
from dtrain.step.evaluate import auto_batch_eval
from dtrain.typing import Batch, LossFn, LossSum, Plain

_IDENTITY_OPS = ("Neg", "ToCopy", "View", "UnsafeView", "ReshapeAlias", "Alias", "Clone", "Squeeze", "Unsqueeze")
_REDUCTION_MEAN = 1
"""The number of ``reduction="mean"`` in torch's own losses; a sum is 2."""
# Values hashed per tensor, and tensors per batch.
_MAX_VALUES = 256
_MAX_TENSORS = 64
# Multiples of a prime reach all rows and columns.
_STRIDE_PRIME = 2654435761
_CALLER = "context_parallel"
_ATTENTION = (
    "Attention must call torch.nn.functional.scaled_dot_product_attention by its full name, with is_causal=True; for "
    "transformers see docs/parallelism.md."
)
_SWITCH_OFF = "If the difference is intended, pass check=False."


def check_not_mean(loss: LossSum, caller: str, *, state: TrainState, batch: Batch, loss_fn: LossFn | None) -> None:
    """Raise if a total of ``loss`` is a mean although its weight counts several things; warn if that is probable.

    The check reads the operations of the graph. Found are the means of torch's own losses and of ``mean``, and a sum divided by
    the weight's tensor, unless they are multiplied again. The check does not read compiled code.

    For a model with plain parameters the two halves of ``batch`` decide: their sums add up, and their means do not. For a
    sharded model a further forward would be a collective, so the check only warns: the graph proves nothing, because sums
    over the samples take many forms.

    Args:
        loss: loss of ``batch``, with its graph.
        caller: name of the gradient function, for the message.
        state: state of the step.
        batch: microbatch on the device of the model.
        loss_fn: loss function, which runs three times without gradients if a mean was found; None if its totals do not add up.

    Host sync: one if a mean was found and its weight is a tensor on a device.

    Raises:
        ConfigError: a total is a mean.

    Warns: UserWarning, on rank 0: a total is probably a mean, but no halves of the batch show that.
    """
    for name, (total, weight) in (("total", (loss.total, loss.weight)), *loss.terms.items()):
        # A weight of another tensor class has no value, as in a simulated step of dt.planning.
        has_value = not isinstance(weight, Tensor) or type(weight) is Tensor
        if not (has_value and isinstance(total, Tensor) and _is_mean(total.grad_fn, weight) and float(weight) > 1):
            continue
        proven = None
        if loss_fn is not None and (state.spec.mesh is None or state.spec.plain_params):
            proven = _halves_show_mean(loss_fn, state.model, batch, "loss" if name == "total" else name)
        message = (
            f"{caller}: LossSum.{name if name == 'total' else f'terms[{name!r}]'} must be a sum, got a mean with the weight "
            f"{float(weight):g}. The step divides by the weight, so the gradient would be {float(weight):g} times too small. "
            "Return the sum (reduction='sum'), or let dt.mean_loss multiply the mean by its weight."
        )
        if proven:
            raise ConfigError(message)
        if proven is None and get_dist_info().rank == 0:
            warn(f"{message} The check reads the graph. Ignore this warning if the loss is a sum.")


def warn_if_untrained(loss: LossSum, caller: str, *, state: TrainState) -> None:
    """Warn, on rank 0, if ``loss`` reaches a trainable ``nn.Parameter`` that no run of this process holds.

    Its gradient is a sum of this rank's samples alone. Parameters of other states, as of the discriminator of a GAN, and of
    other sharded models are no fault. The check does not look into recomputed or compiled code.

    Args:
        loss: loss of a microbatch, with its graph.
        caller: name of the gradient function, for the message.
        state: state of the step.

    Warns: UserWarning, on rank 0: the number and the shape of such parameters.
    """
    if get_dist_info().rank:
        return
    leaves = _trainable_leaves([total for total, _ in ((loss.total, loss.weight), *loss.terms.values())])
    for run in (state._run_context, *current_context().runs):
        for param in (run.newest_fields or state.__dict__)["params"].values():
            leaves.pop(id(param), None)
    if not leaves:
        return
    for model in (state.model, *grad_sync_of(state.model).units.other_sharded_models()):
        for copy in grad_sync_of(model).unsharded_params():
            leaves.pop(id(copy), None)
    if leaves:
        shape, count = tuple(next(iter(leaves.values())).shape), format_count(len(leaves), "trainable parameter")
        warn(
            f"{caller}: the loss reaches {count} of no state (first: shape {shape}). The step "
            "neither reduces their gradient over ranks nor divides it by the weight, and a checkpoint lacks them. "
            "Register them in the model before shard_model, or freeze them with requires_grad_(False)."
        )


def _trainable_leaves(tensors: Iterable[object]) -> dict[int, Tensor]:
    """Return the parameters among the leaves of the graphs of ``tensors``, by id."""
    stack: list[Any] = [tensor.grad_fn for tensor in tensors if isinstance(tensor, Tensor)]
    seen, leaves = set(stack), dict[int, Tensor]()
    while stack:
        node = stack.pop()
        variable = getattr(node, "variable", None)
        if isinstance(variable, nn.Parameter):
            leaves[id(variable)] = variable
        for inner, _ in node.next_functions if node is not None else ():
            if inner is not None and inner not in seen:
                seen.add(inner)
                stack.append(inner)
    return leaves


def _halves_show_mean(loss_fn: LossFn, model: nn.Module, batch: Batch, name: str) -> bool | None:
    """Return True for a mean and False for a sum; None if the batch has no halves, or if they show neither."""
    try:
        samples = count_samples(batch)
    # Only the user can count the batch.
    except ConfigError:
        return None
    if samples < 2:
        return None
    try:
        indices, half = torch.arange(samples, device=list_tensors(batch)[0].device), (samples + 1) // 2
        # Copies, because the loss may write into its batch.
        batches = [select_samples(batch, chosen) for chosen in (indices, indices[:half], indices[half:])]
        (total, weight), *pairs = [loss_sums(loss_fn, model, samples)[name] for samples in batches]
    # A part of the batch, or a second forward, may be more than the loss can take.
    except Exception:  # noqa: BLE001
        return None
    totals, weights = zip(*pairs, strict=True)
    is_sum = is_close(total, sum(totals))
    is_mean = is_close(total * sum(weights), sum(t * w for t, w in pairs))
    return None if is_sum == is_mean or not is_close(weight, sum(weights)) else is_mean


def loss_sums(loss_fn: LossFn, model: nn.Module, batch: Batch) -> Mapping[str, tuple[float, float]]:
    """Return total and weight by name in evaluation mode, the main loss as ``"loss"``. Restores the random generators."""
    rng_snapshot = RNGSnapshot()
    try:
        with eval_mode(model):
            loss = loss_fn(model, batch)
    finally:
        rng_snapshot.restore()
    pairs = {"loss": (loss.total, loss.weight), **loss.terms, **loss.aux}
    return {name: (float(total), float(weight)) for name, (total, weight) in pairs.items()}


def is_close(one: float, other: float, rtol: float = 1e-3) -> bool:
    """Return True if two sums are equal up to ``rtol``. A mean of halves differs from their sum by 0.5."""
    return abs(one - other) <= rtol * max(abs(one), abs(other))


def _is_mean(node: Any, weight: Tensor | float) -> bool:
    """Return True if the result of ``node`` is a mean, in all of its terms."""
    if node is None:
        return False
    kind = node.name().removeprefix("torch::autograd::").partition("Backward")[0]
    inputs = [inner for inner, _ in node.next_functions]
    if kind in _IDENTITY_OPS:
        return _is_mean(inputs[0], weight)
    if kind in ("Add", "Sub"):
        return all(_is_mean(inner, weight) for inner in inputs)
    if kind == "Div":
        divisor = getattr(node, "_saved_other", None)
        # The value is not read: a saved tensor may be a fake tensor of a Python number, which dispatch modes refuse.
        same = type(divisor) is type(weight) is Tensor and divisor.data_ptr() == weight.data_ptr()
        return same and _is_kind(inputs[0], "Sum")
    if kind == "Mean":
        count = int(getattr(node, "_saved_self_sym_numel", None) or 0)
        # The mean of sums over the batch is a sum; the mean of one number is the number.
        return count > 1 and not _is_kind(inputs[0], "Sum")
    return bool(getattr(node, "_saved_reduction", None) == _REDUCTION_MEAN)


def _is_kind(node: Any, kind: str) -> bool:
    """Return True if ``node`` is an operation of ``kind``, or stacks results of such operations."""
    while node is not None and node.name().partition("Backward")[0] in _IDENTITY_OPS:
        node = node.next_functions[0][0]
    if node is not None and node.name().partition("Backward")[0] in ("Stack", "Cat"):
        return all(_is_kind(inner, kind) for inner, _ in node.next_functions)
    return node is not None and node.name().startswith(f"{kind}Backward")


def hash_first_batch(state: TrainState, batch: Batch) -> int:
    """Return the hash of ``batch`` if this step is compared and memory suffices for the hash, and 0 if not."""
    check = state._run_context.monitor.equal_batches
    if not check.steps_left or check.last_step == state.step or state.spec.data_ranks == 1 or get_dist_info().world_size == 1:
        return 0
    try:
        return hash_batch(batch)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        # The step that follows needs more memory, and its failure reaches all ranks.
        return 0


def hash_batch(batch: Batch) -> int:
    """Return a hash of the shapes and some values of the tensors of ``batch``, from 1 to 2**52; 0 without a value.

    Host sync: one per tensor that is on a device.
    """
    digest, values = xxhash.xxh3_64(), 0
    for leaf in list_tensors(batch)[:_MAX_TENSORS]:
        digest.update(f"{leaf.dtype} {tuple(leaf.shape)}".encode())
        if type(leaf) is Tensor and leaf.layout == torch.strided and leaf.numel():
            indices = torch.arange(min(leaf.numel(), _MAX_VALUES), device=leaf.device) * _STRIDE_PRIME % leaf.numel()
            digest.update(leaf.detach().reshape(-1)[indices].cpu().view(torch.uint8).numpy().tobytes())
            values += len(indices)
    return digest.intdigest() % 2**52 + 1 if values else 0


def warn_if_equal_batches(state: TrainState, counts: StepCounts, batch_hash: int) -> None:
    """Record the comparison of one step; warn on rank 0 after three different batches that were equal on all ranks.

    Args:
        state: state of the step.
        counts: counts that the ranks agreed on.
        batch_hash: hash of this rank's batch.

    Mutates: ``state._run_context.monitor.equal_batches``.
    """
    check = state._run_context.monitor.equal_batches
    if not check.steps_left or check.last_step == state.step:
        return
    check.last_step, check.steps_left = state.step, check.steps_left - 1
    if counts.equal_batches is False:
        check.steps_left = 0
    if not counts.equal_batches or batch_hash == check.last_hash:
        return
    check.last_hash, check.remaining_matches = batch_hash, check.remaining_matches - 1
    if check.remaining_matches:
        return
    check.steps_left = 0
    if get_dist_info().rank == 0:
        warn(
            f"step: the first batches of all {state.spec.data_ranks} data-parallel ranks are equal, so the ranks train on the "
            "same samples. Give each rank its own samples, with dt.build_loader(..., mesh=mesh) or torch's DistributedSampler. "
            "If equal batches are intended, pass step.init(..., allow_equal_batches=True)."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tolerance:
    """Largest relative difference between parts and whole that is rounding: of a module's output, and of a mean loss.

    Attention that sees a part of the keys changes its output by more than a tenth. Rounding in ring attention is some units in
    the last place for each layer.
    """

    output: float
    loss: float


_FLOAT64 = _Tolerance(output=1e-5, loss=1e-6)
_FLOAT32 = _Tolerance(output=2e-3, loss=1e-4)
_TF32 = _Tolerance(output=2e-2, loss=1e-3)
_LOW_PRECISION = _Tolerance(output=0.15, loss=2e-2)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SequencePart:
    """This rank's part of a batch of sequences, inside of ``SequenceSplit.part``.

    Args:
        batch: parts of the batch's sequences, and its other entries.
        positions: positions of the part in the sequence, ``[n]`` int64.
        on_loss: wrapper of a loss that runs on ``batch``, or on microbatches of it.
        count_calls: function that returns the number of calls of attention so far.
    """

    batch: dict[str, Any]
    positions: Tensor
    on_loss: Callable[[LossFn], LossFn]
    count_calls: Callable[[], int]


class SequenceSplit(Protocol):
    """Way to give each rank a part of each sequence, with attention to the whole sequence."""

    def part(self, model: nn.Module, batch: Mapping[str, Any]) -> AbstractContextManager[SequencePart]:
        """Return the context in which ``model`` runs on this rank's part of ``batch``, which stays as it is."""
        ...

    def whole(self, batch: Mapping[str, Any]) -> AbstractContextManager[None]:
        """Return the context in which a model runs on the whole ``batch``."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class SequenceCheck:
    """Comparison of one run's first batch, in parts and whole.

    Args:
        state: state of the first step.
        loss_fn: loss of the step, with all its wrappers.
        ranks: number of ranks that share sequences.
        seq_dims: batch keys -> sequence dims.
        split: way to make parts of sequences.
    """

    state: TrainState
    loss_fn: LossFn
    _: KW_ONLY
    ranks: int
    seq_dims: Mapping[str, int]
    split: SequenceSplit

    def run(self, batch: Batch) -> bool:
        """Compare one sample of ``batch``. Return False if some rank has no valid batch with samples; nothing is compared then.

        Collective: three records, and the model's own gathers in two forwards.

        Raises:
            ConfigError: on all ranks, if the parts give other values than the whole sequence.
        """
        valid = not isinstance(batch, FailedBatch) and all(leaf.numel() for leaf in list_tensors(batch))
        if not all(is_valid for (is_valid,) in all_gather_numbers([valid], caller=_CALLER)):
            return False
        outputs = _Outputs(self.state.model)
        sample = _first_sample(batch, self.seq_dims)
        snapshot, rng_before = RNGSnapshot(), hash_rng_state(self.state.device)
        # A compiled graph would be compiled again for the whole sequence, and would skip the hooks.
        try:
            with torch.compiler.set_stance("force_eager"), restore_buffers(self.state.model):
                parts = self._run_parts(sample, outputs)
                whole = self._run_whole(sample, outputs)
            random = hash_rng_state(self.state.device) != rng_before
        finally:
            snapshot.restore()
        if whole is None:
            _warn("a whole sequence does not fit in this rank's memory", "Run one step with shorter sequences to compare them")
        else:
            self._compare(outputs, parts, whole, random=random)
        return True

    def _run_parts(self, sample: dict[str, Any], outputs: _Outputs) -> dict[str, list[float]]:
        def forward(model: nn.Module, _: Batch) -> LossSum:
            with self.split.part(model, sample) as part, outputs.recorded(part.positions):
                loss = part.on_loss(self.loss_fn)(model, part.batch)
                outputs.positions, outputs.attention_calls = part.positions.cpu(), part.count_calls()
            return loss

        loss = self._forward(forward)
        calls = [int(count) for (count,) in all_gather_numbers([outputs.attention_calls], caller=_CALLER)]
        if not all(calls):
            raise ConfigError(
                f"{_CALLER}: the model must attend by scaled_dot_product_attention, got no call of it on rank "
                f"{calls.index(0)}. Other attention (by hand, eager, flex, flash-attn) sees the rank's part of a sequence "
                f"only. {_ATTENTION}"
            )
        return _loss_numbers(loss)

    def _run_whole(self, sample: dict[str, Any], outputs: _Outputs) -> dict[str, list[float]] | None:
        def forward(model: nn.Module, _: Batch) -> LossSum:
            copy = {key: value.clone() if isinstance(value, Tensor) else value for key, value in sample.items()}
            with self.split.whole(sample), outputs.compared():
                return self.loss_fn(model, copy)

        try:
            return _loss_numbers(self._forward(forward))
        except OutOfMemoryError:
            return None

    def _forward(self, forward: Callable[[nn.Module, Batch], LossSum]) -> LossSum:
        """Run ``forward`` as an evaluation, which raises ``OutOfMemoryError`` on all ranks if one rank lacks memory."""
        try:
            return auto_batch_eval(forward, batch_spec=batch_spec(count=lambda _: 1))(self.state.model, None)[0]
        except DtrainError:
            raise
        except Exception as error:
            error.add_note(
                f"{_CALLER}: raised while the first step compared parts with a whole sequence, on one sample in evaluation "
                "mode. Pass check=False if loss_fn cannot run so."
            )
            raise

    def _compare(
        self, outputs: _Outputs, parts: dict[str, list[float]], whole: dict[str, list[float]], *, random: bool
    ) -> None:
        """Exchange the differences, and raise the same error on all ranks. Collective: one record."""
        tolerance = outputs.tolerance()
        # The first module in the order of computation whose parts differ by more than rounding.
        different = ((name, error) for name, error in outputs.differences if error > tolerance.output)
        module, difference = next(different, (None, 0.0))
        row: dict[str, Plain] = {
            "group": self.state.spec.data_rank,
            "random": random,
            "module": module,
            "difference": difference,
            "parts": cast(Plain, parts),
            "whole": cast(Plain, whole),
        }
        rows = cast("list[dict[str, Any]]", all_gather_json(row, caller=_CALLER))
        if any(other["random"] for other in rows):
            _warn("loss_fn draws random numbers in evaluation mode", "Draw them in the data, or before the step")
            return
        for rank, other in enumerate(rows):
            if other["module"] is not None:
                name, error = other["module"], other["difference"]
                raise ConfigError(
                    f"{_CALLER}: the module {name!r} must return the values of the whole sequence for the rank's part, got a "
                    f"relative difference of {error:.2g} on rank {rank}. {_ATTENTION} Positions must be an entry of "
                    f"batch_seq_dims (position_ids), got only {sorted(self.seq_dims)}, or a table in buffer_seq_dims. "
                    f"{_SWITCH_OFF}"
                )
        _compare_losses(rows, tolerance.loss, self.ranks)


def _warn(problem: str, advice: str) -> None:
    if get_dist_info().rank == 0:
        warn(f"{_CALLER}: {problem}, so parts and whole sequences were not compared. {advice}, or pass check=False.")


def _first_sample(batch: Batch, seq_dims: Mapping[str, int]) -> dict[str, Any]:
    """Return one sample of the batch, or the batch if its samples cannot be counted."""
    # Otherwise the first axis is not the batch axis.
    if all(dim % batch[key].ndim for key, dim in seq_dims.items()):
        # The samples of the batch may be uncountable by its first axes.
        with suppress(ConfigError):
            return dict(narrow_batch(batch, 0, 1))
    return dict(batch)


def _loss_numbers(loss: Any) -> dict[str, list[float]]:
    """Return the total and the weight of each loss by name. The step raises an error for another value."""
    if not isinstance(loss, LossSum):
        return {}
    pairs = {"loss": (loss.total, loss.weight), **loss.terms}
    return {
        name: [float(full_tensor(value)) if isinstance(value, Tensor) else float(value) for value in pair]
        for name, pair in pairs.items()
    }


def _compare_losses(rows: list[dict[str, Any]], tolerance: float, ranks: int) -> None:
    """Compare the sums over parts with the sums over whole sequences, in each group of ranks that share a sequence.

    Raises:
        ConfigError: the weights or the mean losses differ.
    """
    for group in sorted({row["group"] for row in rows}):
        members = [row for row in rows if row["group"] == group]
        for name, (total, weight) in members[0]["whole"].items():
            # Ranks along tp have equal sums.
            part_total, part_weight = (
                math.fsum(row["parts"][name][index] for row in members) * ranks / len(members) for index in (0, 1)
            )
            if not math.isfinite(total) or not math.isfinite(part_total):
                continue
            same_total = abs(part_total - total) <= tolerance * max(abs(total), abs(weight))
            if same_total and math.isclose(part_weight, weight, rel_tol=1e-6, abs_tol=1e-6):
                continue
            raise ConfigError(
                f"{_CALLER}: the {name} of a sequence must be the sum over its parts, got the sum {part_total:.9g} with the "
                f"weight {part_weight:g} over {ranks} parts, and {total:.9g} with the weight {weight:g} for the whole. Return "
                f"sums and counts over positions, and shift labels in the data, not by a model's labels=. {_SWITCH_OFF}"
            )


_Key = tuple[str, int, int]
"""Name of a module, number of its call, number of a tensor in its output."""


@dataclass(slots=True, eq=False)
class _Outputs:
    """Outputs of modules, one number per position and dim, and their differences from the outputs on the whole sequence.

    Attributes:
        positions: positions of this rank's part, ``[n]``.
        attention_calls: number of calls of ring attention.
        differences: relative differences of the modules' outputs, in the order of computation.
    """

    model: nn.Module
    positions: Tensor = field(default_factory=lambda: torch.arange(0, device="cpu"))
    attention_calls: int = 0
    _parts: dict[_Key, tuple[tuple[int, ...], dict[int, Tensor]]] = field(default_factory=dict)
    differences: list[tuple[str, float]] = field(default_factory=list)
    _eps: float = 0.0

    @contextmanager
    def recorded(self, positions: Tensor) -> Iterator[None]:
        """Record the outputs on the part of a sequence at ``positions`` ``[n]``."""
        length = len(positions)

        def record(key: _Key, tensor: Tensor) -> None:
            dims = [dim for dim, size in enumerate(tensor.shape) if size == length]
            self._parts[key] = tuple(tensor.shape), {dim: _project(tensor, dim) for dim in dims}

        with self._hooked(record):
            yield

    @contextmanager
    def compared(self) -> Iterator[None]:
        """Compare the outputs on the whole sequence with the recorded parts."""

        def compare(key: _Key, tensor: Tensor) -> None:
            shape, parts = self._parts.get(key, ((), {}))
            if len(shape) != tensor.ndim:
                return
            changed = [dim for dim, size in enumerate(tensor.shape) if size != shape[dim]]
            if len(changed) != 1 or changed[0] not in parts:
                return
            whole = _project(tensor, changed[0])
            if len(whole) <= int(self.positions.max()):
                return
            expected = whole[self.positions]
            error, scale = (parts[changed[0]] - expected).norm().item(), expected.norm().item()
            if error:
                self.differences.append((key[0], error / scale if scale else math.inf))

        with self._hooked(compare):
            yield

    def tolerance(self) -> _Tolerance:
        """Return the tolerance for the least precise dtype that a module has returned."""
        if self._eps > torch.finfo(torch.float32).eps:
            return _LOW_PRECISION
        if self._eps < torch.finfo(torch.float32).eps:
            return _FLOAT64
        return _FLOAT32 if torch.get_float32_matmul_precision() == "highest" else _TF32

    @contextmanager
    def _hooked(self, see: Callable[[_Key, Tensor], None]) -> Iterator[None]:
        """Call ``see`` with each tensor of each module's output. Mutates: the modules' hooks, inside the context."""
        counts: dict[str, int] = {}

        def hook(name: str, output: Any) -> None:
            call = counts[name] = counts.get(name, -1) + 1
            for index, leaf in enumerate(list_tensors([output] if isinstance(output, Tensor) else output)):
                tensor = to_local(leaf.detach())
                if tensor.is_floating_point():
                    self._eps = max(self._eps, torch.finfo(tensor.dtype).eps)
                    see((name, call, index), tensor)

        def add(name: str, module: nn.Module) -> Any:
            return module.register_forward_hook(lambda _, __, output: hook(name, output))

        handles = [add(name or type(module).__name__, module) for name, module in modules_by_fqn(self.model)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _project(tensor: Tensor, dim: int) -> Tensor:
    """Return one number per index of ``dim``, ``[n]`` on the CPU: a sum over all other dims, weighted by fixed numbers."""
    rows = tensor.movedim(dim, 0).flatten(1) if tensor.ndim > 1 else tensor[:, None]
    numbers = torch.arange(1, rows.shape[1] + 1, dtype=torch.float64, device=tensor.device)
    # Golden ratio steps: cosines without a period.
    weights = (numbers * 2.399963229728653).cos().to(rows.dtype)
    return (rows @ weights).double().cpu()
