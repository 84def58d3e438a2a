"""Stochastic depth: choices that all ranks make, and that come out the same when they are made again."""

import copy
import warnings
from functools import partial

import pytest
import safetensors.torch
import torch
from torch import nn

import dtrain as dt
from dtrain.dist.init import get_dist_info
from dtrain.errors import ConfigError
from dtrain.surgery.dropout import drop_rates, drop_samples, is_dropped, stochastic_depth
from dtrain.testing import count_host_syncs


class Block(nn.Module):
    """Adds its branch to its input."""

    def __init__(self, dim: int = 4) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(dim, dim), nn.BatchNorm1d(dim)

    def forward(self, x, scale: float = 1.0):
        return x + scale * self.norm(self.layer(x))


class Net(nn.Sequential):
    def __init__(self, blocks: int = 3) -> None:
        super().__init__(nn.Linear(4, 4), *[Block() for _ in range(blocks)], nn.Linear(4, 2))


def net(**options) -> nn.Module:
    torch.manual_seed(0)
    return stochastic_depth(Net().double(), Block, **{"distribution": "uniform", "seed": 5, **options})


def batch(step: int, samples: int = 6) -> torch.Tensor:
    return torch.randn(samples, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def trained(model: nn.Module, steps: int = 6) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        model(batch(step)).square().mean().backward()
        optimizer.step()
    return [tensor.detach() for tensor in (*model.parameters(), *model.buffers())]


def choices(name: str, steps: int, rate: float = 0.5, seed: int = 5) -> list[bool]:
    return [is_dropped(rate, count, seed=seed, name=name) for count in range(steps)]


def test_drop_choices_include_dropped_and_kept_blocks():
    assert {tuple(choices(name, 6)) for name in "123"} != {(False,) * 6}
    assert all(len(set(choices(name, 6))) == 2 for name in "123")


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_blocks_are_dropped_at_their_rate_and_independently(rate):
    one, two = (torch.tensor(choices(name, 4000, rate, seed=0), dtype=torch.float64) for name in ("a", "b"))
    spread = (rate * (1 - rate) / 4000) ** 0.5
    assert abs(one.mean() - rate) < 5 * spread
    assert abs(torch.corrcoef(torch.stack([one, two]))[0, 1]) < 0.08


@pytest.mark.parametrize(("distribution", "rates"), [("linear", [0.1, 0.2, 0.3]), ("uniform", [0.3, 0.3, 0.3])])
def test_drop_rates_follow_the_module_order(distribution, rates):
    model = net(drop_rate=0.3, distribution=distribution)
    assert [model[index]._drop_rate for index in (1, 2, 3)] == pytest.approx(rates)
    assert drop_rates(0.3, 3, distribution) == pytest.approx(rates)
    assert "drop_rate=0.3" in repr(model)


def test_dropped_block_returns_its_input_and_gets_no_gradient():
    model, plain = net(), Net().double()
    plain.load_state_dict(model.state_dict(), strict=False)
    kept = [not choices(name, 1)[0] for name in "123"]
    x = batch(0)
    out = model(x)
    out.sum().backward()
    expected = plain[0](x)
    for index in (1, 2, 3):
        expected = plain[index](expected) if kept[index - 1] else expected
        assert (model[index].layer.weight.grad is not None) == kept[index - 1]
        assert int(model[index].norm.num_batches_tracked) == int(kept[index - 1])
    assert torch.equal(out, plain[4](expected))


def test_evaluation_scales_branches_and_does_not_count_forwards():
    model = net(drop_rate=0.25).eval()
    x = batch(0)
    expected = model[0](x)
    for index in (1, 2, 3):
        expected = expected + 0.75 * (model[index].norm(model[index].layer(expected)))
    torch.testing.assert_close(model(x), model[4](expected))
    assert int(model[1].forwards) == 0


def test_rate_zero_equals_the_plain_model():
    plain = Net().double()
    plain.load_state_dict(net().state_dict(), strict=False)
    for method in ("block", "sample"):
        model = net(drop_rate=0.0, method=method)
        for mode in (False, True):  # training moves the norms' statistics
            torch.testing.assert_close(model.train(mode)(batch(0)), copy.deepcopy(plain).train(mode)(batch(0)))


def test_sample_mode_mean_matches_evaluation():
    block = stochastic_depth(nn.Sequential(nn.Linear(3, 3)).double(), "0", drop_rate=0.3, method="sample")
    x = torch.ones(20_000, 3, dtype=torch.float64)
    torch.manual_seed(1)
    out = block(x)
    whole = block[0].layer(x) if hasattr(block[0], "layer") else nn.functional.linear(x, block[0].weight, block[0].bias)
    same, full = (out - x).abs().sum(1) < 1e-12, (out - whole).abs().sum(1) < 1e-12
    assert (same ^ full).all()
    assert same.double().mean().item() == pytest.approx(0.3, abs=0.02)
    torch.testing.assert_close(out.mean(0), block.eval()(x)[0], rtol=0.05, atol=0.02)
    assert "0.forwards" not in block.state_dict()


def test_drop_samples_ignores_infinite_values():
    out = drop_samples(torch.tensor([[torch.inf], [torch.nan], [2.0]]), torch.tensor([False, False, True]))
    assert out.tolist() == [[0.0], [0.0], [2.0]]


class Projected(nn.Module):
    """A residual block whose shortcut is no identity."""

    def __init__(self) -> None:
        super().__init__()
        self.shortcut, self.branch = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x):
        return self.shortcut(x) + self.branch(x)


@pytest.mark.parametrize("method", ["block", "sample"])
def test_residual_branches_may_change_the_shape(method):
    model = stochastic_depth(Projected(), "branch", kind="branch", drop_rate=0.9, distribution="uniform", method=method)
    x = torch.randn(5, 4)
    torch.manual_seed(0)
    for _ in range(4):
        apart = model(x) - model.shortcut(x)
        kept = (apart.abs().sum(1) > 0)[:, None]
        branch = nn.functional.linear(x, model.branch.weight, model.branch.bias)
        torch.testing.assert_close(apart, torch.where(kept, branch, 0.0))
    torch.testing.assert_close(model.eval()(x), model.shortcut(x) + 0.1 * branch)


def test_keyword_arguments_are_passed_to_the_block():
    block = stochastic_depth(Block(), lambda name, module: name == "layer", drop_rate=0.0)
    assert torch.equal(block(torch.ones(2, 4), scale=0.0), torch.ones(2, 4))


def test_recomputation_makes_the_same_choices():
    plain = trained(net())
    again = trained(dt.shard.checkpoint_activations(net(), blocks=(Block,)))
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # torch's own, when a graph is in parts
def test_compiled_blocks_make_the_same_choices():
    def compiled(model: nn.Module) -> nn.Module:
        for index in (1, 2, 3):
            model[index].compile(backend="eager")
        return model

    again = trained(compiled(net()))
    for a, b in zip(trained(net()), again, strict=True):
        torch.testing.assert_close(a, b)


def test_forward_count_is_synced_only_after_external_writes():
    model = net()
    model(batch(0))
    with count_host_syncs() as seen:
        for _ in range(5):
            model(batch(0)).sum().backward()
    assert seen.count == 0
    model.load_state_dict(copy.deepcopy(net().state_dict()))
    with count_host_syncs() as seen:
        model(batch(0))
        model(batch(0))
    assert seen.count == 3, "one for each block"
    assert int(model[1].forwards) == 2


def test_deep_copy_continues_with_the_same_choices():
    model = net()
    trained(model, steps=2)
    again = copy.deepcopy(model)
    for a, b in zip(trained(model), trained(again), strict=True):
        assert torch.equal(a, b)


def ragged(samples: int, buffers: str, blocks: str) -> list:
    """Ranks that run unequal microbatches; counts of forwards, and a sum over all parameters."""
    model = dt.shard_model(net(), dt.build_mesh(), blocks=(Block,) if blocks == "around" else (nn.Linear,), buffers=buffers)
    loss = dt.mean_loss(lambda model, batch: model(batch["x"]).square().mean(), weight=lambda batch: len(batch["x"]))
    step = dt.compose_step(loss, [], grad=partial(dt.microbatch_step, microbatch_size=2))
    state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.01))
    mine = samples if get_dist_info().rank == 0 else 2
    for number in range(4):
        state, _ = step(state, {"x": batch(number, mine)})
    counts = [int(model[number].forwards) for number in (1, 2, 3)]
    return [counts, sum(tensor.sum().item() for _, tensor in dt.full_params(state))]


def said_in_training() -> list[str]:
    model = dt.shard_model(net(drop_rate=0.9), dt.build_mesh(), blocks=(Block,))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trained(model)
    return [str(warning.message) for warning in said]


def test_dropped_fsdp_unit_causes_no_view_warning(ranks):
    assert ranks(1).run(said_in_training) == [[]]


@pytest.mark.parametrize("blocks", ["around", "inside"])
@pytest.mark.parametrize("buffers", ["broadcast", "own"])
def test_ranks_with_different_forward_counts_do_not_deadlock(ranks, buffers, blocks):
    """Three more microbatches on one rank: the other rank repeats a microbatch, and its count stays."""
    (one, total), (two, other) = ranks(2).run(ragged, 8, buffers, blocks)
    assert one == [16, 16, 16]
    assert two == (one if buffers == "broadcast" else [4, 4, 4])
    assert total == other


def on_its_share(size: int) -> list:
    """Parameters after four steps on the rank's share of 8 samples, in microbatches of ``size``."""
    model = net()
    for number in (1, 2, 3):
        model[number].norm = nn.Identity()  # statistics of a batch are those of a rank
    model = dt.shard_model(model, dt.build_mesh(), blocks=(Block,))
    loss = dt.mean_loss(lambda model, batch: model(batch["x"]).square().mean(), weight=lambda batch: len(batch["x"]))
    step = dt.compose_step(loss, [], grad=partial(dt.microbatch_step, microbatch_size=size))
    state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.01))
    for number in range(4):
        state, _ = step(state, {"x": batch(number, 8).chunk(get_dist_info().world_size)[get_dist_info().rank]})
    return [tensor.flatten().tolist() for _, tensor in dt.full_params(state)]


def test_two_ranks_match_one_process_only_with_single_microbatches(ranks):
    def apart(one, two):
        return max(abs(a - b) for left, right in zip(one, two, strict=True) for a, b in zip(left, right, strict=True))

    whole, both = ranks(1).run(on_its_share, 8)[0], ranks(2).run(on_its_share, 4)
    assert apart(whole, both[0]) < 1e-12
    halves, quarters = ranks(1).run(on_its_share, 4)[0], ranks(2).run(on_its_share, 2)
    assert both[0] == both[1]
    assert quarters[0] == quarters[1]
    assert apart(halves, quarters[0]) > 1e-6


def waits(buffers: str) -> int:
    """Count the host syncs of a step beyond those of the plain model."""
    counts = []
    for model in (Net().double(), net()):
        model = dt.shard_model(model, dt.build_mesh(), blocks=(Block,), buffers=buffers)
        loss = dt.mean_loss(lambda model, batch: model(batch["x"]).square().mean(), weight=lambda batch: len(batch["x"]))
        step = dt.compose_step(loss, [])
        state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.01))
        for number in range(3):
            with count_host_syncs() as seen:
                state, _ = step(state, {"x": batch(number)})
        counts.append(seen.count)
    return counts[1] - counts[0]


@pytest.mark.parametrize(("buffers", "more"), [("broadcast", 3), ("own", 0)])
def test_buffer_broadcast_costs_one_host_sync_per_block(ranks, buffers, more):
    assert ranks(2).run(waits, buffers) == [more, more]


class Odd(nn.Module):
    def __init__(self, out) -> None:
        super().__init__()
        self.out = out

    def forward(self, x):
        return self.out(x)


@pytest.mark.parametrize(
    ("out", "said"),
    [
        (lambda x: (x,), r"'0' must return a tensor \[2, 4\] like its input, got a tuple"),
        (lambda x: x[:, :2], r"'0' must return a tensor \[2, 4\] like its input, got a tensor \[2, 2\]"),
    ],
    ids=["tuple", "shape"],
)
@pytest.mark.parametrize("mode", [True, False])
def test_block_that_changes_the_shape_is_refused(out, said, mode):
    model = stochastic_depth(nn.Sequential(Odd(out)), Odd, drop_rate=0.0).train(mode)
    with pytest.raises(ConfigError, match=f"stochastic_depth: {said}. Select blocks that keep"):
        model(torch.ones(2, 4))


@pytest.mark.parametrize(
    ("blocks", "options", "said"),
    [
        (nn.Conv2d, {}, "blocks names Conv2d, but the model has no such module"),
        (Block, {"drop_rate": 1.0}, "drop_rate must be a finite number at least 0 and below 1, got 1.0"),
        (Block, {"drop_rate": -0.1}, "drop_rate must be a finite number at least 0 and below 1"),
        (Block, {"drop_rate": float("nan")}, "drop_rate must be a finite number at least 0 and below 1"),
        (Block, {"drop_rate": None}, "drop_rate must be a finite number at least 0 and below 1"),
        (Block, {"distribution": "cubic"}, "distribution must be 'linear' or 'uniform', got 'cubic'"),
        (Block, {"method": "batch"}, "method must be 'block' or 'sample', got 'batch'"),
        (Block, {"kind": "residual"}, "kind must be 'block' or 'branch', got 'residual'"),
        (Block, {"seed": "five"}, "seed must be an integer of at least 0, got 'five'"),
        ((), {}, r"blocks=\(\) selects no module inside the model"),
    ],
)
def test_invalid_arguments_are_refused(blocks, options, said):
    with pytest.raises(ConfigError, match=f"stochastic_depth: .*{said}"):
        stochastic_depth(Net(), blocks, **options)


def test_second_edit_is_refused():
    with pytest.raises(ConfigError, match="stochastic_depth: nothing to replace"):
        stochastic_depth(net(), Block)


@pytest.mark.slow
def test_transformers_blocks_can_be_dropped():
    from transformers import GPT2Config, GPT2Model
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block

    torch.manual_seed(0)
    config = GPT2Config(n_embd=8, n_layer=2, n_head=2, vocab_size=11, n_positions=8, bos_token_id=0, eos_token_id=0)
    model = stochastic_depth(GPT2Model(config), GPT2Block, distribution="uniform")
    for block in model.h:
        block.attn.resid_dropout.p = block.attn.attn_dropout.p = block.mlp.dropout.p = 0.0
    model.drop.p = 0.0
    tokens = torch.arange(8)[None]
    outs = [model(input_ids=tokens).last_hidden_state.detach() for _ in range(12)]
    kept = [tuple(not is_dropped(0.5, count, seed=0, name=name) for name in ("h.0", "h.1")) for count in range(12)]
    assert len(set(kept)) == 4
    for out, choice in zip(outs, kept, strict=True):
        assert torch.equal(out, outs[kept.index(choice)])
    distinct = [outs[kept.index(choice)] for choice in set(kept)]
    assert not any(torch.equal(a, b) for number, a in enumerate(distinct) for b in distinct[:number])


def test_weights_saved_before_the_edit_load_without_forward_counts(tmp_path):
    safetensors.torch.save_file(Net().double().state_dict(), tmp_path / "plain.safetensors")
    loaded = dt.load_weights_(net(), str(tmp_path / "plain.safetensors"), ignore=["**.forwards"])
    assert "1.layer.weight" in loaded.loaded
