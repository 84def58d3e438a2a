from contextlib import nullcontext

import pytest
import torch

import dtrain as dt
from draws import generator
from dtrain.errors import ConfigError
from dtrain.losses import soft_cross_entropy
from dtrain.transforms.batches.batch_transform import as_probabilities, mix_rows
from dtrain.transforms.batches.mixup import cutmix_batch, label_smoothing, mixup, mixup_batch, smooth_labels


def batch(n: int = 6) -> dict[str, object]:
    return {"x": torch.randn(n, 2, 3, generator=generator(9)), "y": torch.arange(n) % 3, "names": [str(i) for i in range(n)]}


SWAP = torch.tensor([1, 0])
HALF = torch.tensor([[0.5, 0.5, 0.0, 0.0]])


def test_mixup_batch_mixes_inputs_and_targets_equally():
    given = {"x": torch.tensor([[1.0, 0.0], [5.0, 4.0]]), "y": torch.tensor([0, 2])}
    made = mixup_batch(given, num_classes=3, coefficient=0.75, order=SWAP)
    assert made["x"].tolist() == [[2.0, 1.0], [4.0, 3.0]]
    assert made["y"].tolist() == [[0.75, 0.0, 0.25], [0.25, 0.0, 0.75]]


def test_mixup_batch_accepts_a_coefficient_per_sample():
    given = {"x": torch.tensor([0.0, 8.0]), "y": torch.tensor([[1.0, 0.0], [0.0, 1.0]])}
    made = mixup_batch(given, coefficient=torch.tensor([0.75, 0.5]), order=SWAP)
    assert made["x"].tolist() == [2.0, 4.0]
    assert made["y"].tolist() == [[0.75, 0.25], [0.5, 0.5]]


def test_soft_cross_entropy_of_mixed_targets_is_the_mixed_loss():
    logits, first, second = torch.randn(4, 3), torch.tensor([0, 1, 2, 1]), torch.tensor([1, 1, 0, 2])
    mixed = mix_rows(torch.nn.functional.one_hot(torch.stack([first, second]), 3).float(), SWAP, 0.7)[0]
    both = [soft_cross_entropy(logits, target).total for target in (first, second)]
    torch.testing.assert_close(soft_cross_entropy(logits, mixed).total, 0.7 * both[0] + 0.3 * both[1])


def test_mixup_batch_mixes_regression_targets():
    made = mixup_batch(
        (torch.tensor([0.0, 8.0]), torch.tensor([2.0, 4.0])), input_key=0, target_key=1, coefficient=0.5, order=SWAP
    )
    assert isinstance(made, tuple)
    assert made[1].tolist() == [3.0, 3.0]


def test_mixup_batch_keeps_the_fraction_beside_an_ignored_target():
    given = {"x": torch.zeros(2), "y": torch.tensor([-100, 1])}
    made = mixup_batch(given, num_classes=2, coefficient=0.75, order=SWAP)
    assert made["y"].tolist() == [[0.0, 0.25], [0.0, 0.75]]


@pytest.mark.parametrize("alpha", [0.05, 0.2, 1.0, 4.0])
def test_mixup_batch_coefficients_have_a_beta_distribution(alpha):
    n = 20000
    made = mixup_batch({"x": torch.eye(2)[torch.arange(n) % 2], "y": torch.zeros(n, 1)}, alpha=alpha, per_sample=True,
                       generator=generator(), order=torch.arange(n).view(-1, 2).flip(1).flatten())  # fmt: skip
    kept = torch.where(torch.arange(n) % 2 == 0, made["x"][:, 0], made["x"][:, 1])
    assert kept.mean().item() == pytest.approx(0.5, abs=0.015)  # five standard errors at the widest
    assert kept.var().item() == pytest.approx(0.25 / (2 * alpha + 1), rel=0.05)


def test_mixup_batch_with_alpha_zero_changes_nothing():
    given = batch()
    made = mixup_batch(given, num_classes=3, alpha=0, generator=generator())
    assert torch.equal(made["x"], given["x"])
    assert torch.equal(made["y"].argmax(-1), given["y"])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_mixup_batch_keeps_the_dtype(dtype):
    made = mixup_batch({"x": torch.ones(4, 2, dtype=dtype), "y": torch.arange(4)}, num_classes=4, generator=generator())
    assert made["x"].dtype == dtype
    assert made["y"].dtype == torch.promote_types(dtype, torch.float32)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = torch.nn.Linear(2, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(x)


def seen_by(*transforms: dt.Transform, given: dict, steps: int = 1) -> list[dict]:
    """The batches that reach the loss."""
    seen: list[dict] = []

    def loss(model, batch):
        seen.append(batch)
        return soft_cross_entropy(model(batch["x"]), batch["y"])

    model = Net()
    step = dt.compose_step(loss, list(transforms))
    state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(steps):
        state, _ = step(state, given)
    return seen


def test_label_smoothing_after_mixup_smooths_mixed_targets():
    given = {"x": torch.tensor([[1.0, 0.0], [5.0, 4.0]]), "y": torch.tensor([0, 2])}
    (seen,) = seen_by(mixup(5.0, num_classes=3), label_smoothing(0.3), given=given)
    share = (seen["x"][:, 0] - 1.0) / 4.0  # how much each has of the second sample
    expected = torch.stack([1 - share, torch.zeros(2), share], dim=1) * 0.7 + 0.1
    torch.testing.assert_close(seen["y"], expected)
    by_hand = mixup_batch(given, num_classes=3, coefficient=0.75, order=SWAP)["y"] * 0.7 + 0.1
    assert by_hand[0].tolist() == pytest.approx([0.625, 0.1, 0.275])


def test_mixup_reads_alpha_at_the_clock_of_the_step():
    given = {"x": torch.randn(8, 2, generator=generator()), "y": torch.arange(8) % 3}
    mixed = mixup(lambda step: float(step == 1), num_classes=3)
    before, now, after = seen_by(mixed, given=given, steps=3)
    assert [torch.equal(batch["x"], given["x"]) for batch in (before, now, after)] == [True, False, True]


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (torch.tensor([1]), [[0.1, 0.7, 0.1, 0.1]]),
        (torch.tensor([[1.0, 0.0, 0.0, 0.0]]), [[0.7, 0.1, 0.1, 0.1]]),
        (HALF, [[0.4, 0.4, 0.1, 0.1]]),
        (HALF / 2, [[0.2, 0.2, 0.05, 0.05]]),
        (torch.tensor([-100]), [[0.0, 0.0, 0.0, 0.0]]),
        (torch.zeros(1, 4), [[0.0, 0.0, 0.0, 0.0]]),
        (torch.tensor([[3], [-100]]), [[[0.1, 0.1, 0.1, 0.7]], [[0.0] * 4]]),
    ],
    ids=["index", "one-hot", "soft", "of half the weight", "ignored", "left out", "of more axes"],
)
def test_smooth_labels_spreads_a_fraction_over_all_classes(targets, expected):
    torch.testing.assert_close(smooth_labels(targets, 0.4, num_classes=4), torch.tensor(expected))


def test_smooth_labels_equals_smoothing_inside_the_loss():
    logits, targets = torch.randn(5, 4), torch.tensor([0, 3, -100, 1, 1])
    inside, outside = (
        soft_cross_entropy(logits, targets, smoothing=0.1),
        soft_cross_entropy(logits, smooth_labels(targets, 0.1, num_classes=4)),
    )
    torch.testing.assert_close(outside.total, inside.total)
    assert float(outside.weight) == pytest.approx(4.0)


def test_smooth_labels_with_zero_changes_nothing():
    given = torch.rand(3, 4)
    assert torch.equal(smooth_labels(given, 0.0), given)


def test_as_probabilities_returns_probabilities_unchanged():
    given = torch.rand(3, 4)
    assert as_probabilities(given) is given


def test_as_probabilities_ignores_ignore_index_and_refuses_wrong_indices():
    assert as_probabilities(torch.tensor([0, 1]), 2, ignore_index=0).tolist() == [[0.0, 0.0], [0.0, 1.0]]
    with pytest.raises(RuntimeError, match="out of bounds"):
        as_probabilities(torch.tensor([2]), 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32])
def test_label_smoothing_refuses_regression_targets(dtype):
    """Numbers of a regression, one each: smoothing would take the batch for the classes."""
    model = torch.nn.Linear(1, 1)
    step = dt.compose_step(dt.mean_loss(lambda model, batch: model(batch["x"]).sum(), weight=len), [label_smoothing(0.1)])
    state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ConfigError, match=r"label_smoothing: .*class indices \(int64\) or probabilities .*, got torch\."):
        step(state, {"x": torch.ones(4, 1), "y": torch.zeros(4, dtype=dtype)})


BINARY = r"at least two classes, got torch\.float32 of shape .*on_batch: y \* \(1 - s\) \+ s / 2"


def test_label_smoothing_refuses_binary_targets():
    with pytest.raises(ConfigError, match=BINARY):
        seen_by(label_smoothing(0.2), given={"x": torch.ones(4, 2), "y": torch.ones(4, 1)})


def test_label_smoothing_of_zero_takes_binary_targets():
    model = torch.nn.Linear(2, 1)
    loss = dt.mean_loss(lambda model, batch: (model(batch["x"]) - batch["y"]).square().mean(), weight=lambda batch: 4)
    step = dt.compose_step(loss, [label_smoothing(0.0)])
    state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert step(state, {"x": torch.ones(4, 2), "y": torch.ones(4, 1)})[0].step == 1


@pytest.mark.parametrize("method", [label_smoothing(0.1, num_classes=3), mixup(num_classes=3)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_probabilities_of_indices_have_the_precision_of_the_inputs(method, dtype):
    seen: list[torch.dtype] = []

    def loss(model, batch):
        seen.append(batch["y"].dtype)
        return soft_cross_entropy(model(batch["x"].float()), batch["y"])

    step = dt.compose_step(loss, [method])
    model = torch.nn.Linear(2, 3)
    state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1))
    step(state, {"x": torch.ones(4, 2, dtype=dtype), "y": torch.arange(4) % 3})
    assert seen == [torch.float64 if dtype == torch.float64 else torch.float32]


def test_label_smoothing_needs_no_inputs_at_the_usual_keys():
    seen: list[torch.Tensor] = []

    def loss(model, batch):
        seen.append(batch["label"])
        return soft_cross_entropy(model(batch["a"]), batch["label"])

    step = dt.compose_step(loss, [label_smoothing(0.3, num_classes=3, target_key="label")])
    model = torch.nn.Linear(2, 3)
    step(step.init(model, torch.optim.SGD(model.parameters(), lr=0.1)), {"a": torch.ones(1, 2), "label": torch.tensor([0])})
    torch.testing.assert_close(seen[0], torch.tensor([[0.8, 0.1, 0.1]]))


def test_cutmix_probabilities_have_the_precision_of_the_images():
    images = torch.ones(2, 1, 2, 2, dtype=torch.float64)
    made = cutmix_batch({"x": images, "y": torch.tensor([0, 1])}, num_classes=2, box=(0, 0, 1, 1), order=SWAP)
    assert made["y"].dtype == torch.float64


REFUSED = {
    "no order": (lambda: mixup_batch(batch(), num_classes=3, coefficient=0.5), r"mixup: generator must be given"),
    "no classes": (
        lambda: mixup_batch(batch(), generator=generator()),
        r"mixup: num_classes must be given for class indices, got None\. Give num_classes=",
    ),
    "negative": (lambda: mixup(-0.1), r"mixup: alpha must be in \[0, inf\), got -0\.1\."),
    "text": (lambda: mixup("0.1"), r"mixup: alpha must be a finite number or a schedule"),
    "classes": (lambda: mixup(num_classes=0), r"mixup: num_classes must be an integer of at least 1, got 0"),
    "other classes": (
        lambda: mixup_batch({"x": torch.zeros(2), "y": torch.zeros(2, 4)}, num_classes=3, generator=generator()),
        r"mixup: targets must be \[\*, 3\], got shape \(2, 4\)",
    ),
    "integers": (
        lambda: mixup_batch({"x": torch.zeros(2, dtype=torch.uint8), "y": torch.zeros(2, 1)}, generator=generator()),
        r"mixup: inputs must be floating-point, got torch.uint8 at 'x'",
    ),
    "indices of another dtype": (
        lambda: mixup_batch(
            {"x": torch.zeros(2), "y": torch.zeros(2, dtype=torch.int32)}, num_classes=2, generator=generator()
        ),
        r"mixup: targets must be class indices \(int64\) or probabilities \(float\), got torch.int32",
    ),
    "no key": (
        lambda: mixup_batch({"image": torch.zeros(2)}, generator=generator()),
        r"mixup: input_key must be given for a batch without exactly one of 'x' or 'input_ids', got a batch with \['image'\]",
    ),
    "two keys": (
        lambda: mixup_batch({"x": torch.zeros(2), "y": torch.zeros(2), "labels": torch.zeros(2)}, generator=generator()),
        r"mixup: target_key must be given for a batch without exactly one of 'y' or 'labels', got a batch with \['labels', 'x'",
    ),
    "another key": (
        lambda: mixup_batch(batch(), input_key="image", generator=generator()),
        r"mixup: the batch must have 'image', got \['names', 'x', 'y'\]\. Give another key\.",
    ),
    "no place": (
        lambda: mixup_batch((torch.zeros(2),), input_key=0, target_key=1, generator=generator()),
        "the batch must have 1, got a tuple",
    ),
    "no tensor": (
        lambda: mixup_batch({"x": [1.0], "y": [1]}, generator=generator()),
        r"the value at 'x' must be a tensor, got a list",
    ),
    "label_smoothing: smoothing": (lambda: label_smoothing(1.1), r"label_smoothing: smoothing must be in \[0, 1\], got 1\.1"),
    "label_smoothing: numbers": (lambda: smooth_labels(torch.ones(4)), BINARY),
    "label_smoothing: one class": (lambda: smooth_labels(torch.ones(4, 1)), BINARY),
    "label_smoothing: one class, given": (lambda: smooth_labels(torch.ones(4, 1), num_classes=1), BINARY),
    "label_smoothing: no classes": (
        lambda: smooth_labels(torch.tensor([1])),
        r"label_smoothing: num_classes must be given for class indices, got None\. Give num_classes=",
    ),
    "label_smoothing: other classes": (
        lambda: smooth_labels(HALF, num_classes=3),
        r"label_smoothing: targets must be \[\*, 3\], got shape \(1, 4\)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_arguments_are_refused(name):
    make, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        make()


def test_mixup_refuses_a_negative_scheduled_alpha_in_the_step():
    given = {"x": torch.zeros(2, 2), "y": torch.tensor([0, 1])}
    with pytest.raises(ConfigError, match=r"mixup: alpha must be in \[0, inf\), got -1\.0 from its schedule at step 0\."):
        seen_by(mixup(lambda step: -1.0, num_classes=3), given=given)


def trained(auto_first: bool, budget: int | None, sharded: bool) -> list[float]:
    """Parameters after two steps of mixup, with the automatic size before or behind it."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.ReLU(), torch.nn.Linear(64, 3))
    model = dt.shard_model(model, dt.build_mesh(), strategy="full_shard") if sharded else model
    methods = [mixup(0.5, num_classes=3), dt.auto_microbatch(initial_size=None if budget else 5)]
    step = dt.compose_step(lambda m, b: dt.soft_cross_entropy(m(b["x"]), b["y"]), methods[::-1] if auto_first else methods)
    state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1), allow_equal_batches=True)
    with dt.testing.memory_budget(budget) if budget else nullcontext():
        for seed in range(2):
            x = torch.randn(64, 4, generator=generator(seed))
            state, _ = step(state, {"x": x, "y": torch.arange(64) % 3})
    return torch.cat([param.flatten() for _, param in dt.full_params(state)]).tolist()


@pytest.mark.parametrize("budget", [None, 40_000], ids=["initial", "search"])
def test_mixup_behind_auto_microbatch_trains_the_same(budget):
    assert trained(True, budget, False) == pytest.approx(trained(False, budget, False), abs=1e-6)


def test_mixup_behind_auto_microbatch_trains_the_same_on_ranks(ranks):
    assert ranks(2).run(trained, True, None, True) == ranks(2).run(trained, False, None, True)
