"""Muon optimizer: orthogonalized momentum for hidden matrices, AdamW for all other parameters."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from dtrain.arguments import check_choice, check_int, check_number
from dtrain.dist.dtensor import lerp_
from dtrain.optim.matrix import MatrixOptimizer

NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def orthogonalize(
    matrix: Tensor, *, ns_steps: int = 5, ns_coefficients: tuple[float, float, float] = NS_COEFFICIENTS, eps: float = 1e-7
) -> Tensor:
    """Return a matrix with the singular vectors of ``matrix`` and singular values near 1, except very small ones.

    With the defaults, a singular value of at least 0.0015 of the Frobenius norm is mapped to 0.65 to 1.21. Smaller values grow
    by at most a factor of 485. For random matrices with side ratios of 8 to 9 or more, all singular values are in range. For
    square random matrices about 2% are not, and the smallest stays near 0.

    The iteration uses matrix products only, in the dtype of ``matrix``; bfloat16 is sufficient. A zero matrix stays zero.

    Formula: ``x = matrix / max(norm(matrix), eps)``, then ``ns_steps`` times
        ``x = a * x + b * (x x^T) x + c * (x x^T)^2 x``, which maps each singular value ``s`` to ``a s + b s^3 + c s^5``

    Args:
        matrix: ``[rows, cols]``, plain.
        ns_steps: number of iterations, >= 1.
        ns_coefficients: ``(a, b, c)`` with a large slope at 0, so that small singular values grow fast.
        eps: lower bound of the norm.

    Returns:
        ``[rows, cols]``, a new tensor. Host sync: none.

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
    tall = matrix.shape[0] > matrix.shape[1]
    # The product x x^T is smaller for a wide matrix.
    x = matrix.T if tall else matrix
    x = x / torch.linalg.vector_norm(x).clamp(min=eps)
    for _ in range(ns_steps):
        square = x @ x.T
        x = torch.addmm(x, torch.addmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


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
