"""A module as an instance of another class that has the same tensors: for edits that change what is computed, and no state."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

Kind = TypeVar("Kind", bound=nn.Module)


def retyped(module: nn.Module, kind: type[Kind]) -> Kind:
    """A ``kind`` with the parameters, buffers, children and attributes of ``module``, under the same names.

    ``kind`` is a subclass of the class of ``module`` that stores nothing of its own in ``__init__``, which is not run.

    Example:
        >>> class Doubled(nn.Linear):
        ...     def forward(self, input):
        ...         return 2 * super().forward(input)
        >>> linear = nn.Linear(1, 1, bias=False)
        >>> doubled = retyped(linear, Doubled)
        >>> doubled.weight is linear.weight, bool((doubled(torch.ones(1)) == 2 * linear(torch.ones(1))).all())
        (True, True)
    """
    made = object.__new__(kind)
    for key, value in module.__dict__.items():  # what one registers, tensors, children and hooks, is not in the other
        own = key.startswith("_") and isinstance(value, dict | set)
        made.__dict__[key] = value.copy() if own else value
    return made
