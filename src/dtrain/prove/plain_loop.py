"""Record a loop that does not use dtrain's step, through hooks of all optimizers (``PlainLoop``)."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from dtrain.prove.recording import RankRecorder, StepFacts, UpdateObserver
from dtrain.prove.run_log import count_samples, sample_hashes


class PlainLoop(UpdateObserver):
    """Steps of a loop by hand: a step is everything between two updates of an optimizer.

    Args:
        recorder: recorder of this rank.

    Mutates: torch's hooks of all optimizers.
    """

    def __init__(self, recorder: RankRecorder) -> None:
        self._recorder = recorder
        self._loaded: tuple[int, int] | None = None
        self._batch: Any = None
        self._training_loaders: set[int] = set()
        register_optimizer_step_pre_hook(self._update_begins)
        register_optimizer_step_post_hook(self._update_ends)

    def forward(self, inputs: list[Tensor]) -> None:
        """Observe a forward with gradient of a whole model."""
        recorder = self._recorder
        if not recorder.facts.forwards:
            recorder.stop_if_done(0)
            recorder.flush_evaluation()
            recorder.facts.rng = recorder.rng_digest()
        facts = recorder.facts
        facts.forwards += 1
        # A model may get a part of each sample that depends on the padding, such as all tokens but the last.
        is_whole = bool(inputs) and count_samples(self._batch) == count_samples(inputs)
        facts.samples += sample_hashes(self._batch if is_whole else inputs)
        facts.shapes += [list(tensor.shape[1:]) for tensor in inputs[:1]]
        if self._loaded is not None:
            facts.epochs.append(self._loaded[1])

    def backward(self, loss: Tensor) -> None:
        """Observe a backward."""
        facts = self._recorder.facts
        facts.backwards += 1
        if loss.numel() == 1:
            facts.losses.append((float(loss.detach()), None))

    def batch_loaded(self, loader: Any, number: int, batch: Any) -> None:
        """Observe a batch of a loader of torch, in its pass ``number``."""
        self._loaded, self._batch = (id(loader), number), batch

    def is_over(self, loader: Any) -> bool:
        """Return True if a loader of training batches must end, because the run has all its steps."""
        if self._recorder.steps_of_dtrain:
            return False
        return id(loader) in self._training_loaders and self._recorder.updates_done() >= self._recorder.config.steps

    def _update_begins(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        recorder = self._recorder
        recorder.note("update_by_hand", optimizer=type(optimizer).__name__)
        if recorder.steps_of_dtrain:
            return
        part = recorder.part = recorder.part_of(optimizer)
        recorder.step = recorder.updates.setdefault(part, recorder.config.first_step)
        if self._loaded is not None:
            self._training_loaders.add(self._loaded[0])
        if recorder.records_updates(part):
            recorder.write_initial(optimizer, part)
            recorder.write_step(optimizer)
            recorder.write_gradients(optimizer)
        recorder.facts = StepFacts()

    def _update_ends(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        recorder = self._recorder
        if recorder.steps_of_dtrain:
            return
        part = recorder.part_of(optimizer)
        if recorder.records_updates(part):
            recorder.write_parameters(part)
        recorder.updates[part] += 1
        recorder.step = recorder.updates[part]
