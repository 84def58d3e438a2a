"""Find the models of a script, and name their parameters (``ScriptModels``)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from dtrain.fqn import buffers_by_fqn, modules_by_fqn, parameters_by_fqn, unwrap_module


class ScriptModels:
    """Models of one rank, in the order in which they were seen. Names in further models begin with the class of the model.

    Args:
        dtype: dtype of the run, to which models are converted; None keeps their dtypes.
    """

    def __init__(self, dtype: torch.dtype | None) -> None:
        self.modules: list[nn.Module] = []
        # The process ends without freeing them: DDP may wait for a thread of gloo, which waits for Python's lock.
        self._wrappers: dict[int, nn.Module] = {}
        self._dtype = dtype

    def add(self, model: nn.Module) -> None:
        """Remember a model, unless its parameters are those of a known model. Mutates: the dtype of its parameters."""
        inner = unwrap_module(model)
        self._wrappers.setdefault(id(model), model)
        if any(inner is known for known in self.modules):
            return
        known = {id(param) for other in self.modules for param in other.parameters()}
        own = [id(param) for param in inner.parameters()]
        if self.modules and own and all(param in known for param in own):
            return
        # A module of this model was seen first.
        self.modules = [other for other in self.modules if not any(module is other for module in inner.modules())]
        self.modules.append(inner)
        if self._dtype is not None and any(p.is_floating_point() and p.dtype != self._dtype for p in inner.parameters()):
            inner.to(self._dtype)

    def parameters(self) -> dict[str, Tensor]:
        """Return the parameters of all models by name."""
        named: dict[str, Tensor] = {}
        for prefix, model in self._named():
            params, _ = parameters_by_fqn(model)
            named.update({f"{prefix}{name}": param for name, param in params.items()})
        return named

    def buffers(self) -> dict[str, Tensor]:
        """Return the buffers of all models by name."""
        named: dict[str, Tensor] = {}
        for prefix, model in self._named():
            named.update({f"{prefix}{name}": buffer for name, buffer in buffers_by_fqn(model).items()})
        return named

    def ties(self) -> list[str]:
        """Return the tied parameters, as ``"head.weight = embed.weight"``."""
        return [
            f"{prefix}{name} = {prefix}{first}"
            for prefix, model in self._named()
            for name, first in parameters_by_fqn(model)[1].items()
        ]

    def name_of(self, module: nn.Module) -> str | None:
        """Return the name of a module of a known model; None for another module."""
        for prefix, model in self._named():
            for name, candidate in modules_by_fqn(model):
                if candidate is module:
                    return prefix + name
        return None

    def _named(self) -> Iterator[tuple[str, nn.Module]]:
        for number, model in enumerate(self.modules):
            yield (f"{type(model).__name__.removeprefix('FSDP')}." if number else ""), model
