"""Record outputs of modules and their gradients in the first forward, or change the last bit of outputs (``ModuleOutputs``)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dtrain.data.batch import list_tensors
from dtrain.prove.run_config import RunConfig
from dtrain.prove.run_log import RunLog


class ModuleOutputs:
    """Outputs of the modules of a run's models.

    Args:
        config: the run. ``activations`` records the first forward; ``perturb`` changes the rounding of all forwards.
        log: files of the rank.
    """

    def __init__(self, config: RunConfig, log: RunLog) -> None:
        self._config, self._log = config, log
        self._generator = torch.Generator().manual_seed(config.perturb_seed)

    def after(self, module: nn.Module, name: str, output: Any, *, step: int, forwards: int) -> Any:
        """Return the output of a module, after a forward with gradient."""
        if self._config.perturb and not module._modules:
            output = self._perturbed(output)
        # Activation checkpointing repeats forwards in backward.
        in_backward = torch._C._current_graph_task_id() != -1
        if self._config.activations and step == self._config.first_step and forwards <= 1 and not in_backward:
            self._record(module, name, output, step)
        return output

    def _record(self, module: nn.Module, name: str, output: Any, step: int) -> None:
        own = next(module.parameters(recurse=False), None) is not None
        kind = type(module).__name__.removeprefix("FSDP")
        for tensor in list_tensors([output])[:1]:
            if tensor.is_floating_point():
                self._log.write_tensor("activation", name, tensor, step=step, kind_of=kind, own=own, leaf=not module._modules)
                if tensor.requires_grad:
                    tensor.register_hook(partial(self._log.write_tensor, "activation_gradient", name, step=step))

    def _perturbed(self, output: Any) -> Any:
        """Return ``output`` with one number in twelve changed by a unit in the last place, up or down, and so its gradient.

        The variance of these changes is that of a rounding: a twelfth of the square of the unit.
        """
        if isinstance(output, Tensor) and output.is_floating_point():
            draws = torch.randint(-12, 12, output.shape, generator=self._generator, dtype=torch.int8).to(output.device)
            units = (draws == 0).to(output.dtype) - (draws == -1).to(output.dtype)
            return output * (1 + torch.finfo(output.dtype).eps * units)
        if type(output) in (tuple, list):
            return type(output)(map(self._perturbed, output))
        return output
