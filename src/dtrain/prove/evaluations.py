"""Record the evaluations of a run, the weights that they ran, and the exported weights (``Evaluations``)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from dtrain.fqn import parameters_by_fqn
from dtrain.prove.export_check import ExportCheck
from dtrain.prove.run_config import RunConfig
from dtrain.prove.run_log import RunLog, sample_hashes


class Evaluations:
    """Forwards without gradient outside of steps, and exports.

    Args:
        config: the run.
        log: files of the rank.
        note: writes a fact about the whole run, once.
    """

    def __init__(self, config: RunConfig, log: RunLog, note: Callable[..., None]) -> None:
        self._config, self._log, self._note = config, log, note
        self._batches: list[list[str]] = []
        self._weights_written = False
        self.exports = ExportCheck() if config.check_exports else None

    def add(self, batch: Any) -> bool:
        """Add the samples of a forward. Returns True for the first forward since the last step."""
        self._batches.append(sample_hashes(batch))
        return len(self._batches) == 1

    def write_weights(self, model: nn.Module, step: int) -> None:
        """Write the weights of an evaluation that begins. On several ranks the gather would need the same forward on all."""
        if self._weights_written or self._config.ranks > 1:
            return
        self._weights_written = True
        for name, param in parameters_by_fqn(model)[0].items():
            self._log.write_tensor("evaluated_weight", name, param, step=step)
        if self.exports is not None:
            self.exports.evaluation_begins(model, step)

    def number_shown(self) -> None:
        """Observe that the script shows numbers, on some of its ranks: the next evaluation may run other weights."""
        self._weights_written = False

    def flush(self, step: int, part: int) -> None:
        """Write the evaluations since the last step. All ranks call this at the same place."""
        if self._batches:
            self._log.write("evaluation", step=step, part=part, batches=self._batches)
            self._batches = []
        self._weights_written = False

    def exported(self, path: str, tensors: Iterable[tuple[str, Tensor]], step: int) -> None:
        """Write the tensors of a file that other programs will read, after the file is written."""
        for name, tensor in tensors:
            self._log.write_tensor("exported", name, tensor, step=step, path=path)
        if self.exports is None:
            return
        result, problem = None, ""
        try:
            result = self.exports.check(path, step)
        except Exception as error:  # noqa: BLE001 - the script does not run the model this way
            problem = f"{type(error).__name__}: {error}"[:300]
        if result is None:
            self._note("export_not_run", path=os.path.basename(path), error=problem)
        else:
            self._log.write("export_check", step=step, **result)
