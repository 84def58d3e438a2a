"""Statistics of activations compared with those of all activations joined, for every way to run the forwards."""

import math
import re
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import dtrain as dt
from dtrain.dist.init import get_dist_info
from dtrain.errors import ConfigError
from dtrain.monitors.activations import activation_stats
from dtrain.monitors.reduce_metrics import reduce_metrics
from dtrain.step.auto_microbatch import auto_microbatch
from dtrain.testing import inject_fault
from dtrain.testing.counters import count_collectives
from dtrain.transforms.gradients.sam import sam
from shard.copies import begin, loss, net, part, small, whole_batch

STATS = ("mean", "std", "rms", "max", "absmax", "zeros", "kurtosis")
ROUNDING = 1e-9  # of float64, relative: moments are differences of powers


def of(x):
    """All statistics of a tensor, from their definitions."""
    x = x.detach().double().flatten()
    mean, std = x.mean(), x.std(correction=0)
    values = (mean, std, x.square().mean().sqrt(), x.max(), x.abs().max(), (x == 0).double().mean())
    return dict(zip(STATS, [*(value.item() for value in values), ((x - mean).pow(4).mean() / std**4).item()], strict=True))


def by_hand():
    """Return statistics of the first and last layer of the small model on the first batch, and of the last layer's input."""
    model, x = net(), whole_batch(0)["x"]
    first = model.first(x)
    inner = torch.tanh(first)
    return {"first": of(first), "last/input": of(inner), "last": of(model.last(inner))}


def stats_of(metrics):
    stats = {}
    for name, number in reduce_metrics(metrics).items():
        if name.startswith("activation/"):
            module, _, stat = name.removeprefix("activation/").rpartition("/")
            stats.setdefault(module, {})[stat] = number
    return stats


def taken(model, transform, batch, loss=loss, **parts):
    step = dt.compose_step(loss, [transform], **parts)
    return stats_of(step(step.init(model, torch.optim.SGD(model.parameters(), lr=0.1)), batch)[1])


@pytest.mark.parametrize("size", [None, 1, 3], ids=["whole", "ones", "threes"])
def test_statistics_are_independent_of_microbatch_size(size):
    grad = partial(dt.microbatch_step, microbatch_size=size)
    stats = taken(net(), activation_stats("*", 1, stats=STATS, include_inputs=True), whole_batch(0), grad=grad)
    assert set(stats) == {"first", "last", "first/input", "last/input"}
    for tap, expected in by_hand().items():
        assert stats[tap] == pytest.approx(expected, rel=ROUNDING, abs=ROUNDING)


def on_ranks(strategy, sizes):
    step, state = begin([activation_stats("*", 1, stats=STATS, include_inputs=True)], strategy)
    return stats_of(step(state, part(0, sizes, get_dist_info().rank, get_dist_info().rank + 1))[1])


@pytest.mark.parametrize(
    ("strategy", "sizes"),
    [
        ("full_shard", (3, 5)),
        ("replicate", (3, 5)),
        ("full_shard", (8, 0)),  # a rank without a sample runs a sample that must not count
        pytest.param("shard_grad_op", (1, 7), marks=pytest.mark.slow),
        pytest.param("hybrid_shard", (3, 1, 2, 2), marks=pytest.mark.slow),
    ],
)
def test_statistics_on_ranks_equal_single_process(ranks, strategy, sizes):
    for stats in ranks(len(sizes)).run(on_ranks, strategy, sizes):
        for tap, expected in by_hand().items():
            assert stats[tap] == pytest.approx(expected, rel=ROUNDING)


def largest_of_uneven():
    """Rank 1 has no sample of its own."""
    step, state = begin([activation_stats("first", 1, stats=("max", "absmax"), include_inputs=True)], "full_shard")
    mine = part(0, (8, 0), get_dist_info().rank, get_dist_info().rank + 1)
    return stats_of(step(state, mine)[1])


def test_rank_without_samples_does_not_change_the_maximum(ranks):
    x = whole_batch(0)["x"]
    for stats in ranks(2).run(largest_of_uneven):
        assert stats["first/input"] == pytest.approx({"max": x.max().item(), "absmax": x.abs().max().item()}, rel=ROUNDING)


class Outputs(nn.Module):
    """A module that returns a given value: a tuple, a mapping, indices before values."""

    def __init__(self, wrap):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.wrap = wrap

    def forward(self, *, x):
        return self.wrap(x * self.weight)


@pytest.mark.parametrize(
    ("wrap", "take"),
    [
        (lambda x: (x, x * 2), lambda out: out[0]),
        (lambda x: {"indices": x.long(), "logits": x, "more": x * 3}, lambda out: out["logits"]),
        (lambda x: (None, "text", [x]), lambda out: out[2][0]),
        (lambda x: (x.bfloat16(),), lambda out: out[0].float()),
        (lambda x: (x.detach().to(torch.float8_e4m3fn), x), lambda out: out[1]),
    ],
    ids=["tuple", "mapping", "nested", "bfloat16", "float8"],
)
def test_first_float_tensor_of_output_is_measured(wrap, take):
    model = nn.ModuleDict({"it": Outputs(wrap)})
    fn = dt.mean_loss(lambda model, x: take(model["it"](x=x)).mean(), weight=len)
    stats = taken(
        model, activation_stats("it", 1, stats=("mean", "max"), include_inputs=True), torch.tensor([[1.0], [3.0]]), fn
    )
    assert stats == {"it": {"mean": 2.0, "max": 3.0}, "it/input": {"mean": 2.0, "max": 3.0}}


def test_module_called_twice_is_counted_twice():
    model = nn.ModuleDict({"it": nn.Linear(1, 1, bias=False)})
    nn.init.constant_(model["it"].weight, 2.0)
    fn = dt.mean_loss(lambda model, x: model["it"](model["it"](x)).mean(), weight=len)
    assert taken(model, activation_stats("it", 1, stats=("mean", "max")), torch.tensor([[1.0]]), fn) == {
        "it": {"mean": 3.0, "max": 4.0}
    }


def test_unused_module_gives_nan():
    model = nn.ModuleDict({"used": nn.Linear(1, 1), "idle": nn.Linear(1, 1)})
    fn = dt.mean_loss(lambda model, x: model["used"](x).mean(), weight=len)
    stats = taken(model, activation_stats("*", 1, stats=STATS), torch.ones(2, 1), fn)
    assert all(math.isnan(number) for number in stats["idle"].values())
    assert not math.isnan(stats["used"]["max"])


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_activations_are_counted_once(reentrant):
    model, calls = net(), []
    model.first.register_forward_hook(lambda *_: calls.append(1))
    fn = dt.mean_loss(
        lambda m, b: (
            (m.last(torch.tanh(checkpoint(m.first, b["x"].requires_grad_(), use_reentrant=reentrant))) - b["y"]).square().mean()
        ),
        weight=lambda b: len(b["x"]),
    )
    with set_checkpoint_early_stop(False):  # it would end before the hooks
        stats = taken(model, activation_stats("first", 1, stats=STATS), whole_batch(0), fn)
    assert len(calls) == 2, "the checkpoint did not recompute"
    assert stats["first"] == pytest.approx(by_hand()["first"], rel=ROUNDING)


def test_names_omit_checkpoint_wrapper():
    model = net()
    model.first = checkpoint_wrapper(model.first)
    stats = taken(model, activation_stats("first", 1, stats=STATS), whole_batch(0))
    assert stats["first"] == pytest.approx(by_hand()["first"], rel=ROUNDING)


def test_out_of_memory_retry_is_not_counted():
    tried = []

    def remembering(model, batch):
        tried.append(len(batch["x"]))
        return loss(model, batch)

    model = net()
    step = dt.compose_step(remembering, [auto_microbatch(), activation_stats("first", 1, stats=STATS)])
    state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1))
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")
    with inject_fault("raise", at="backward", call=1, error=error):
        _, metrics = step(state, whole_batch(0))
    assert sum(tried) > 8, "no try failed"
    assert stats_of(metrics)["first"] == pytest.approx(by_hand()["first"], rel=ROUNDING)


def test_hooks_are_removed_after_step_and_after_error():
    model = net()
    step = dt.compose_step(loss, [activation_stats("*", 1)])
    state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(KeyError):
        step(state, {"x": whole_batch(0)["x"]})
    step(state, whole_batch(0))
    assert all(not module._forward_hooks for module in model.modules())


def test_only_steps_crossing_interval_are_measured(ranks):
    model, seen = net(), []
    step = dt.compose_step(loss, [activation_stats("*", "3ba")])
    state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for number in range(7):
        state, metrics = step(state, whole_batch(number))
        assert state.crossed("3ba") == ("activation/first/mean" in metrics)
        seen += [state.step] * ("activation/first/mean" in metrics)
        assert "loss" in metrics
    assert seen == [3, 6]


def test_last_of_two_gradient_computations_is_measured():
    once = taken(net(), activation_stats("first", 1, stats=STATS), whole_batch(0))
    step = dt.compose_step(loss, [sam(1e-9), activation_stats("first", 1, stats=STATS)], grad=small)
    model = net()
    twice = stats_of(step(step.init(model, torch.optim.SGD(model.parameters(), lr=0.1)), whole_batch(0))[1])
    assert twice["first"] == pytest.approx(once["first"], rel=1e-6)


def collectives(stats):
    step, state = begin([activation_stats("*", 2, stats=stats)], "full_shard")
    counts = []
    for number in range(2):
        with count_collectives() as seen:
            state, _ = step(state, part(number, (4, 4), get_dist_info().rank, get_dist_info().rank + 1))
        counts.append(seen.count(group="training"))
    return counts[1] - counts[0]


@pytest.mark.parametrize(("stats", "more"), [(("mean", "std"), 1), (STATS, 2)])
def test_number_of_collectives_is_independent_of_modules(ranks, stats, more):
    assert ranks(2).run(collectives, stats) == [more] * 2


@pytest.mark.parametrize(
    "pattern",
    ["first", ["first"], re.compile("f.*t"), lambda name, module: isinstance(module, nn.Linear) and module.in_features == 4],
    ids=["text", "several", "expression", "function"],
)
def test_pattern_selects_modules(pattern):
    assert list(taken(net(), activation_stats(pattern, 1), whole_batch(0))) == ["first"]


@pytest.mark.parametrize(("pattern", "names"), [("", {"model"}), (["", "**"], {"model", "first", "last"})])
def test_root_module_can_be_selected(pattern, names):
    assert set(taken(net(), activation_stats(pattern, 1, stats=("mean",)), whole_batch(0))) == names


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("*", "1ep"), "activation_stats: every must be a number of steps, got '1ep'"),
        (("*", 1, ("median",)), r"activation_stats: stats must be a list of names from mean, .*kurtosis, got \('median',\)"),
        (("*", 1, "mean"), "activation_stats: stats must be a list of names from .* got 'mean'"),
        ((3, 1), "activation_stats: select must be a text, several texts, a regular expression or a function, got 3"),
        (([], 1), r"activation_stats: select must be .* got \[\]"),
        (([3], 1), "activation_stats: patterns of names must be text, got 3"),
    ],
)
def test_invalid_arguments_are_refused(given, message):
    pattern, interval, *stats = given
    with pytest.raises(ConfigError, match=message):
        activation_stats(pattern, interval, **({"stats": stats[0]} if stats else {}))


def test_unmatched_pattern_is_refused_at_init():
    step = dt.compose_step(loss, [activation_stats("blocks.*", 1)])
    model = net()
    with pytest.raises(ConfigError, match=r"select must match a module, got no match in 3 modules \(such as 'first', 'last'\)"):
        step.init(model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # importing the compiler makes old modules of torch's own
@pytest.mark.parametrize("interval", [1, 2])
def test_compiled_module_is_measured_only_at_its_boundary(interval):
    model = nn.Sequential(net())
    model[0].compile(backend="eager")
    step = dt.compose_step(loss, [activation_stats("**", interval, stats=("mean", "max"))])
    state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.0))
    for _ in range(2):
        state, metrics = step(state, whole_batch(0))
    stats, expected = stats_of(metrics), of(net()(whole_batch(0)["x"]))
    assert stats["0"] == pytest.approx({stat: expected[stat] for stat in ("mean", "max")}, rel=ROUNDING)
    assert all(math.isnan(number) for number in stats["0.first"].values())
    assert model[0]._compiled_call_impl.__name__ != "call", "left wrapped"
