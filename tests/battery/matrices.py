"""Shampoo and SOAP twice: as users of ``MatrixOptimizer``, and by hand for plain matrices in one process.

Shampoo: Gupta et al. 2018, arXiv:1802.09568, algorithm 1. SOAP: Vyas et al. 2024, arXiv:2409.11321, algorithm 3, with power
iterations from the first step on, and statistics that begin at a multiple of the identity, so that rounding stays rounding.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

import dtrain as dt

EPS = 1e-2
BETAS = (0.9, 0.95)


class Shampoo(dt.optim.MatrixOptimizer):
    """Both sides of the gradient are multiplied by an inverse fourth root of a sum."""

    def __init__(self, params: Any, lr: float = 0.05, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})

    def init_matrix_state(self, matrix: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        rows, cols = matrix.shape
        like = {"dtype": matrix.dtype, "device": matrix.device}
        return {"left": EPS * torch.eye(rows, **like), "right": EPS * torch.eye(cols, **like)}

    def matrix_update(self, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        state["left"] += grad @ grad.T
        state["right"] += grad.T @ grad
        return root(state["left"]) @ grad @ root(state["right"])


def root(statistics: Tensor) -> Tensor:
    """Return the inverse fourth root."""
    values, vectors = torch.linalg.eigh(statistics)
    return (vectors * values**-0.25) @ vectors.T


class SOAP(dt.optim.MatrixOptimizer):
    """Adam in the slowly turning basis of Shampoo; the basis turns in every second step."""

    def __init__(self, params: Any, lr: float = 0.05, every: int = 2, **options: Any) -> None:
        super().__init__(params, {"lr": lr, "every": every, **options})

    def init_matrix_state(self, matrix: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        state = {"first": torch.zeros_like(matrix), "second": torch.zeros_like(matrix)}
        for side, size in zip(("left", "right"), matrix.shape, strict=True):
            eye = torch.eye(size, dtype=matrix.dtype, device=matrix.device)
            state |= {side: EPS * eye, f"{side}_basis": eye.clone()}
        # Of another dtype than the matrix, and without rows.
        return {**state, "turns": torch.zeros((), dtype=torch.int32)}

    def matrix_update(self, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        step, left, right = state["step"], state["left_basis"], state["right_basis"]
        state["first"] = BETAS[0] * state["first"] + (1 - BETAS[0]) * grad
        turned = left.T @ grad @ right
        state["second"] = BETAS[1] * state["second"] + (1 - BETAS[1]) * turned**2
        first = left.T @ state["first"] @ right / (1 - BETAS[0] ** step)
        second = state["second"] / (1 - BETAS[1] ** step)
        update = left @ (first / (second.sqrt() + EPS)) @ right.T
        for side, square in (("left", grad @ grad.T), ("right", grad.T @ grad)):
            state[side].lerp_(square, 1 - BETAS[1])
            if step % group["every"] == 0:
                state[f"{side}_basis"] = torch.linalg.qr(state[side] @ state[f"{side}_basis"])[0]
        if step % group["every"] == 0:
            state["turns"] += 1
        return update


class ByHand:
    """Both methods for a list of plain matrices, with AdamW for other parameters."""

    def __init__(self, name: str, params: Iterable[nn.Parameter], lr: float) -> None:
        params = list(params)
        self.name, self.lr, self.step_number = name, lr, 0
        self.matrices = [param for param in params if param.ndim == 2]
        rest = [param for param in params if param.ndim != 2]
        self.rest = torch.optim.AdamW(rest, lr=lr, betas=BETAS, eps=1e-8, weight_decay=0.0) if rest else None
        self.sides = [[EPS * torch.eye(size, dtype=torch.float64) for size in param.shape] for param in self.matrices]
        self.bases = [[torch.eye(size, dtype=torch.float64) for size in param.shape] for param in self.matrices]
        self.moments = [[torch.zeros_like(param), torch.zeros_like(param)] for param in self.matrices]

    @torch.no_grad()
    def step(self) -> None:
        if self.rest is not None:
            self.rest.step()
        self.step_number += 1
        for number, param in enumerate(self.matrices):
            update = (self.shampoo if self.name == "shampoo" else self.soap)(number, param.grad)
            param -= self.lr * update

    def shampoo(self, number: int, grad: Tensor) -> Tensor:
        sides = self.sides[number]
        sides[0] = sides[0] + grad @ grad.T
        sides[1] = sides[1] + grad.T @ grad
        return root(sides[0]) @ grad @ root(sides[1])

    def soap(self, number: int, grad: Tensor) -> Tensor:
        sides, (left, right), moments, (b1, b2) = self.sides[number], self.bases[number], self.moments[number], BETAS
        moments[0] = moments[0] * b1 + grad * (1 - b1)
        moments[1] = moments[1] * b2 + (left.T @ grad @ right).square() * (1 - b2)
        numerator = left.T @ (moments[0] / (1 - b1**self.step_number)) @ right
        update = left @ (numerator / ((moments[1] / (1 - b2**self.step_number)).sqrt() + EPS)) @ right.T
        sides[0] = b2 * sides[0] + (1 - b2) * grad @ grad.T
        sides[1] = b2 * sides[1] + (1 - b2) * grad.T @ grad
        if self.step_number % 2 == 0:
            self.bases[number] = [torch.linalg.qr(side @ basis)[0] for side, basis in zip(sides, (left, right), strict=True)]
        return update


USERS: dict[str, type[dt.optim.MatrixOptimizer]] = {"shampoo": Shampoo, "soap": SOAP}


def grouped(name: str, model: nn.Module, lr: float = 0.05) -> dt.optim.MatrixOptimizer:
    """The optimizer of a model: matrices by the method, other parameters by AdamW."""
    params = list(model.parameters())
    matrices, rest = ([param for param in params if (param.ndim == 2) is two] for two in (True, False))
    groups = [{"params": matrices}, {"params": rest, "method": "adamw", "lr": lr}]
    return USERS[name](groups, lr=lr)
