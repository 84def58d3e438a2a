"""Sequence-length warm-up: the lengths, and the changed batches."""

from functools import partial

import pytest
import torch
from torch import nn

import dtrain as dt
from dtrain.errors import ConfigError
from dtrain.schedules.clock import Clock
from dtrain.schedules.durations import Duration, RunLength
from dtrain.schedules.hyperparameters import with_unit
from dtrain.transforms.batches.sequence_length_warmup import length_ramp, sequence_length_warmup, shorten_batch

IDS = torch.tensor([[1, 2, 3, 4, 5, 9], [6, 7, 8, 9, 0, 0]])
MASK = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])


def test_shorten_batch_truncates_every_sequence_tensor():
    pairs = torch.arange(72).view(2, 1, 6, 6)
    batch = {"input_ids": IDS, "attention_mask": pairs, "features": torch.zeros(2, 6, 3), "label": torch.ones(2), "name": "a"}
    cut = shorten_batch(batch, 4)
    assert cut["input_ids"].tolist() == [[1, 2, 3, 4], [6, 7, 8, 9]]
    assert cut["attention_mask"].equal(pairs[:, :, :4, :4])
    assert {key: tuple(cut[key].shape) for key in ("features", "label")} == {"features": (2, 4, 3), "label": (2,)}
    assert cut["name"] == "a"
    assert batch["input_ids"].shape == (2, 6)
    assert all(cut[key].is_contiguous() for key in ("input_ids", "attention_mask", "features"))


def test_shorten_batch_returns_a_short_batch_unchanged():
    batch = {"input_ids": IDS}
    assert shorten_batch(batch, 6) is batch
    assert shorten_batch(batch, 7) is batch


@pytest.mark.parametrize(
    ("length", "ids", "labels"),
    [
        (3, [[1, 2, 9], [6, 7, 9]], [[10, 20, 90], [60, 70, 90]]),
        (5, [[1, 2, 3, 4, 9], [6, 7, 8, 9, 0]], [[10, 20, 30, 40, 90], [60, 70, 80, 90, 0]]),
        (1, [[9], [9]], [[90], [90]]),
    ],
)
def test_keep_end_moves_the_last_token_to_the_cut(length, ids, labels):
    cut = shorten_batch({"input_ids": IDS, "attention_mask": MASK, "labels": 10 * IDS}, length, keep_end=True)
    assert (cut["input_ids"].tolist(), cut["labels"].tolist()) == (ids, labels)
    assert cut["attention_mask"].tolist() == [[1] * length, [1] * min(length, 4) + [0] * (length - 4)]


def test_keep_end_without_a_mask_takes_the_last_position():
    pairs = torch.arange(36).view(1, 1, 6, 6)
    cut = shorten_batch({"input_ids": IDS[:1], "pairs": pairs}, 3, keep_end=True)
    assert cut["input_ids"].tolist() == [[1, 2, 9]]
    assert cut["pairs"].tolist() == [[[[0, 1, 5], [6, 7, 11], [30, 31, 35]]]]


def test_pieces_keep_all_tokens_except_the_remainder():
    pairs = torch.arange(72).view(2, 1, 6, 6)
    cut = shorten_batch({"input_ids": IDS, "pairs": pairs, "features": IDS.unsqueeze(-1)}, 2, truncate=False)
    assert cut["input_ids"].tolist() == [[1, 2], [3, 4], [5, 9], [6, 7], [8, 9], [0, 0]]
    assert cut["features"].squeeze(-1).equal(cut["input_ids"])
    assert cut["pairs"].shape == (6, 1, 2, 2)
    assert cut["pairs"][1].tolist() == [[[14, 15], [20, 21]]]
    rest = shorten_batch({"input_ids": IDS}, 4, truncate=False)
    assert rest["input_ids"].tolist() == [[1, 2, 3, 4], [6, 7, 8, 9]]


def test_axes_select_the_sequence_axes():
    batch = {"input_ids": IDS, "scores": torch.zeros(2, 3, 6), "square": torch.zeros(2, 6)}
    cut = shorten_batch(batch, 2, axes={"scores": (2,), "square": ()})
    assert {key: tuple(tensor.shape) for key, tensor in cut.items()} == {
        "input_ids": (2, 2),
        "scores": (2, 3, 2),
        "square": (2, 6),
    }


def test_masks_of_pairs_and_keys_are_cut_along_the_keys():
    pairs = torch.ones(6, 6, dtype=torch.bool).tril().expand(2, 6, 6)
    batch = {"input_ids": IDS, "pairs": pairs, "keys": torch.arange(12).view(2, 1, 1, 6), "features": torch.ones(2, 6, 6)}
    cut = shorten_batch(batch, 3)
    assert {key: list(value.shape[1:]) for key, value in cut.items()} == {
        "input_ids": [3],
        "pairs": [3, 3],
        "keys": [1, 1, 3],
        "features": [3, 6],
    }
    assert torch.equal(cut["pairs"][1], torch.ones(3, 3, dtype=torch.bool).tril())
    pieces = shorten_batch(batch, 3, truncate=False)
    assert pieces["keys"].flatten(1).tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    assert pieces["pairs"].shape == (4, 3, 3)


def test_shorten_batch_cuts_an_empty_batch():
    cut = shorten_batch({"input_ids": IDS[:0], "attention_mask": MASK[:0]}, 2, keep_end=True)
    assert cut["input_ids"].shape == cut["attention_mask"].shape == (0, 2)


def test_shorten_batch_keeps_a_tensordict():
    tensordict = pytest.importorskip("tensordict")
    cut = shorten_batch(tensordict.TensorDict({"input_ids": IDS}, batch_size=[2]), 2, truncate=False)
    assert isinstance(cut, tensordict.TensorDict)
    assert cut.batch_size == (6,)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: shorten_batch({"input_ids": IDS}, 0),
            "sequence_length_warmup: length must be an integer of at least 1, got 0",
        ),
        (lambda: shorten_batch({"input_ids": IDS}, 2.0), "at least 1, got 2.0"),
        (lambda: shorten_batch(IDS, 2), "sequence_length_warmup: batch must be a mapping of tensors, got a Tensor"),
        (
            lambda: shorten_batch({"ids": IDS}, 2),
            r"input_key must be given for a batch without exactly one of 'x' or 'input_ids', got a batch with \['ids'\]",
        ),
        (
            lambda: shorten_batch({"input_ids": IDS}, 2, axes={"t": (1,)}),
            r"keys of axes must be in the batch \['input_ids'\], got 't'",
        ),
        (
            lambda: shorten_batch({"input_ids": IDS, "t": IDS[:, :3]}, 2, axes={"t": (1,)}),
            r"the axes of 't' must have the length 6, got \(1,\) of \[2, 3\]\. Give one or two",
        ),
        (
            lambda: shorten_batch({"input_ids": IDS, "t": IDS}, 2, axes={"t": 1}),
            r"the axes of 't' must have the length 6, got 1 of \[2, 6\]\. Give one or two .* as in \(1,\)",
        ),
        (
            lambda: shorten_batch({"input_ids": IDS, "t": ["a", "b"]}, 2, axes={"t": (1,)}),
            r"the axes of 't' must have the length 6, got \(1,\) of a list",
        ),
        (
            lambda: shorten_batch({"input_ids": IDS}, 2, axes={"input_ids": (5,)}),
            r"the axes of 'input_ids' must be sequence axes, got \(5,\) of \[2, 6\]",
        ),
        (lambda: shorten_batch({"input_ids": IDS}, 2, axes={"input_ids": ()}), r"must be sequence axes, got \(\)"),
        (
            lambda: shorten_batch({"input_ids": IDS, "attention_mask": torch.ones(2, 1, 1, 6)}, 2, keep_end=True),
            r"the mask at mask_key='attention_mask' must be \[batch, seq\] with keep_end, got \[2, 1, 1, 6\]",
        ),
        (
            lambda: shorten_batch({"input_ids": IDS, "position_ids": torch.arange(6)[None]}, 2, truncate=False),
            r"'position_ids' must have 2 samples with truncate=False, got \[1, 6\]",
        ),
        (
            lambda: shorten_batch({"input_ids": IDS, "names": ["a", "b"]}, 2, truncate=False),
            r"'names' must have a sequence axis with truncate=False, got \[2\]",
        ),
        (
            lambda: shorten_batch({"input_ids": IDS}, 2, truncate=False, keep_end=True),
            "sequence_length_warmup: keep_end must be False with truncate=False",
        ),
        (
            lambda: shorten_batch({"input_ids": IDS, "label": torch.ones(2)}, 2, truncate=False),
            r"'label' must have a sequence axis with truncate=False, got \[2\]\. Use truncate=True",
        ),
        (lambda: sequence_length_warmup(truncate=False, keep_end=True), "sequence_length_warmup: keep_end must be False with"),
        (
            lambda: sequence_length_warmup(initial_length=9, max_length=8),
            "max_length must be an integer of at least 9, got 8",
        ),
        (lambda: sequence_length_warmup(step_size=0), "step_size must be an integer of at least 1, got 0"),
        (lambda: sequence_length_warmup(max_length=64.0), "max_length must be an integer of at least 8, got 64.0"),
        (lambda: sequence_length_warmup(end="3"), "duration: cannot read '3'"),
        (
            lambda: sequence_length_warmup(8),
            r"length must be a function of the step, got 8\. For a fixed length use max_length=",
        ),
    ],
)
def test_invalid_arguments_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize(
    ("duration", "clocks", "lengths"),
    [
        (4, [Clock(step=step) for step in range(6)], [8, 8, 16, 16, 24, 24]),  # of 8, 12, 16, 20, 24, 24
        ("1e3tok", [Clock(tokens=n) for n in (0, 499, 500, 999, 1000)], [8, 8, 16, 16, 24]),
        (
            "2ep",
            [
                Clock(epoch=e, step_in_epoch=s, run_length=RunLength(steps_per_epoch=4))
                for e, s in ((0, 0), (0, 3), (1, 0), (2, 0))
            ],
            [8, 8, 16, 24],
        ),
        ("2ep", [Clock(epoch=e) for e in range(3)], [8, 16, 24]),
        ("0.5dur", [Clock(step=step, run_length=RunLength(total=16)) for step in (0, 4, 7, 8)], [8, 16, 16, 24]),
    ],
    ids=["steps", "tokens", "epochs and their steps", "epochs", "share"],
)
def test_length_ramp_follows_the_formula(duration, clocks, lengths):
    ramp = length_ramp(Duration.parse(duration), 8, 24, 8)
    assert [ramp(clock) for clock in clocks] == lengths


class Seen(nn.Module):
    """Remembers the shapes that it was given."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 2)
        self.shapes = []

    def forward(self, ids):
        self.shapes.append(tuple(ids.shape))
        return self.table(ids)


def trained(transform, steps, **options):
    model = Seen()
    loss = dt.mean_loss(lambda net, batch: net(batch["input_ids"]).square().mean(), weight=lambda b: b["input_ids"].numel())
    spec = dt.batch_spec({"input_ids": "batch seq"})
    step = dt.compose_step(loss, [transform], grad=partial(dt.microbatch_step, batch_spec=spec, **options))
    state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1), run_length=RunLength(total=4))
    for _ in range(steps):
        state, _ = step(state, {"input_ids": torch.arange(24).view(3, 8) % 11})
    return model.shapes, state.clock


def test_clock_counts_the_shortened_batch():
    warmup = sequence_length_warmup(end="0.5dur", initial_length=2, max_length=8, step_size=1)
    shapes, clock = trained(warmup, 3, microbatch_size=2)
    assert shapes == [(2, 2), (1, 2), (2, 5), (1, 5), (2, 8), (1, 8)]
    assert (clock.samples, clock.tokens) == (9, 3 * (2 + 5 + 8))


def test_clock_counts_pieces_as_samples():
    shapes, clock = trained(sequence_length_warmup(lambda step: 3.9, truncate=False), 1, microbatch_size=4)
    assert shapes == [(4, 3), (2, 3)]
    assert (clock.samples, clock.tokens) == (6, 18)


def test_length_schedule_may_count_tokens():
    shapes, _ = trained(sequence_length_warmup(with_unit("tok", lambda tokens: 2 + tokens / 6)), 3)
    assert shapes == [(3, 2), (3, 3), (3, 4)]


def test_length_schedule_below_one_is_refused_in_the_step():
    with pytest.raises(
        ConfigError, match=r"length must be in \[1, inf\), got 0\.5 from its schedule at step 0 of a run of 4ba"
    ):
        trained(sequence_length_warmup(lambda step: 0.5), 1)


def test_fraction_of_a_run_of_unknown_length_is_refused_in_the_step():
    model = Seen()
    step = dt.compose_step(lambda net, batch: None, [sequence_length_warmup()])
    state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ConfigError, match="is a share of the run, whose length is not known"):
        step(state, {"input_ids": IDS})
