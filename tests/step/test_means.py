"""A mean in a LossSum is refused in the first step where the batch proves it, and a sum never is."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dtrain as dt
from dtrain.errors import ConfigError

X, Y = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 0, 1, 2])
BATCH = {"x": X, "y": Y, "mask": torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0, 1.0])}


def cross_entropy(m, b, **options):
    return F.cross_entropy(m(b["x"]), b["y"], **options)


def squares(m, b):
    return m(b["x"]).square()


def zeros(b):
    return torch.zeros(len(b["x"]), 3)


def divided(m, b):
    count = b["mask"].sum()
    return -(squares(m, b).sum(1) * b["mask"]).sum() / count, count


def multiplied_before(m, b):
    count = b["mask"].sum()
    return (squares(m, b) * count).sum() / count, count


MEANS = {
    "cross entropy": lambda m, b: (cross_entropy(m, b), len(b["x"])),
    "of the model": lambda m, b: (cross_entropy(m, b).to(torch.float64), torch.tensor(len(b["x"]))),
    "smoothed weights": lambda m, b: (cross_entropy(m, b, weight=torch.ones(3)), float(len(b["x"]))),
    "mse": lambda m, b: (F.mse_loss(m(b["x"]), zeros(b)), len(b["x"])),
    "binary": lambda m, b: (F.binary_cross_entropy_with_logits(m(b["x"]), zeros(b)), 3 * len(b["x"])),
    "huber": lambda m, b: (F.huber_loss(m(b["x"]), zeros(b)), len(b["x"])),
    "l1": lambda m, b: (F.l1_loss(m(b["x"]), zeros(b)), len(b["x"])),
    "mean": lambda m, b: (squares(m, b).mean(), len(b["x"])),
    "over both axes": lambda m, b: (squares(m, b).mean((0, 1)), len(b["x"])),
    "per sample": lambda m, b: (squares(m, b).sum(1).mul(b["mask"]).mean(), len(b["x"])),
    "negative": lambda m, b: (-m(b["x"]).log_softmax(-1)[torch.arange(len(b["y"])), b["y"]].mean(), len(b["x"])),
    "two means": lambda m, b: (cross_entropy(m, b) + squares(m, b).mean(), len(b["x"])),
    "divided by the count": divided,
}
SUMS = {
    "cross entropy": lambda m, b: (cross_entropy(m, b, reduction="sum"), len(b["x"])),
    "sum": lambda m, b: (squares(m, b).sum(), len(b["x"])),
    "times the count": lambda m, b: (cross_entropy(m, b) * len(b["x"]), len(b["x"])),
    "times a tensor": lambda m, b: (cross_entropy(m, b) * b["mask"].sum(), b["mask"].sum()),
    "means of features": lambda m, b: (squares(m, b).mean(1).sum(), len(b["x"])),
    "features of sums": lambda m, b: (squares(m, b).sum(0).mean(), len(b["x"])),
    "mean of two heads": lambda m, b: (torch.stack([squares(m, b).sum(), m(b["x"]).abs().sum()]).mean(), len(b["x"])),
    "weight of one": lambda m, b: (cross_entropy(m, b), 1),
    "a temperature": lambda m, b: (squares(m, b).sum() / 2.0, len(b["x"])),
    "with a mean beside": lambda m, b: (cross_entropy(m, b, reduction="sum") + 0.01 * squares(m, b).mean(), len(b["x"])),
    "per sample": lambda m, b: (
        F.cross_entropy(m(b["x"]), b["y"], reduction="none").mul(b["mask"]).sum(),
        b["mask"].sum(),
    ),
}
# The graph ends in a mean, but the halves of the batch add up.
SUMS_BY_HALVES = {
    "mean of sums by a product": lambda m, b: ((torch.ones(1, len(b["x"])) @ squares(m, b)).mean(), len(b["x"])),
    "multiplied before": multiplied_before,
}


def step_with(loss, batch=BATCH):
    def loss_fn(model, batch):
        total, weight = loss(model, batch)
        return dt.LossSum(total=total, weight=weight)

    step = dt.compose_step(loss_fn)
    model = nn.Linear(4, 3)
    return step(step.init(model, torch.optim.SGD(model.parameters(), lr=0.1)), batch)


MESSAGE = r"microbatch_step: LossSum.total must be a sum, got a mean with the weight [46]|18\. .* times too small\. Return"


@pytest.mark.parametrize("name", MEANS)
def test_mean_total_in_a_loss_sum_raises_in_the_first_step(name):
    with pytest.raises(ConfigError, match=MESSAGE):
        step_with(MEANS[name])


@pytest.mark.parametrize("name", SUMS | SUMS_BY_HALVES)
def test_sum_total_in_a_loss_sum_does_not_warn(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step_with((SUMS | SUMS_BY_HALVES)[name])


def test_mean_of_one_sample_warns_because_no_half_decides():
    one = {name: value[:1] for name, value in BATCH.items()}
    with pytest.warns(UserWarning, match="LossSum.total must be a sum, got a mean with the weight 3"):
        step_with(lambda m, b: (squares(m, b).mean(), 3), one)


def test_mean_in_a_term_names_the_term():
    def loss_fn(model, batch):
        count = len(batch["x"])
        terms = {"size": (model(batch["x"]).square().mean(), count)}
        return dt.LossSum(total=cross_entropy(model, batch, reduction="sum"), weight=count, terms=terms)

    model = nn.Linear(4, 3)
    step = dt.compose_step(loss_fn, batch_spec=dt.batch_spec(weight=lambda b: {"loss": len(b["x"]), "size": len(b["x"])}))
    with pytest.raises(ConfigError, match=r"LossSum\.terms\['size'\] must be a sum"):
        step(step.init(model, torch.optim.SGD(model.parameters(), lr=0.1)), BATCH)


def test_halves_leave_the_batch_and_the_generators_as_they_are():
    sizes = []

    def loss(m, b):
        sizes.append(len(b["x"]))
        b["mask"].add_(torch.rand(()) + 1.0)
        return (torch.ones(1, len(b["x"])) @ squares(m, b)).mean(), len(b["x"])

    batch = {name: value.clone() for name, value in BATCH.items()}
    torch.manual_seed(1)
    nn.Linear(4, 3)  # step_with draws the same numbers
    added, following = torch.rand(()) + 1.0, torch.rand(())
    torch.manual_seed(1)
    step_with(loss, batch)
    assert sizes == [6, 6, 3, 3]
    assert torch.rand(()) == following
    torch.testing.assert_close(batch["mask"], BATCH["mask"] + added)


def answers(strategy):
    """Return the answer of this rank to each loss: an error, a warning, or nothing."""
    torch.manual_seed(0)
    mesh = dt.build_mesh()
    outcomes = {}
    for name, loss in (MEANS | {f"sum: {name}": loss for name, loss in (SUMS | SUMS_BY_HALVES).items()}).items():
        model = dt.shard_model(nn.Linear(4, 3), mesh, strategy=strategy)
        step = dt.compose_step(lambda m, b, loss=loss: dt.LossSum(**dict(zip(("total", "weight"), loss(m, b), strict=True))))
        state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1), allow_equal_batches=True)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                step(state, BATCH)
                warned = sum("must be a sum, got a mean" in str(warning.message) for warning in caught)
                outcomes[name] = f"{warned} warnings"
            except ConfigError as error:
                outcomes[name] = "raised" if "must be a sum, got a mean" in str(error) else str(error)
    return outcomes


def test_mean_total_raises_on_every_rank_where_the_halves_prove_it(ranks):
    for outcomes in ranks(2).run(answers, "replicate"):
        assert {name: outcomes[name] for name in MEANS} == dict.fromkeys(MEANS, "raised")
        assert all(answer == "0 warnings" for name, answer in outcomes.items() if name not in MEANS), outcomes


def test_mean_total_of_a_sharded_model_warns_on_rank_0_and_no_loss_raises(ranks):
    first, second = ranks(2).run(answers, "full_shard")
    assert {name: first[name] for name in MEANS} == dict.fromkeys(MEANS, "1 warnings")
    assert all(first[f"sum: {name}"] == "0 warnings" for name in SUMS)
    # The graph of these sums looks like that of a mean.
    assert all(first[f"sum: {name}"] == "1 warnings" for name in SUMS_BY_HALVES)
    assert set(second.values()) == {"0 warnings"}


def test_mean_loss_and_dtrain_losses_do_not_warn():
    for loss in (
        dt.mean_loss(lambda m, x: m(x).square().mean(), weight=len),
        lambda m, x: dt.soft_cross_entropy(m(x), Y, smoothing=0.1),
        lambda m, x: dt.cross_entropy(m(x)[None], Y[None]),
        lambda m, x: dt.transforms.jensen_shannon([m(x), m(-x)]),
    ):
        step = dt.compose_step(loss)
        model = nn.Linear(4, 3)
        step(step.init(model, torch.optim.SGD(model.parameters(), lr=0.1)), X)
