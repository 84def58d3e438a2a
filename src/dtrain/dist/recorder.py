"""Define the interface through which the primitives report to ``dtrain prove`` (``Recorder``).

A recorder is in ``DistContext.recorder`` only in the runs that ``dtrain prove`` starts. In every other run the field is None,
and a primitive pays one comparison.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class Recorder(Protocol):
    """Observer of one rank, which may also replace the strategy, the microbatch size and the length of the run.

    States, models and batches are of the rooms below, so they have no type here.
    """

    def sharding(self, model: Any, strategy: str, precision: Any, buffers: Any) -> tuple[str, Any]:
        """Return the strategy and the precision with which ``shard_model`` shards ``model``."""
        ...

    def run_starts(self, model: Any, optimizer: Any) -> None:
        """Observe the model and the optimizer of a new ``TrainState``, before the state is made."""
        ...

    def run_goal(self, loader: Any, goal: Any) -> Any:
        """Return the length to which ``loader.until`` runs instead of ``goal``."""
        ...

    def crosses(self, step: int) -> bool:
        """Return True if ``state.crossed`` is True after ``step``, so that a short run saves and evaluates, too."""
        ...

    def microbatch_size(self, size: int | None) -> int | None:
        """Return the microbatch size of a step instead of ``size``."""
        ...

    def loader_items(self, items: Any) -> Any:
        """Return the items of a loader, with batches in the dtype of the run."""
        ...

    def step_begins(self, state: Any, batch: Any) -> None:
        """Observe the batch of a step, before the transforms and the forward."""
        ...

    def forward_begins(self, batch: Any) -> None:
        """Observe the start of a forward of the step, or of ``evaluate``."""
        ...

    def forward_ends(self) -> None:
        """Observe the end of a forward that has no loss of its own."""
        ...

    def loss(self, loss: Any) -> None:
        """Observe the ``LossSum`` of a microbatch, at the end of its forward."""
        ...

    def update_begins(self, state: Any, params: Sequence[Any] | None = None) -> None:
        """Observe the gradients, right before the optimizer runs: of ``params`` if it runs on a part of the model."""
        ...

    def update_ends(self) -> None:
        """Continue after the optimizer has run."""
        ...

    def step_ends(self, state: Any) -> None:
        """Observe the state after a step."""
        ...

    def evaluation_batch(self, batch: Any) -> None:
        """Observe a batch of ``evaluate``, without padding batches."""
        ...

    def metrics(self, source: str, step: int | None, numbers: Mapping[str, Any]) -> None:
        """Observe numbers that a logger or ``reduce_metrics`` received or returned."""
        ...

    def sample_ids(self, epoch: int, indices: Sequence[int]) -> None:
        """Observe the indices of the samples that a loader reads for a batch."""
        ...

    def saved(self, step: int, path: str) -> None:
        """Observe the call of a save."""
        ...
