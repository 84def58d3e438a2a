"""What the ranks agree on in a step: one small record on the control group before it.

Counts come from the batch in host memory, so the clock is exact for ragged batches without a GPU sync, and all ranks
learn how many microbatches there are before the first collective of the step.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from dtrain.dist.collectives import all_gather_numbers
from dtrain.errors import StepError
from dtrain.types import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """The agreed record of a step: counts are summed over ranks, ``microbatches`` is the maximum, ``seconds`` rank 0's."""

    samples: int
    tokens: int
    microbatches: int
    end_of_epoch: bool
    seconds: float


@dataclass(slots=True)
class _Process:
    """What this process knows between two steps.

    ``epoch_ends`` and ``spare`` are posted by the loader with each batch that ``until`` hands out, and hold for as long as
    the loop is busy with it; ``last`` is when the last step was begun. They are facts of the process, like the process
    groups, and not of any one state: two states that train on one batch (a GAN's) see the same end of the epoch.
    """

    epoch_ends: bool = False
    spare: Batch | None = None
    last: float | None = None


_PROCESS = _Process()


def post_batch(*, epoch_ends: bool = False, spare: Batch | None = None) -> None:
    """Say of the batch that is about to be handed out whether it is the last of its epoch.

    Args:
        epoch_ends: whether it is. Without arguments: no batch of a loader is being worked on.
        spare: a real sample for a rank that has none in this batch.

    Mutates: this process's record for the next step.
    """
    _PROCESS.epoch_ends, _PROCESS.spare = epoch_ends, spare


def spare_sample() -> Batch | None:
    """The sample that the loader spared for this rank, None when it has none."""
    return _PROCESS.spare


def agree_before_step(*, samples: int, tokens: int, microbatches: int, weightless: bool) -> Tally:
    """The ranks' common record of the step about to run.

    Args:
        samples: local samples.
        tokens: local tokens, 0 where they are not counted.
        microbatches: how many this rank needs, 0 when it has no sample.
        weightless: this rank has seen that an earlier step had no weight anywhere (it learns so late on a GPU).

    Collective: one all-gather of six numbers on the control group.

    Raises:
        StepError: no rank has a sample, ranks disagree about the end of the epoch, or an earlier step had no weight; on all
            ranks.
    """
    now = time.monotonic()
    since = 0.0 if _PROCESS.last is None else now - _PROCESS.last
    _PROCESS.last = now
    rows = all_gather_numbers([samples, tokens, microbatches, _PROCESS.epoch_ends, weightless, since])
    columns = list(zip(*rows, strict=True))
    ends = set(columns[3])
    if len(ends) > 1:
        ranks = [rank for rank, row in enumerate(rows) if row[3]]
        raise StepError(f"step: only ranks {ranks} are at the end of their epoch; give all ranks one dataset and one seed")
    if any(columns[4]):
        raise StepError(
            "step: an earlier step had weight 0 on all ranks together, so its mean loss is undefined; look for masked batches"
        )
    if not any(columns[0]):
        raise StepError("step: no rank has a sample in this batch; stop the loop where the loader ends")
    return Tally(
        samples=int(sum(columns[0])),
        tokens=int(sum(columns[1])),
        microbatches=int(max(columns[2])),
        end_of_epoch=bool(ends.pop()),
        seconds=rows[0][5],
    )
