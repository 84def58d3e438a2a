"""Observe the steps of a loop by hand (``PlainLoop``): forwards, backwards and updates outside of dtrain's step."""

from __future__ import annotations

import functools
import sys
from types import FrameType
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from dtrain.data.batch import list_tensors
from dtrain.prove.recording import RankRecorder, StepFacts, UpdateObserver
from dtrain.prove.run_log import column_hashes, count_items, count_samples, sample_hashes
from dtrain.prove.script_values import script_line


class PlainLoop(UpdateObserver):
    """Steps of a loop by hand: a step is everything between two updates of an optimizer.

    Args:
        recorder: recorder of this rank.

    Mutates: torch's hooks of all optimizers.
    """

    def __init__(self, recorder: RankRecorder) -> None:
        self._recorder = recorder
        self._number: int | None = None
        self._batch: Any = None
        # Loaders since the last forward with gradient, the last batch last; True if a forward without gradient came after it.
        self._evaluated: dict[int, bool] = {}
        self._of_step: set[int] = set()
        self._training_loaders: set[int] = set()
        # Backwards of the last update. Recomputation repeats forwards.
        self.microbatches = 1
        # Models whose parameters are theirs again once the forward has ended.
        self.functional: list[nn.Module] = []
        register_optimizer_step_pre_hook(self._update_begins)
        register_optimizer_step_post_hook(self._update_ends)

    def forward(self, inputs: list[Tensor]) -> None:
        """Observe a forward with gradient of a whole model."""
        recorder = self._recorder
        if not recorder.facts.forwards:
            recorder.stop_if_done()
            recorder.flush_evaluation()
            recorder.facts.rng = recorder.rng_digest()
            recorder.slope.shift_(recorder.models)
        # A teacher may run before the model.
        unused = [loader for loader, was_evaluated in self._evaluated.items() if not was_evaluated]
        self._of_step.update(unused or list(self._evaluated)[-1:])
        self._evaluated = {}
        facts = recorder.facts
        facts.forwards += 1
        # A model may get a part of each sample that depends on the padding, such as all tokens but the last.
        is_whole = bool(inputs) and count_samples(self._batch) == count_samples(inputs)
        facts.add_batch(self._batch if is_whole else inputs)
        facts.columns += column_hashes(self._batch if is_whole else inputs)
        facts.counts.append(count_items(self._batch if is_whole else inputs))
        # A rank may compute a part of each sequence.
        if is_whole and inputs[0].shape not in {tensor.shape for tensor in list_tensors(self._batch)}:
            facts.parts += sample_hashes(inputs)
        facts.shapes += [list(tensor.shape[1:]) for tensor in inputs[:1]]
        if self._number is not None:
            facts.epochs.append(self._number)

    def backward(self, loss: Tensor) -> None:
        """Observe a backward."""
        facts = self._recorder.facts
        self._recorder.keep_averages()
        facts.backwards += 1
        facts.lines["backward"] = script_line(self._recorder.config.script)
        if loss.numel() == 1:
            facts.losses.append((float(loss.detach()), None))

    def batch_loaded(self, loader: int, number: int, batch: Any) -> None:
        """Observe a batch of a loader of torch, in its pass ``number``."""
        self._evaluated.pop(loader, None)
        self._evaluated[loader] = False
        self._number, self._batch = number, batch

    def evaluates(self) -> None:
        """Observe a forward without gradient, as of an evaluation."""
        self._evaluated = dict.fromkeys(self._evaluated, True)

    def is_over(self, loader: int) -> bool:
        """Return True if a loader of training batches must end, because the run has all its steps."""
        if self._recorder.steps_of_dtrain:
            return False
        return loader in self._training_loaders and self._recorder.updates_done() >= self._recorder.config.steps

    def _update_begins(self, optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        recorder = self._recorder
        if _is_update_of_torch():
            return None
        recorder.write_later_changes()
        recorder.note("update_by_hand", optimizer=type(optimizer).__name__)
        if recorder.steps_of_dtrain:
            return None
        optimizer_index = recorder.log.optimizer_index = recorder.index_of(optimizer)
        recorder.log.step = recorder.updates.setdefault(optimizer_index, recorder.config.first_step)
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._write_update(optimizer)
            return None
        is_first = True

        @functools.wraps(closure)
        def observed() -> Any:
            nonlocal is_first
            loss = closure()
            if is_first:
                self._write_update(optimizer)
            is_first = False
            return loss

        # The forwards of the step run in the closure, the first one before the parameters change.
        return (args[0], observed, *args[2:]), {name: value for name, value in kwargs.items() if name != "closure"}

    def _write_update(self, optimizer: Any) -> None:
        recorder = self._recorder
        for module in self.functional:
            recorder.models.add(module)
        self.functional.clear()
        self._training_loaders |= self._of_step
        recorder.facts.loaders = sorted(self._of_step)
        self._of_step = set()
        self.microbatches = recorder.facts.backwards
        if recorder.records_updates():
            recorder.write_early_averages(optimizer)
            recorder.write_initial(optimizer)
            recorder.write_step(optimizer)
            recorder.write_gradients(optimizer)
        recorder.facts = StepFacts()

    def _update_ends(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        recorder = self._recorder
        if recorder.steps_of_dtrain or _is_update_of_torch():
            return
        # Further forwards of a closure are not those of the next update.
        recorder.facts = StepFacts()
        optimizer_index = recorder.log.optimizer_index = recorder.index_of(optimizer)
        if recorder.records_updates():
            recorder.write_parameters()
        recorder.update_ends(recorder.updates[optimizer_index] + 1)


def _is_update_of_torch() -> bool:
    """Return True in a step that the script did not ask for.

    ``ZeroRedundancyOptimizer`` runs another optimizer in its own step, and ``get_state_dict`` makes a state by a step without
    gradients.
    """
    frame: FrameType | None = sys._getframe(1)
    steps = 0
    while frame is not None and steps < 2:
        module = frame.f_globals.get("__name__")
        steps += module == "torch.optim.optimizer" and frame.f_code.co_name == "wrapper"
        steps += 2 * (module == "torch.distributed.checkpoint.state_dict")
        frame = frame.f_back
    return steps > 1
