"""Muon: momentum whose matrix is made orthogonal before it is applied; AdamW for all that is no hidden matrix.

A function of whole matrices over matrices that are cut: each rank computes some of them, and has all for a moment."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.adamw import adamw

from dtrain.dist.timeout_report import report_missing_ranks
from dtrain.dtensor import from_local_like, full_tensor, is_dtensor, lerp_, local_slice, mul_, row_sharding, to_local
from dtrain.errors import ConfigError
from dtrain.optim.foreach import can_fuse, evaluate_closure, sets_implementation, trainable_in_group

NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ADAMW_DEFAULTS: dict[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0, "fused": None}
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def orthogonalize(
    matrix: Tensor, *, steps: int = 5, coefficients: tuple[float, float, float] = NS_COEFFICIENTS, eps: float = 1e-7
) -> Tensor:
    """A matrix with the singular vectors of ``matrix``, whose singular values are near 1, but for the smallest ones.

    With the defaults a singular value of at least 0.0015 of the Frobenius norm becomes 0.65 to 1.21; a smaller one grows 485
    times at most. So of random matrices with sides of 8 to 9 or farther apart all become so. Of square ones about 2% do not,
    and the smallest stays near 0.

    It takes products of matrices only, in the dtype of ``matrix``: bfloat16 is enough. A matrix of zeros stays one.

    Formula: ``x = matrix / max(norm(matrix), eps)``, then ``steps`` times
        ``x = a * x + b * (x x^T) x + c * (x x^T)^2 x``, which takes each singular value ``s`` to ``a s + b s^3 + c s^5``

    Args:
        matrix: ``[rows, cols]``, plain.
        steps: of the iteration, >= 1.
        coefficients: ``(a, b, c)``, whose slope at 0 is large, so that small singular values grow fast.
        eps: the smallest norm divided by.

    Returns:
        ``[rows, cols]``, a new tensor. Host sync: none.

    Source: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"; the iteration of Newton and Schulz,
        Bernstein and Newhouse 2024, arXiv:2409.20325, appendix A.

    Example:
        >>> matrix = torch.tensor([[0.0, 3.0], [4.0, 0.0]], dtype=torch.float64)
        >>> x = orthogonalize(matrix, steps=1, coefficients=(1.5, -0.5, 0.0))
        >>> [[round(value, 3) for value in row] for row in x.tolist()]  # of 0.6 and 0.8: 1.5 s - 0.5 s^3
        [[0.0, 0.792], [0.944, 0.0]]
    """
    a, b, c = coefficients
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix  # the product x x^T is then the smaller of the two
    x = x / torch.linalg.vector_norm(x).clamp(min=eps)
    for _ in range(steps):
        square = x @ x.T
        x = torch.addmm(x, torch.addmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


class Muon(torch.optim.Optimizer):
    """Muon for hidden matrices and AdamW for the rest, as one optimizer with two kinds of groups.

    A group has ``method="muon"`` (also where nothing is said) or ``method="adamw"``; ``muon_groups(model, head=...)`` makes
    both. The update of a hidden matrix has about the same size in all directions, where that of Adam or SGD is large in a few.

    Formula: ``buffer = momentum * buffer + (1 - momentum) * grad``,
        ``update = (1 - momentum) * grad + momentum * buffer`` with ``nesterov``, else ``buffer``,
        ``param = param - lr * weight_decay * param - lr * adjust * orthogonalize(update)``, where ``adjust`` is
        ``sqrt(max(1, rows / cols))`` (``"original"``) or ``0.2 * sqrt(max(rows, cols))`` (``"match_rms"``: updates as large as
        AdamW's, whose rate and decay then fit)

    Under FSDP2 parameters, gradients and buffers stay cut, but the iteration needs whole matrices: with ``n`` ranks each one
    gets, of each ``n`` matrices, one whole update in the dtype of the iteration, computes it, and gives the parts back. Over
    another layout than rows on one axis (tensor parallelism with FSDP2) every matrix is gathered on, and computed by, every
    rank. Replicas compute the same. In ``optimizer_in_backward`` a round is what one unit has.

    Args:
        params: hidden matrices, or groups. One with ``method="adamw"`` may have ``lr`` (3e-4), ``betas`` ((0.9, 0.95)), ``eps``
            (1e-8), ``weight_decay`` (0.0) and ``fused`` (where torch has it).
        lr: of matrices, >= 0.
        weight_decay: of matrices, decoupled, in units of ``1 / lr`` as in ``torch.optim.AdamW``, >= 0.
        momentum: in ``[0, 1)``.
        nesterov: whether the update looks one step ahead.
        adjust: how the rate depends on the shape.
        ns_steps, ns_coefficients, eps: of ``orthogonalize``.
        ns_dtype: what the iteration computes and ranks send: ``"bf16"``, ``"fp32"``, or ``"param"`` for that of the parameter.

    Mutates: in ``step``, parameters and the optimizer's state.
    Collective: in ``step``, two all-to-alls for each ``n`` matrices of a group whose rows are cut over ``n`` ranks.
    Host sync: none.

    Raises:
        ConfigError: an argument out of its range, an unknown method, or in a group for Muon what is no matrix.

    Source: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks" (rates, momentum, iteration); Liu et
        al. 2025, arXiv:2502.16982, section 2.2 (decay, ``match_rms``). ``torch.optim.Muon`` is the same in one process.

    Example:
        >>> p = torch.nn.Parameter(torch.zeros(2, 2, dtype=torch.float64))
        >>> optimizer = Muon([p], lr=0.5, ns_steps=1, ns_coefficients=(1.5, -0.5, 0.0), ns_dtype="param")
        >>> p.grad = torch.tensor([[0.0, 3.0], [4.0, 0.0]], dtype=torch.float64)
        >>> optimizer.step()
        >>> [[round(value, 3) for value in row] for row in p.tolist()]  # 0.5 times what orthogonalize's example has
        [[0.0, -0.396], [-0.472, 0.0]]
    """

    def __init__(
        self,
        params: Any,
        lr: float = 0.02,
        *,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        adjust: str = "original",
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
            "adjust": adjust,
            "ns_steps": ns_steps,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_dtype": ns_dtype,
        }
        super().__init__(params, {})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        method = param_group.setdefault("method", "muon")
        if method not in ("muon", "adamw"):
            raise ConfigError(f"Muon: a group's method is 'muon' or 'adamw', got {method!r}")
        known = self._muon_defaults if method == "muon" else _ADAMW_DEFAULTS
        strange = set(param_group) - set(known) - {"params", "name", "method", "initial_lr"}
        if strange:
            has = ", ".join(known)
            raise ConfigError(f"Muon: a group with method={method!r} has no option {sorted(strange)[0]!r}; it has {has}")
        for key, value in known.items():
            param_group.setdefault(key, value)
        _check_options(param_group)
        super().add_param_group(param_group)
        flat = [tuple(p.shape) for p in param_group["params"] if p.ndim != 2]
        if method == "muon" and flat:
            raise ConfigError(
                f"Muon: is for hidden matrices, got a parameter of shape {flat[0]}; give what is no matrix, embeddings "
                "and the head a group with method='adamw', as muon_groups does"
            )
        if method == "adamw" and not sets_implementation(param_group):
            param_group["fused"] = can_fuse(trainable_in_group(param_group))

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Apply the gradients. Mutates: parameters, state. Collective: as the class says; every rank must call it."""
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
            to_local(params[index]).add_(part, alpha=-lr * _lr_factor(group["adjust"], *params[index].shape))

    def _step_adamw(self, group: dict[str, Any], params: list[Tensor]) -> None:
        for param in params:
            if not self.state[param]:
                where = param.device if group["fused"] else torch.device("cpu")
                self.state[param]["step"] = torch.zeros((), dtype=torch.float32, device=where)
                self.state[param]["exp_avg"] = torch.zeros_like(param)
                self.state[param]["exp_avg_sq"] = torch.zeros_like(param)
        held = [self.state[param] for param in params]
        adamw(
            [to_local(param) for param in params],
            [to_local(_grad_of(param)) for param in params],
            [to_local(one["exp_avg"]) for one in held],
            [to_local(one["exp_avg_sq"]) for one in held],
            [],
            [one["step"] for one in held],
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


def _lr_factor(how: str, rows: int, cols: int) -> float:
    """The factor of the rate for a matrix."""
    return math.sqrt(max(1.0, rows / cols)) if how == "original" else 0.2 * math.sqrt(max(rows, cols))


def _check_options(group: dict[str, Any]) -> None:
    """Refuse options of a group that cannot be right."""
    for key in ("lr", "weight_decay", "eps"):
        if isinstance(group[key], Tensor) or not 0.0 <= group[key] < math.inf:
            raise ConfigError(f"Muon: needs a finite number {key} >= 0, got {group[key]!r}")
    for key, value in ("momentum", group.get("momentum", 0.0)), *(("betas", beta) for beta in group.get("betas", ())):
        if not 0.0 <= value < 1.0:
            raise ConfigError(f"Muon: needs 0 <= {key} < 1, got {group[key]!r}")
    if group["method"] == "muon":
        if group["adjust"] not in ("original", "match_rms"):
            raise ConfigError(f"Muon: adjust is 'original' or 'match_rms', got {group['adjust']!r}")
        if group["ns_dtype"] not in (*_DTYPES, "param"):
            raise ConfigError(f"Muon: ns_dtype is 'bf16', 'fp32' or 'param', got {group['ns_dtype']!r}")
        if type(group["ns_steps"]) is not int or group["ns_steps"] < 1:
            raise ConfigError(f"Muon: needs a whole number ns_steps >= 1, got {group['ns_steps']!r}")


MatrixFn = Callable[[Tensor], Tensor]
"""A whole matrix in, one of the same shape and dtype out."""


def map_matrices(
    function: MatrixFn, like: Sequence[Tensor], part_of: Callable[[int], Tensor], *, caller: str
) -> Iterator[tuple[int, Tensor]]:
    """``function`` of each whole matrix, as this rank's part of it: ``(index, part)``, in an order that is the same on all
    ranks.

    Matrices whose rows are cut over ``n`` ranks are taken ``n`` at a time, of like size: each rank gets one of them whole,
    computes, and gives the parts back. So the work is divided by ``n``, and a rank holds one matrix more than its shards. One
    that is cut in another way is gathered, and computed, on every rank; so is one that all ranks have anyway.

    Args:
        function: deterministic, so that ranks that compute the same get the same.
        like: the matrices, plain or DTensors, for how they lie.
        part_of: this rank's part of what ``function`` is to see, by index; a plain tensor, called once for each index.
        caller: the name of the caller, in the error of a collective that fails.

    Collective: for matrices with cut rows two all-to-alls for each ``n`` of them; for others that are cut one all-gather each.
    Host sync: none.
    """
    over: dict[dist.ProcessGroup | None, list[int]] = {}
    for index, matrix in enumerate(like):
        rows = row_sharding(matrix)
        over.setdefault(None if rows is None else rows[0], []).append(index)
    for group, members in over.items():
        if group is None:
            for index in members:
                whole = part_of(index)
                if is_dtensor(like[index]):
                    yield index, local_slice(like[index], function(full_tensor(from_local_like(like[index], whole))))
                else:
                    yield index, function(whole)
            continue
        members.sort(key=lambda index: -like[index].numel())  # those of a round wait for its largest
        ranks = group.size()
        for start in range(0, len(members), ranks):
            with report_missing_ranks(caller):
                yield from _compute_round(function, like, part_of, members[start : start + ranks], group)


def _compute_round(
    function: MatrixFn, like: Sequence[Tensor], part_of: Callable[[int], Tensor], members: list[int], group: dist.ProcessGroup
) -> list[tuple[int, Tensor]]:
    """Rank ``r`` of ``group`` computes the ``r``-th of ``members``."""
    rank, ranks = group.rank(), group.size()
    parts = [part_of(index) for index in members]
    here = [part.numel() for part in parts] + [0] * (ranks - len(parts))
    mine = like[members[rank]] if rank < len(members) else None
    rows = row_sharding(mine) if mine is not None else None
    there = [size * mine.shape[1] for size in rows[1]] if mine is not None and rows is not None else [0] * ranks
    flat = torch.cat([part.flatten() for part in parts])
    whole = flat.new_empty(sum(there))
    dist.all_to_all_single(whole, flat, there, here, group=group)
    if mine is not None:
        whole = function(whole.view(mine.shape)).flatten()
    dist.all_to_all_single(flat, whole, here, there, group=group)
    back = flat.split(here)
    return [(index, piece.view(part.shape)) for index, piece, part in zip(members, back, parts, strict=False)]
