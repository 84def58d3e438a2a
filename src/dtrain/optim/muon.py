"""Muon, and the base of optimizers whose update needs whole matrices, such as Shampoo and SOAP.

Parameters, gradients and state are sharded as usual. Of each ``n`` matrices on ``n`` ranks, every rank receives one whole
gradient and state, computes the update and returns the shards (``_compute_round``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.adamw import adamw

from dtrain.arguments import check_choice, check_int, check_number
from dtrain.dist.dtensor import (
    chunks_per_dim,
    from_local_like,
    full_tensor,
    is_dtensor,
    is_placed_like,
    lerp_,
    local_slice,
    mul_,
    row_group,
    to_local,
)
from dtrain.dist.incident import report_missing_ranks
from dtrain.errors import ConfigError
from dtrain.optim.groups import can_fuse, evaluate_closure, sets_implementation, trainable_in_group

_ADAMW_DEFAULTS: dict[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0, "fused": None}
NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class MatrixOptimizer(torch.optim.Optimizer):
    """Base of optimizers that compute updates from whole matrices, with AdamW for other parameters.

    A subclass computes the update of a whole matrix in ``matrix_update``, and makes its state in ``init_matrix_state``. The
    base gathers and places gradient, state and update. Checkpoints resume the state on any number of ranks.

    Formula: ``param = param - lr * weight_decay * param - lr * lr_factor(shape) * matrix_update(grad, state)``

    A group has ``method="matrix"`` (the default) or ``method="adamw"``. Matrices have two dims. Under FSDP2, the rows of a
    parameter, of its gradient, and of each tensor of its state are sharded over the same ranks. In a step, each rank computes
    the updates of some of the matrices. Matrices with other placements (tensor parallelism with FSDP2) are gathered, and every
    rank computes them and holds their whole state. Replicas compute the same matrices.

    Args:
        params: matrices, or groups. A group with ``method="adamw"`` may set ``lr`` (3e-4), ``betas`` ((0.9, 0.95)), ``eps``
            (1e-8), ``weight_decay`` (0.0) and ``fused`` (used if torch supports it).
        defaults: options of the groups of matrices, with ``lr``; ``weight_decay`` is 0 if left out.

    Attributes:
        method: name of the method of matrix groups.
        shard_state: names of state tensors of the parameter's shape for ``shard_inputs``; zeros at first, never gathered.

    Mutates: in ``step``, parameters and the optimizer's state.
    Collective: in ``step``, two all-to-alls for each ``n`` matrices of a group whose rows are sharded over ``n`` ranks: the
        gradient and the matrix state to the computing rank, the update and the matrix state back.
    Host sync: none, except for those of ``matrix_update``.

    Example:
        >>> import dtrain as dt
        >>> class Whitened(dt.optim.MatrixOptimizer):
        ...     def init_matrix_state(self, matrix, group):
        ...         return {"rows": matrix.new_zeros(len(matrix), len(matrix))}
        ...
        ...     def matrix_update(self, grad, state, group):
        ...         state["rows"].add_(grad @ grad.T)
        ...         values, vectors = torch.linalg.eigh(state["rows"])
        ...         return vectors @ ((vectors.T @ grad) / values.sqrt()[:, None])
        >>> p = torch.nn.Parameter(torch.zeros(2, 2, dtype=torch.float64))
        >>> optimizer = Whitened([p], {"lr": 0.5})
        >>> p.grad = torch.tensor([[3.0, 0.0], [0.0, 4.0]], dtype=torch.float64)
        >>> optimizer.step()
        >>> [[round(value, 3) for value in row] for row in p.tolist()]
        [[-0.5, 0.0], [0.0, -0.5]]

    Raises:
        ConfigError: an argument out of range, an unknown method or option, or a parameter of a matrix group without two dims.
            In ``step``, state whose names, shapes or dtypes ``matrix_update`` has changed.

    Source: each rank computes some of the matrices, as in Anil et al. 2021, arXiv:2002.09018, section 5 (Shampoo).
    Suggested values:
        Groups of ``method="adamw"`` beside Muon: ``lr=3e-4``, ``betas=(0.9, 0.95)`` (Jordan et al. 2024)
    When not to use: each element is updated by itself. An ordinary optimizer runs on shards then, without communication.
    """

    method: ClassVar[str] = "matrix"
    shard_state: ClassVar[tuple[str, ...]] = ()
    # A load places the state by this attribute.
    shards_state_by_rows = True

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        self._matrix_defaults = {"weight_decay": 0.0, **defaults}
        super().__init__(params, {})

    def init_matrix_state(self, matrix: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """Return the first state of a whole matrix: tensors of any shape and dtype, which keep both.

        Args:
            matrix: zeros with the shape, the dtype and the device of the parameter; must not be changed.
            group: options of the parameter's group.
        """
        return {}

    def matrix_update(self, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        """Return the update of a whole matrix, which the step multiplies by the learning rate and subtracts.

        Must be deterministic, because replicas compute it separately.

        Args:
            grad: whole gradient ``[rows, cols]``, plain, or the whole result of ``shard_inputs``.
            state: whole tensors of ``init_matrix_state``, to be changed in place or replaced by tensors of the same shapes; and
                ``"step"``, the number of updates of the matrix, 1 in the first, which the base counts.
            group: options of the parameter's group.
        """
        raise NotImplementedError

    def shard_inputs(self, grads: list[Tensor], states: list[dict[str, Tensor]], group: dict[str, Any]) -> list[Tensor]:
        """Return the inputs of ``matrix_update`` for this rank's shards, elementwise; by default the gradients.

        Args:
            grads: this rank's shards of the gradients; must not be changed.
            states: for each gradient, this rank's shards of the tensors in ``shard_state``, to be changed in place.
            group: options of the group.
        """
        return grads

    def lr_factor(self, shape: tuple[int, int], group: dict[str, Any]) -> float:
        """Return the factor of the learning rate for a matrix of this shape."""
        return 1.0

    def check_options(self, group: dict[str, Any]) -> None:
        """Raise ``ConfigError`` for an invalid option of a group of matrices."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        name = type(self).__name__
        method = param_group.setdefault("method", self.method)
        check_choice(name, "method of a group", method, (self.method, "adamw"))
        defaults = self._matrix_defaults if method == self.method else _ADAMW_DEFAULTS
        unknown = set(param_group) - set(defaults) - {"params", "name", "method", "initial_lr"}
        if unknown:
            valid = ", ".join(defaults)
            raise ConfigError(
                f"{name}: options of a group with method={method!r} must be among {valid}, got {sorted(unknown)[0]!r}. "
                "Remove the other options from the group."
            )
        for key, value in defaults.items():
            param_group.setdefault(key, value)
        for key in ("lr", "weight_decay", *(("eps",) if "eps" in param_group else ())):
            check_number(name, key, param_group[key], minimum=0)
        if method == "adamw":
            for index, beta in enumerate(param_group["betas"]):
                check_number(name, f"betas[{index}]", beta, minimum=0, below=1)
        else:
            self.check_options(param_group)
        super().add_param_group(param_group)
        stacked = bool(param_group.get("stacked"))
        invalid_shapes = [tuple(p.shape) for p in param_group["params"] if p.ndim != 2 + stacked]
        if method == self.method and invalid_shapes and stacked:
            raise ConfigError(
                f"{name}: parameters of a group with stacked=True must have three dims, [experts, rows, cols], got shape "
                f"{invalid_shapes[0]}. Put matrices in a group without it, as muon_groups(stacked=...) does."
            )
        if method == self.method and invalid_shapes:
            raise ConfigError(
                f"{name}: parameters of a group with method={method!r} must have two dims, got shape {invalid_shapes[0]}. Put "
                "other parameters, embeddings and the head in a group with method='adamw', as muon_groups does."
            )
        if method == "adamw" and not sets_implementation(param_group):
            param_group["fused"] = can_fuse(trainable_in_group(param_group))

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Apply the gradients. Mutates: parameters, state. Collective: see the class; every rank must call."""
        loss = None if closure is None else evaluate_closure(closure)
        failures: list[Exception] = []
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            if params and group["method"] == "adamw":
                self._step_adamw(group, params)
            elif params:
                self._step_matrices(group, params, failures)
        # The other ranks have received zeros for the failed matrix, so that they do not wait for this rank.
        if failures:
            raise failures[0]
        return loss

    def _step_matrices(self, group: dict[str, Any], params: list[Tensor], failures: list[Exception]) -> None:
        states = [self._placed_state(param, group) for param in params]
        shards = [{name: to_local(state[name]) for name in self.shard_state} for state in states]
        inputs = self.shard_inputs([to_local(_grad_of(param)) for param in params], shards, group)
        mul_(params, 1.0 - group["lr"] * group["weight_decay"])

        def compute(work: _Matrix, grad: Tensor, state: dict[str, Any]) -> Tensor:
            counted = {**state, "step": states[work.index]["step"]}
            try:
                update = self.matrix_update(grad, counted, group)
                del counted["step"]
                work.check(type(self).__name__, update, counted, tuple(grad.shape))
            except Exception as error:  # noqa: BLE001 - raised at the end of the step
                failures.append(error)
                return torch.zeros_like(grad)
            state.update(counted)
            return update.to(grad.dtype)

        elsewhere = (*self.shard_state, "step")
        own = [{name: value for name, value in state.items() if name not in elsewhere} for state in states]
        work = [_Matrix(*row) for row in zip(range(len(params)), params, inputs, own, strict=True)]
        for matrix, shard in _compute_matrices(work, compute, caller=type(self).__name__):
            rows, cols = matrix.param.shape[-2:]
            to_local(matrix.param).add_(shard, alpha=-group["lr"] * self.lr_factor((rows, cols), group))

    def _placed_state(self, param: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """Return the state of a matrix, made in its first update, and placed again after a load on other ranks.

        Mutates: the optimizer's state.
        """
        state: dict[str, Any] = self.state[param]
        if not state:
            state["step"] = 0
            state.update({name: torch.zeros_like(param) for name in self.shard_state})
            zeros = torch.zeros((), dtype=param.dtype, device=param.device).expand(param.shape)
            state.update(self.init_matrix_state(zeros, group))
        state["step"] += 1
        for name, value in state.items():
            if name != "step" and not isinstance(value, Tensor):
                raise ConfigError(
                    f"{type(self).__name__}: init_matrix_state must return tensors, got {type(value).__name__} for {name!r}. "
                    "Keep numbers in the options of the group, or as torch.tensor(number)."
                )
            if name != "step" and name not in self.shard_state:
                state[name] = _place_by_rows(param, value)
        return state

    def _step_adamw(self, group: dict[str, Any], params: list[Tensor]) -> None:
        for param in params:
            if not self.state[param]:
                device = param.device if group["fused"] else torch.device("cpu")
                self.state[param]["step"] = torch.zeros((), dtype=torch.float32, device=device)
                self.state[param]["exp_avg"] = torch.zeros_like(param)
                self.state[param]["exp_avg_sq"] = torch.zeros_like(param)
        states = [self.state[param] for param in params]
        adamw(
            [to_local(param) for param in params],
            [to_local(_grad_of(param)) for param in params],
            [to_local(state["exp_avg"]) for state in states],
            [to_local(state["exp_avg_sq"]) for state in states],
            [],
            [state["step"] for state in states],
            fused=bool(group["fused"]),
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def _grad_of(param: Tensor) -> Tensor:
    assert param.grad is not None
    return param.grad


def _place_by_rows(param: Tensor, value: Tensor) -> Tensor:
    """Place a tensor of the state: rows on the ranks that hold rows of the parameter, else whole on every rank.

    Collective: a gather if the tensor is sharded otherwise, as after a load with another layout.
    """
    if row_group(param) is None or not value.ndim:
        return full_tensor(value)
    if is_placed_like(value, param):
        return value
    return from_local_like(param, local_slice(param, full_tensor(value)).clone(), tuple(value.shape))


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class _Matrix:
    """Work for one matrix: its number, the parameter, this rank's part of the input, and the matrix state as stored."""

    index: int
    param: Tensor
    input: Tensor
    state: dict[str, Tensor]

    def check(self, caller: str, update: Tensor, state: Mapping[str, Any], shape: tuple[int, ...]) -> None:
        """Raise ``ConfigError`` for an update that has not ``shape``, or a state of another shape or dtype."""
        if tuple(update.shape) != shape:
            shapes = f"{shape}, got {tuple(update.shape)}"
            raise ConfigError(
                f"{caller}: matrix_update must return a tensor of shape {shapes}. Return the update of one matrix."
            )
        expected = {name: (tuple(value.shape), value.dtype) for name, value in self.state.items()}
        actual = {name: (tuple(value.shape), value.dtype) for name, value in state.items()}
        if actual != expected:
            name = next(name for name in {**expected, **actual} if expected.get(name) != actual.get(name))
            raise ConfigError(
                f"{caller}: matrix_update must keep the names, shapes and dtypes of the state, got {actual.get(name)} for "
                f"{name!r} instead of {expected.get(name)}. Make the state in init_matrix_state."
            )

    def store_(self, parts: Mapping[str, Tensor]) -> None:
        """Store this rank's parts of the new state. Mutates: the tensors of the state."""
        for name, value in self.state.items():
            if parts[name] is not to_local(value):
                to_local(value).copy_(parts[name])


def _compute_matrices(work: Sequence[_Matrix], compute: Compute, *, caller: str) -> Iterator[tuple[_Matrix, Tensor]]:
    """Yield each matrix with this rank's part of its update, in the same order on all ranks, after its state was stored.

    Matrices with rows sharded over ``n`` ranks are computed in rounds of ``n`` matrices of similar size, so that a rank stores
    one matrix besides its shards. Other matrices are gathered and computed on every rank. A stack that is sharded along its
    matrices alone is computed where it lies.

    Mutates: the states of ``work``.
    Collective: two all-to-alls for each ``n`` row-sharded matrices; one all-gather for each matrix with another sharding.
    """
    by_group: dict[dist.ProcessGroup | None, list[_Matrix]] = {}
    for matrix in work:
        by_group.setdefault(row_group(matrix.param) if matrix.param.ndim == 2 else None, []).append(matrix)
    for group, members in by_group.items():
        if group is None:
            for matrix in members:
                if matrix.param.ndim == 3 and not set(chunks_per_dim(matrix.param)) - {0}:
                    yield matrix, compute(matrix, matrix.input, dict(matrix.state))
                    continue
                whole = full_tensor(from_local_like(matrix.param, matrix.input)) if is_dtensor(matrix.param) else matrix.input
                state = dict(matrix.state)
                update = compute(matrix, whole, state)
                matrix.store_(state)
                yield matrix, local_slice(matrix.param, update)
            continue
        # A round takes as long as its largest matrix, so group matrices of similar size.
        members.sort(key=lambda matrix: -matrix.param.numel())
        for start in range(0, len(members), group.size()):
            with report_missing_ranks(caller):
                yield from _compute_round(members[start : start + group.size()], compute, group)


def _compute_round(members: list[_Matrix], compute: Compute, group: dist.ProcessGroup) -> list[tuple[_Matrix, Tensor]]:
    """Compute the ``r``-th matrix of ``members`` on rank ``r`` of ``group``, and return this rank's parts of all updates.

    The parts of a matrix travel as bytes, so that its state may have several dtypes. Scalars are whole on every rank, and only
    their new values travel.
    """
    rank, ranks = group.rank(), group.size()
    packed = [_pack([matrix.input, *(to_local(value) for value in matrix.state.values() if value.ndim)]) for matrix in members]
    send_sizes = [len(sent) for sent in packed] + [0] * (ranks - len(packed))
    own = members[rank] if rank < len(members) else None
    cut = {} if own is None else {name: value for name, value in own.state.items() if value.ndim}
    layouts = [] if own is None else [_layout(own, cut.values(), receiver, ranks) for receiver in range(ranks)]
    receive_sizes = [sum(size for _, _, size in layout) for layout in layouts] or [0] * ranks
    flat = torch.cat(packed)
    received = flat.new_empty(sum(receive_sizes))
    dist.all_to_all_single(received, flat, receive_sizes, send_sizes, group=group)
    replies: list[Tensor] = []
    if own is not None:
        pieces = [_unpack(piece, layout) for piece, layout in zip(received.split(receive_sizes), layouts, strict=True)]
        grad, *wholes = (torch.cat(rows) for rows in zip(*pieces, strict=True))
        state = {**own.state, **dict(zip(cut, wholes, strict=True))}
        wholes = [compute(own, grad, state), *state.values()]
        replies = [
            _pack([whole[slice(*_row_range(len(whole), receiver, ranks))] if whole.ndim else whole for whole in wholes])
            for receiver in range(ranks)
        ]
    reply_sizes = [len(reply) for reply in replies] or [0] * ranks
    layouts = [_layout(matrix, matrix.state.values(), rank, ranks) for matrix in members]
    return_sizes = [sum(size for _, _, size in layout) for layout in layouts] + [0] * (ranks - len(members))
    returned = flat.new_empty(sum(return_sizes))
    dist.all_to_all_single(returned, torch.cat(replies) if replies else flat[:0], return_sizes, reply_sizes, group=group)
    results = []
    for matrix, piece, layout in zip(members, returned.split(return_sizes), layouts, strict=False):
        update, *values = _unpack(piece, layout)
        matrix.store_(dict(zip(matrix.state, values, strict=True)))
        results.append((matrix, update))
    return results


def _row_range(rows: int, rank: int, ranks: int) -> tuple[int, int]:
    """Return begin and end of the rows of a rank, as torch.chunk and DTensor cut them."""
    most = -(-rows // ranks)
    return min(rank * most, rows), min((rank + 1) * most, rows)


def _layout(matrix: _Matrix, state: Iterable[Tensor], rank: int, ranks: int) -> list[tuple[tuple[int, ...], torch.dtype, int]]:
    """Return shape, dtype and bytes of a rank's part of the input and of tensors of the state."""
    layout = []
    for shape, dtype in [(matrix.param.shape, matrix.input.dtype), *((value.shape, value.dtype) for value in state)]:
        begin, end = _row_range(shape[0], rank, ranks) if shape else (0, 0)
        shape_of_rank = (end - begin, *shape[1:]) if shape else ()
        layout.append((shape_of_rank, dtype, prod(shape_of_rank) * dtype.itemsize))
    return layout


def _pack(tensors: Sequence[Tensor]) -> Tensor:
    """Return the bytes of tensors, one after the other."""
    # A tensor of one row counts as contiguous with any stride, but bytes need stride 1.
    return torch.cat([tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8) for tensor in tensors])


def _unpack(flat: Tensor, layout: Sequence[tuple[tuple[int, ...], torch.dtype, int]]) -> list[Tensor]:
    """Return the tensors whose bytes ``_pack`` has joined. A tensor must begin at a multiple of its element size."""
    tensors = []
    for piece, (shape, dtype, _) in zip(flat.split([size for _, _, size in layout]), layout, strict=True):
        aligned = piece.clone() if piece.storage_offset() % dtype.itemsize else piece
        tensors.append(aligned.view(dtype).view(shape))
    return tensors


class Muon(MatrixOptimizer):
    """Muon for hidden matrices and AdamW for other parameters, as one optimizer with two kinds of groups.

    A group has ``method="muon"`` (the default) or ``method="adamw"``; ``muon_groups(model, head=...)`` makes both. The update
    of a hidden matrix has about the same size in all directions. Updates of Adam and SGD are large in a few directions only.

    Formula: ``buffer = momentum * buffer + (1 - momentum) * grad``,
        ``update = (1 - momentum) * grad + momentum * buffer`` with ``nesterov``, else ``buffer``,
        ``param = param - lr * weight_decay * param - lr * factor * orthogonalize(update)``, where ``factor`` is
        ``sqrt(max(1, rows / cols))`` (``"original"``) or ``0.2 * sqrt(max(rows, cols))`` (``"match_rms_adamw"``: updates have
        the size of AdamW's updates, so AdamW's learning rate and decay apply)

    Under FSDP2, parameters, gradients and buffers stay sharded, but the iteration needs full matrices. Of each ``n`` matrices
    on ``n`` ranks, every rank receives one full update in ``ns_dtype``, orthogonalizes the update, and returns the shards; see
    ``MatrixOptimizer``. In ``optimizer_in_backward``, one unit forms a round.

    Groups with ``stacked=True`` hold stacks of matrices ``[experts, rows, cols]``. Each matrix is orthogonalized by itself.
    FSDP2 shards a stack along its experts, so each rank computes its own experts, without communication. Stacks that are
    sharded along another axis are gathered.

    Args:
        params: hidden matrices, or groups. A group with ``method="adamw"`` may set ``lr`` (3e-4), ``betas`` ((0.9, 0.95)),
            ``eps`` (1e-8), ``weight_decay`` (0.0) and ``fused`` (used if torch supports it).
        lr: learning rate of matrices, >= 0.
        weight_decay: decoupled weight decay of matrices, multiplied by ``lr`` as in ``torch.optim.AdamW``, >= 0.
        momentum: in ``[0, 1)``.
        nesterov: if True, use Nesterov momentum.
        adjust_lr_fn: factor of the learning rate by shape, ``"original"`` or ``"match_rms_adamw"``.
        ns_steps, ns_coefficients, eps: as in ``orthogonalize``.
        ns_dtype: dtype of the iteration and its communication: ``"bf16"``, ``"fp32"``, or ``"param"`` for the parameter dtype.
        stacked: if True, parameters are stacks of matrices, with three dims.

    Mutates: in ``step``, parameters and the optimizer's state.
    Collective: in ``step``, two all-to-alls for each ``n`` matrices of a group whose rows are sharded over ``n`` ranks.
    Host sync: none.

    Example:
        >>> import dtrain as dt
        >>> p = torch.nn.Parameter(torch.zeros(2, 2, dtype=torch.float64))
        >>> optimizer = dt.optim.Muon(
        ...     [p], lr=0.5, ns_steps=1, ns_coefficients=(1.5, -0.5, 0.0), ns_dtype="param"
        ... )
        >>> p.grad = torch.tensor([[0.0, 3.0], [4.0, 0.0]], dtype=torch.float64)
        >>> optimizer.step()
        >>> [
        ...     [round(value, 3) for value in row] for row in p.tolist()
        ... ]  # -0.5 times the example of orthogonalize
        [[0.0, -0.396], [-0.472, 0.0]]

    Raises:
        ConfigError: an argument out of range, an unknown method, or a parameter in a Muon group that has not two dims, or three
            with ``stacked``.

    Source: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks" (learning rates, momentum, iteration);
        Liu et al. 2025, arXiv:2502.16982, section 2.2 (decay, ``match_rms_adamw``). ``torch.optim.Muon`` is equal in one
        process.

    Suggested values:
        NanoGPT speedrun, hidden matrices: ``lr=0.02``, ``momentum=0.95`` (Jordan et al. 2024)
        Moonlight, with AdamW's rate: ``adjust_lr_fn="match_rms_adamw"``, ``weight_decay=0.1`` (Liu et al. 2025, section 2.2)
    When not to use: the model is fine-tuned from a checkpoint of AdamW: Liu et al. 2025 find no advantage then. Embeddings,
        heads and vectors need AdamW; ``muon_groups`` selects them.
    """

    method = "muon"
    shard_state = ("momentum_buffer",)

    def __init__(
        self,
        params: Any,
        lr: float = 0.02,
        *,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        adjust_lr_fn: str = "original",
        ns_steps: int = 5,
        ns_coefficients: tuple[float, float, float] = NS_COEFFICIENTS,
        eps: float = 1e-7,
        ns_dtype: str = "bf16",
        stacked: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "adjust_lr_fn": adjust_lr_fn,
            "ns_steps": ns_steps,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_dtype": ns_dtype,
            "stacked": stacked,
        }
        super().__init__(params, defaults)

    def check_options(self, group: dict[str, Any]) -> None:
        check_number("Muon", "momentum", group["momentum"], minimum=0, below=1)
        check_choice("Muon", "adjust_lr_fn", group["adjust_lr_fn"], ("original", "match_rms_adamw"))
        check_choice("Muon", "ns_dtype", group["ns_dtype"], (*_DTYPES, "param"))
        check_int("Muon", "ns_steps", group["ns_steps"])

    def shard_inputs(self, grads: list[Tensor], states: list[dict[str, Tensor]], group: dict[str, Any]) -> list[Tensor]:
        momentum, dtype = group["momentum"], _DTYPES.get(group["ns_dtype"])
        buffers = [state["momentum_buffer"] for state in states]
        lerp_(buffers, grads, 1.0 - momentum)
        if group["nesterov"]:
            buffers = [grad.lerp(buffer, momentum) for grad, buffer in zip(grads, buffers, strict=True)]
        return [buffer.to(dtype or buffer.dtype) for buffer in buffers]

    def matrix_update(self, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        return orthogonalize(grad, ns_steps=group["ns_steps"], ns_coefficients=group["ns_coefficients"], eps=group["eps"])

    def lr_factor(self, shape: tuple[int, int], group: dict[str, Any]) -> float:
        rows, cols = shape
        return math.sqrt(max(1.0, rows / cols)) if group["adjust_lr_fn"] == "original" else 0.2 * math.sqrt(max(rows, cols))


def orthogonalize(
    matrix: Tensor, *, ns_steps: int = 5, ns_coefficients: tuple[float, float, float] = NS_COEFFICIENTS, eps: float = 1e-7
) -> Tensor:
    """Return a matrix with the singular vectors of ``matrix`` and singular values near 1, except very small ones.

    With the defaults, a singular value of at least 0.0015 of the Frobenius norm is mapped to 0.65 to 1.21. Smaller values grow
    by at most a factor of 485. For random matrices with side ratios of 8 to 9 or more, all singular values are in range. For
    square random matrices about 2% are not, and the smallest stays near 0.

    The iteration uses matrix products only, in the dtype of ``matrix``; bfloat16 is sufficient. A zero matrix stays zero. Each
    matrix of a stack is orthogonalized by itself.

    Formula: ``x = matrix / max(norm(matrix), eps)``, then ``ns_steps`` times
        ``x = a * x + b * (x x^T) x + c * (x x^T)^2 x``, which maps each singular value ``s`` to ``a s + b s^3 + c s^5``

    Args:
        matrix: ``[rows, cols]`` or ``[experts, rows, cols]``, plain.
        ns_steps: number of iterations, >= 1.
        ns_coefficients: ``(a, b, c)`` with a large slope at 0, so that small singular values grow fast.
        eps: lower bound of the norm.

    Returns:
        A new tensor of the shape of ``matrix``. Host sync: none.

    Example:
        >>> import dtrain as dt
        >>> matrix = torch.tensor([[0.0, 3.0], [4.0, 0.0]], dtype=torch.float64)
        >>> x = dt.optim.orthogonalize(matrix, ns_steps=1, ns_coefficients=(1.5, -0.5, 0.0))
        >>> [
        ...     [round(value, 3) for value in row] for row in x.tolist()
        ... ]  # 1.5 s - 0.5 s^3 for s = 0.6 and 0.8
        [[0.0, 0.792], [0.944, 0.0]]

    Source: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"; the iteration of Newton and Schulz,
        Bernstein and Newhouse 2024, arXiv:2409.20325, appendix A.
    """
    a, b, c = ns_coefficients
    tall = matrix.shape[-2] > matrix.shape[-1]
    add_product = torch.addmm if matrix.ndim == 2 else torch.baddbmm
    # The product x x^T is smaller for a wide matrix.
    x = matrix.mT if tall else matrix
    norm = torch.linalg.vector_norm(x) if x.ndim == 2 else torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    x = x / norm.clamp(min=eps)
    for _ in range(ns_steps):
        square = x @ x.mT
        x = add_product(x, add_product(square, square, square, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


Compute = Callable[[_Matrix, Tensor, dict[str, Any]], Tensor]
"""Function of the work, the whole input and the whole state that returns the update, and replaces tensors of the state."""
