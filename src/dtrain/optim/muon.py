"""Muon optimizer: orthogonalized momentum for hidden matrices, AdamW for all other parameters.

``map_matrices`` applies a function of full matrices to sharded matrices: each rank computes some of the matrices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.adamw import adamw

from dtrain.arguments import check_choice, check_int, check_number
from dtrain.dist.timeout_report import report_missing_ranks
from dtrain.dtensor import from_local_like, full_tensor, is_dtensor, lerp_, local_slice, mul_, row_sharding, to_local
from dtrain.errors import ConfigError
from dtrain.optim.decoupled import can_fuse, evaluate_closure, sets_implementation, trainable_in_group

NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ADAMW_DEFAULTS: dict[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0, "fused": None}
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def orthogonalize(
    matrix: Tensor, *, steps: int = 5, coefficients: tuple[float, float, float] = NS_COEFFICIENTS, eps: float = 1e-7
) -> Tensor:
    """Return a matrix with the singular vectors of ``matrix`` and singular values near 1, except very small ones.

    With the defaults, a singular value of at least 0.0015 of the Frobenius norm is mapped to 0.65 to 1.21. Smaller values grow
    by at most a factor of 485. For random matrices with side ratios of 8 to 9 or more, all singular values are in range. For
    square random matrices about 2% are not, and the smallest stays near 0.

    The iteration uses matrix products only, in the dtype of ``matrix``; bfloat16 is sufficient. A zero matrix stays zero.

    Formula: ``x = matrix / max(norm(matrix), eps)``, then ``steps`` times
        ``x = a * x + b * (x x^T) x + c * (x x^T)^2 x``, which maps each singular value ``s`` to ``a s + b s^3 + c s^5``

    Args:
        matrix: ``[rows, cols]``, plain.
        steps: number of iterations, >= 1.
        coefficients: ``(a, b, c)`` with a large slope at 0, so that small singular values grow fast.
        eps: lower bound of the norm.

    Returns:
        ``[rows, cols]``, a new tensor. Host sync: none.

    Example:
        >>> import dtrain as dt
        >>> matrix = torch.tensor([[0.0, 3.0], [4.0, 0.0]], dtype=torch.float64)
        >>> x = dt.optim.orthogonalize(matrix, steps=1, coefficients=(1.5, -0.5, 0.0))
        >>> [[round(value, 3) for value in row] for row in x.tolist()]  # 1.5 s - 0.5 s^3 for s = 0.6 and 0.8
        [[0.0, 0.792], [0.944, 0.0]]

    Source: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"; the iteration of Newton and Schulz,
        Bernstein and Newhouse 2024, arXiv:2409.20325, appendix A.
    """
    a, b, c = coefficients
    tall = matrix.shape[0] > matrix.shape[1]
    # The product x x^T is smaller for a wide matrix.
    x = matrix.T if tall else matrix
    x = x / torch.linalg.vector_norm(x).clamp(min=eps)
    for _ in range(steps):
        square = x @ x.T
        x = torch.addmm(x, torch.addmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


class Muon(torch.optim.Optimizer):
    """Muon for hidden matrices and AdamW for other parameters, as one optimizer with two kinds of groups.

    A group has ``method="muon"`` (the default) or ``method="adamw"``; ``muon_groups(model, head=...)`` makes both. The update
    of a hidden matrix has about the same size in all directions. Updates of Adam and SGD are large in a few directions only.

    Formula: ``buffer = momentum * buffer + (1 - momentum) * grad``,
        ``update = (1 - momentum) * grad + momentum * buffer`` with ``nesterov``, else ``buffer``,
        ``param = param - lr * weight_decay * param - lr * factor * orthogonalize(update)``, where ``factor`` is
        ``sqrt(max(1, rows / cols))`` (``"original"``) or ``0.2 * sqrt(max(rows, cols))`` (``"match_rms_adamw"``: updates have
        the size of AdamW's updates, so AdamW's learning rate and decay apply)

    Under FSDP2, parameters, gradients and buffers stay sharded, but the iteration needs full matrices. Of each ``n`` matrices
    on ``n`` ranks, every rank receives one full update in ``ns_dtype``, orthogonalizes the update, and returns the shards.
    Matrices with other placements than row shards on one axis (tensor parallelism with FSDP2) are gathered and computed on
    every rank. Replicas compute the same matrices. In ``optimizer_in_backward``, one unit forms a round.

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

    Mutates: in ``step``, parameters and the optimizer's state.
    Collective: in ``step``, two all-to-alls for each ``n`` matrices of a group whose rows are sharded over ``n`` ranks.
    Host sync: none.

    Example:
        >>> import dtrain as dt
        >>> p = torch.nn.Parameter(torch.zeros(2, 2, dtype=torch.float64))
        >>> optimizer = dt.optim.Muon([p], lr=0.5, ns_steps=1, ns_coefficients=(1.5, -0.5, 0.0), ns_dtype="param")
        >>> p.grad = torch.tensor([[0.0, 3.0], [4.0, 0.0]], dtype=torch.float64)
        >>> optimizer.step()
        >>> [[round(value, 3) for value in row] for row in p.tolist()]  # -0.5 times the example of orthogonalize
        [[0.0, -0.396], [-0.472, 0.0]]

    Raises:
        ConfigError: an argument out of range, an unknown method, or a parameter in a Muon group that has not two dims.

    Source: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks" (learning rates, momentum, iteration);
        Liu et al. 2025, arXiv:2502.16982, section 2.2 (decay, ``match_rms_adamw``). ``torch.optim.Muon`` is equal in one
        process.

    Suggested values:
        NanoGPT speedrun, hidden matrices: ``lr=0.02``, ``momentum=0.95`` (Jordan et al. 2024)
        Moonlight, with AdamW's rate: ``adjust_lr_fn="match_rms_adamw"``, ``weight_decay=0.1`` (Liu et al. 2025, section 2.2)
    When not to use: the model is fine-tuned from a checkpoint of AdamW: Liu et al. 2025 find no advantage then. Embeddings,
        heads and vectors need AdamW; ``muon_groups`` selects them.
    """

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
    ) -> None:
        self._muon_defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "adjust_lr_fn": adjust_lr_fn,
            "ns_steps": ns_steps,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_dtype": ns_dtype,
        }
        super().__init__(params, {})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        method = param_group.setdefault("method", "muon")
        check_choice("Muon", "method of a group", method, ("muon", "adamw"))
        defaults = self._muon_defaults if method == "muon" else _ADAMW_DEFAULTS
        unknown = set(param_group) - set(defaults) - {"params", "name", "method", "initial_lr"}
        if unknown:
            valid = ", ".join(defaults)
            raise ConfigError(
                f"Muon: options of a group with method={method!r} must be among {valid}, got {sorted(unknown)[0]!r}. "
                "Remove the other options from the group."
            )
        for key, value in defaults.items():
            param_group.setdefault(key, value)
        _check_options(param_group)
        super().add_param_group(param_group)
        invalid_shapes = [tuple(p.shape) for p in param_group["params"] if p.ndim != 2]
        if method == "muon" and invalid_shapes:
            raise ConfigError(
                f"Muon: parameters of a group with method='muon' must have two dims, got shape {invalid_shapes[0]}. Put other "
                "parameters, embeddings and the head in a group with method='adamw', as muon_groups does."
            )
        if method == "adamw" and not sets_implementation(param_group):
            param_group["fused"] = can_fuse(trainable_in_group(param_group))

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Apply the gradients. Mutates: parameters, state. Collective: see the class; every rank must call."""
        loss = None if closure is None else evaluate_closure(closure)
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            if params:
                (self._step_muon if group["method"] == "muon" else self._step_adamw)(group, params)
        return loss

    def _step_muon(self, group: dict[str, Any], params: list[Tensor]) -> None:
        lr, momentum, dtype = group["lr"], group["momentum"], _DTYPES.get(group["ns_dtype"])
        for param in params:
            if not self.state[param]:
                self.state[param]["momentum_buffer"] = torch.zeros_like(param)
        buffers = [self.state[param]["momentum_buffer"] for param in params]
        lerp_(buffers, [_grad_of(param) for param in params], 1.0 - momentum)

        def update_of(index: int) -> Tensor:
            grad, buffer = to_local(_grad_of(params[index])), to_local(buffers[index])
            return (grad.lerp(buffer, momentum) if group["nesterov"] else buffer).to(dtype or buffer.dtype)

        def orthogonal(matrix: Tensor) -> Tensor:
            return orthogonalize(matrix, steps=group["ns_steps"], coefficients=group["ns_coefficients"], eps=group["eps"])

        mul_(params, 1.0 - lr * group["weight_decay"])
        for index, part in map_matrices(orthogonal, params, update_of, caller="Muon"):
            to_local(params[index]).add_(part, alpha=-lr * _lr_factor(group["adjust_lr_fn"], *params[index].shape))

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


def _lr_factor(adjust_lr_fn: str, rows: int, cols: int) -> float:
    """Return the learning rate factor of a matrix."""
    return math.sqrt(max(1.0, rows / cols)) if adjust_lr_fn == "original" else 0.2 * math.sqrt(max(rows, cols))


def _check_options(group: dict[str, Any]) -> None:
    """Raise ``ConfigError`` for an invalid option of a group."""
    for key in ("lr", "weight_decay", "eps"):
        check_number("Muon", key, group[key], minimum=0)
    if group["method"] == "adamw":
        for index, beta in enumerate(group["betas"]):
            check_number("Muon", f"betas[{index}]", beta, minimum=0, below=1)
        return
    check_number("Muon", "momentum", group["momentum"], minimum=0, below=1)
    check_choice("Muon", "adjust_lr_fn", group["adjust_lr_fn"], ("original", "match_rms_adamw"))
    check_choice("Muon", "ns_dtype", group["ns_dtype"], (*_DTYPES, "param"))
    check_int("Muon", "ns_steps", group["ns_steps"])


MatrixFn = Callable[[Tensor], Tensor]
"""A function of a full matrix that returns a matrix of the same shape and dtype."""


def map_matrices(
    function: MatrixFn, matrices: Sequence[Tensor], part_of: Callable[[int], Tensor], *, caller: str
) -> Iterator[tuple[int, Tensor]]:
    """Yield ``(index, part)``: this rank's part of ``function`` of each full matrix, in the same order on all ranks.

    Matrices with rows sharded over ``n`` ranks are processed in rounds of ``n`` matrices of similar size. Each rank receives
    one full matrix, computes the result and returns the shards. The work is divided by ``n``, and a rank stores one matrix
    besides its shards. Matrices with other placements are gathered and computed on every rank. Replicated matrices are computed
    on every rank.

    Args:
        function: deterministic function, so that ranks with equal inputs get equal results.
        matrices: plain tensors or DTensors that define shapes and placements.
        part_of: function that returns this rank's part of an input by index, as a plain tensor; called once per index.
        caller: name of the caller, for errors of collectives.

    Collective: two all-to-alls for each ``n`` row-sharded matrices; one all-gather for each matrix with another sharding.
    Host sync: none.
    """
    by_group: dict[dist.ProcessGroup | None, list[int]] = {}
    for index, matrix in enumerate(matrices):
        rows = row_sharding(matrix)
        by_group.setdefault(None if rows is None else rows[0], []).append(index)
    for group, members in by_group.items():
        if group is None:
            for index in members:
                matrix_part = part_of(index)
                if is_dtensor(matrices[index]):
                    yield (
                        index,
                        local_slice(matrices[index], function(full_tensor(from_local_like(matrices[index], matrix_part)))),
                    )
                else:
                    yield index, function(matrix_part)
            continue
        # A round takes as long as its largest matrix, so group matrices of similar size.
        members.sort(key=lambda index: -matrices[index].numel())
        ranks = group.size()
        for start in range(0, len(members), ranks):
            with report_missing_ranks(caller):
                yield from _compute_round(function, matrices, part_of, members[start : start + ranks], group)


def _compute_round(
    function: MatrixFn,
    matrices: Sequence[Tensor],
    part_of: Callable[[int], Tensor],
    members: list[int],
    group: dist.ProcessGroup,
) -> list[tuple[int, Tensor]]:
    """Compute the ``r``-th matrix of ``members`` on rank ``r`` of ``group``, and return this rank's shards of all."""
    rank, ranks = group.rank(), group.size()
    parts = [part_of(index) for index in members]
    send_sizes = [part.numel() for part in parts] + [0] * (ranks - len(parts))
    own_matrix = matrices[members[rank]] if rank < len(members) else None
    rows = row_sharding(own_matrix) if own_matrix is not None else None
    receive_sizes = (
        [size * own_matrix.shape[1] for size in rows[1]] if own_matrix is not None and rows is not None else [0] * ranks
    )
    flat = torch.cat([part.flatten() for part in parts])
    received = flat.new_empty(sum(receive_sizes))
    dist.all_to_all_single(received, flat, receive_sizes, send_sizes, group=group)
    if own_matrix is not None:
        received = function(received.view(own_matrix.shape)).flatten()
    dist.all_to_all_single(flat, received, send_sizes, receive_sizes, group=group)
    returned = flat.split(send_sizes)
    return [(index, piece.view(part.shape)) for index, piece, part in zip(members, returned, parts, strict=False)]
