"""Rows: sequences."""

import torch

from battery.row import Points, Row
from dtrain.transforms.batches.sequence_length_warmup import sequence_length_warmup, shorten_batch
from dtrain.transforms.combinators import every


def _warmup_points() -> Points:
    """Tokens 0 to 7, of which pieces of three leave two over."""
    batch = {"input_ids": torch.arange(8).view(1, 8)}
    return [
        (shorten_batch(batch, 3)["input_ids"], torch.tensor([[0, 1, 2]])),
        (shorten_batch(batch, 3, keep_end=True)["input_ids"], torch.tensor([[0, 1, 7]])),
        (shorten_batch(batch, 3, truncate=False)["input_ids"], torch.tensor([[0, 1, 2], [3, 4, 5]])),
    ]


def _ramp(**options: object) -> dict[str, object]:
    return {"end": "5ba", "initial_length": 2, "max_length": 8, "step_size": 2, **options}


ROWS: dict[str, Row] = {
    "sequence_length_warmup": Row(
        make=lambda: sequence_length_warmup(**_ramp()),
        of=("sequence_length_warmup",),
        points=_warmup_points,
        task="text",
        reruns=True,
    ),
    "sequence_length_warmup-keep-end": Row(
        make=lambda: sequence_length_warmup(**_ramp(keep_end=True)), task="text", reruns=True
    ),
    "sequence_length_warmup-pieces": Row(
        make=lambda: sequence_length_warmup(**_ramp(end="0.8dur", truncate=False)),
        task="text",
        reruns=True,
        passes=4,  # one gradient, of four times the microbatches where sequences of 8 are cut into pieces of 2
    ),
    "sequence_length_warmup-scheduled": Row(
        make=lambda: sequence_length_warmup(lambda step: 3 + step), task="text", reruns=True
    ),
    "every-sequence_length_warmup": Row(make=lambda: every(2, sequence_length_warmup(**_ramp())), task="text", reruns=True),
}
