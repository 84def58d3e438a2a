"""Compare a loss on the parts of a sequence with the loss on the whole sequence, before the first step that shards sequences.

Both forwards run on one sample, in evaluation mode and without gradients. A hook on each module reduces its outputs to one
number per position. So the comparison finds the first module whose values depend on positions that the rank does not have.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from dtrain.data.batch import FailedBatch, batch_spec, list_tensors, narrow_batch
from dtrain.dist.collectives import all_gather_json, all_gather_numbers
from dtrain.dist.dtensor import full_tensor, to_local
from dtrain.dist.init import get_dist_info
from dtrain.dist.rng import RNGSnapshot, hash_rng_state
from dtrain.errors import ConfigError, DtrainError, OutOfMemoryError
from dtrain.fqn import modules_by_fqn
from dtrain.shard.buffers import restore_buffers
from dtrain.shard.model_parallel import count_attention_calls, ring_attention
from dtrain.state import TrainState
from dtrain.step.evaluate import auto_batch_eval
from dtrain.typing import Batch, LossFn, LossSum, Plain

_CALLER = "context_parallel"
_ATTENTION = (
    "Attention must call torch.nn.functional.scaled_dot_product_attention by its full name, with is_causal=True; for "
    "transformers see docs/parallelism.md."
)
_SWITCH_OFF = "If the difference is intended, pass check=False."


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


@dataclass(frozen=True, slots=True, eq=False)
class SequenceCheck:
    """Comparison of one run's first batch, in parts and whole.

    Args:
        state: state of the first step.
        loss_fn: loss of the step, with all its wrappers.
        axis: mesh of the ranks that share sequences.
        seq_dims: batch keys -> sequence dims.
        buffers: buffers that are sharded with the batch, and their sequence dims.
    """

    state: TrainState
    loss_fn: LossFn
    _: KW_ONLY
    axis: DeviceMesh
    seq_dims: Mapping[str, int]
    buffers: list[tuple[Tensor, int]]

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
            part = {key: value.clone() if isinstance(value, Tensor) else value for key, value in sample.items()}
            sequences = [(part[key], dim % part[key].ndim) for key, dim in self.seq_dims.items()]
            length = sequences[0][0].shape[sequences[0][1]]
            positions = torch.arange(length, device=self.state.device)
            with (
                ring_attention(self.axis, [*sequences, (positions, 0)], self.buffers),
                count_attention_calls() as calls,
                outputs.recorded(positions),
            ):
                loss = self.loss_fn(model, part)
            outputs.positions, outputs.attention_calls = positions.cpu(), len(calls)
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
            whole = {key: value.clone() if isinstance(value, Tensor) else value for key, value in sample.items()}
            with outputs.compared():
                return self.loss_fn(model, whole)

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
        module, difference = outputs.first_difference(tolerance)
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
        _compare_losses(rows, tolerance.loss, self.axis.size())


def _warn(problem: str, advice: str) -> None:
    if get_dist_info().rank == 0:
        warnings.warn(
            f"{_CALLER}: {problem}, so parts and whole sequences were not compared. {advice}, or pass check=False.",
            stacklevel=2,
        )


def _first_sample(batch: Batch, seq_dims: Mapping[str, int]) -> dict[str, Any]:
    """Return one sample of the batch, or the batch if its samples cannot be counted."""
    if any(dim % batch[key].ndim == 0 for key, dim in seq_dims.items()):
        # The first axis is not the batch axis.
        return dict(batch)
    try:
        return dict(narrow_batch(batch, 0, 1))
    # The samples of the batch cannot be counted by its first axes.
    except ConfigError:
        return dict(batch)


def _loss_numbers(loss: Any) -> dict[str, list[float]]:
    """Return the total and the weight of each loss by name. The step raises an error for another value."""
    if not isinstance(loss, LossSum):
        return {}
    pairs = {"loss": (loss.total, loss.weight), **loss.terms}
    return {name: [_to_float(total), _to_float(weight)] for name, (total, weight) in pairs.items()}


def _to_float(value: Tensor | float) -> float:
    return float(full_tensor(value)) if isinstance(value, Tensor) else float(value)


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
    """

    model: nn.Module
    positions: Tensor = field(default_factory=lambda: torch.arange(0))
    attention_calls: int = 0
    _parts: dict[_Key, tuple[tuple[int, ...], dict[int, Tensor]]] = field(default_factory=dict)
    _differences: list[tuple[str, float]] = field(default_factory=list)
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
            shape_whole = tuple(tensor.shape)
            if len(shape) != len(shape_whole):
                return
            changed = [dim for dim, (part, whole) in enumerate(zip(shape, shape_whole, strict=True)) if part != whole]
            if len(changed) != 1 or changed[0] not in parts:
                return
            whole = _project(tensor, changed[0])
            if len(whole) <= int(self.positions.max()):
                return
            expected = whole[self.positions]
            error, scale = (parts[changed[0]] - expected).norm().item(), expected.norm().item()
            if error:
                self._differences.append((key[0], error / scale if scale else math.inf))

        with self._hooked(compare):
            yield

    def first_difference(self, tolerance: _Tolerance) -> tuple[str | None, float]:
        """Return the first module whose parts differ by more than rounding, in the order of computation, and the difference."""
        return next(((name, error) for name, error in self._differences if error > tolerance.output), (None, 0.0))

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
