"""``grad_cache_step``: a loss over the whole global batch has its exact gradient, for every division of the model.

The reference is written without dtrain, in one process, with one batch; where random numbers are drawn, it is the same loss,
unsplit, that runs the model on one part of the rows after another.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtrain.data.batch import batch_spec
from dtrain.dist.dtensor import full_tensor
from dtrain.dist.init import get_dist_info
from dtrain.dist.mesh import build_mesh
from dtrain.dist.ragged import all_gather_with_grad
from dtrain.errors import ConfigError, PeerError
from dtrain.monitors.reduce_metrics import reduce_metrics
from dtrain.shard.fsdp import shard_model
from dtrain.shard.precision import Precision
from dtrain.state import TrainState
from dtrain.step.auto_microbatch import auto_microbatch
from dtrain.step.compose import compose_step
from dtrain.step.grad_cache import grad_cache_step
from dtrain.step.microbatch_step import microbatch_step
from dtrain.testing.checks import memory_budget
from dtrain.testing.counters import count_collectives
from dtrain.typing import LossSum
from step.states import state_of

SAMPLES, WIDTH, DIM = 11, 5, 3
FLOAT64_REORDERING = 1e-12  # norm of the difference over norm of the gradient; rounding gives about 1e-16
BF16_ROUNDING = 2e-2  # gradients of microbatches are rounded before they are added up
SIZES = (1, 2, 3, 5, None)
STRATEGIES = ("full_shard", "replicate", "shard_grad_op")
SPLITS = {1: [[11]], 2: [[6, 5], [11, 0], [1, 10]], 4: [[3, 3, 3, 2], [0, 0, 1, 10]]}


class Encoder(nn.Module):
    """Two layers; a temperature, and a shift that the loss takes from it."""

    def __init__(self, dropout: float = 0.0, norm: bool = False) -> None:
        super().__init__()
        layers = [nn.Linear(WIDTH, 7), nn.BatchNorm1d(7) if norm else nn.Identity(), nn.Tanh(), nn.Dropout(dropout)]
        self.layers, self.out = nn.Sequential(*layers), nn.Linear(7, DIM)
        self.temperature = nn.Parameter(torch.tensor(0.3))
        self.shift = nn.Parameter(torch.linspace(-0.5, 0.5, DIM))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layers(x))


def encoder(dtype: torch.dtype = torch.float64, **options) -> nn.Module:
    torch.manual_seed(0)
    return Encoder(**options).to(dtype)


def pairs(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Questions, two answers to each of which the first is right, and how much a pair counts."""
    g = torch.Generator().manual_seed(1)
    q, d = torch.randn(SAMPLES, WIDTH, generator=g), torch.randn(SAMPLES, 2, WIDTH, generator=g)
    return {"q": q.to(dtype), "d": d.to(dtype), "weight": torch.rand(SAMPLES, generator=g).to(dtype)}


def part_of(batch: dict[str, Tensor], counts: list[int]) -> dict[str, Tensor]:
    rank = get_dist_info().rank
    first = sum(counts[:rank])
    return {key: value[first : first + counts[rank]] for key, value in batch.items()}


def loss_fn(model: nn.Module, batch: dict[str, Tensor], embed=None) -> LossSum:
    """Each question against the answers of everybody; the model is called twice, with one row and with two per sample."""
    embed = embed or model
    q = F.normalize(embed(batch["q"]) + model.shift, dim=1)
    d = F.normalize(embed(batch["d"].flatten(0, 1)), dim=1)
    everybody, sizes = all_gather_with_grad(d), all_gather_with_grad(q.detach().new_ones(len(q), 1) * get_dist_info().rank)
    first = 2 * int((sizes < get_dist_info().rank).sum())
    logits = q @ everybody.t() * model.temperature.exp()
    right = first + 2 * torch.arange(len(q))
    losses = F.cross_entropy(logits, right, reduction="none")
    correct = (logits.argmax(1) == right).sum()
    return LossSum(
        total=(losses * batch["weight"]).sum(), weight=batch["weight"].sum(), aux={"accuracy": (correct, len(right))}
    )


def reference(dtype: torch.dtype = torch.float64) -> tuple[Tensor, float]:
    """Gradient and loss without dtrain: the weighted mean over the whole batch in one process."""
    net, batch = encoder(dtype), pairs(dtype)
    q = F.normalize(net(batch["q"]) + net.shift, dim=1)
    d = F.normalize(net(batch["d"].flatten(0, 1)), dim=1)
    losses = F.cross_entropy(q @ d.t() * net.temperature.exp(), 2 * torch.arange(len(q)), reduction="none")
    loss = (losses * batch["weight"]).sum() / batch["weight"].sum()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in net.parameters()]), loss.item()


def sharded(strategy: str, accumulate: str = "local", **options) -> TrainState:
    precision = options.pop("precision", None)
    return state_of(shard_model(
        encoder(**options), build_mesh(), strategy=strategy, accumulate=accumulate, blocks=(nn.Sequential,),
        **({} if precision is None else {"precision": precision}),
    ))  # fmt: skip


def gradient(state: TrainState) -> Tensor:
    return torch.cat([full_tensor(p.grad).flatten() for p in state.params.values()])


def relative_error(computed: Tensor, expected: Tensor) -> float:
    return float((computed - expected).norm() / expected.norm())


def errors(strategy: str, accumulate: str, splits: list, grad=grad_cache_step) -> list[tuple[float, float]]:
    """Of gradient and loss, for each split and size."""
    state, differences = sharded(strategy, accumulate), []
    expected, loss = reference()
    for counts in splits:
        for size in SIZES:
            _, metrics = grad(state, part_of(pairs(), counts), loss_fn=loss_fn, microbatch_size=size)
            numbers = reduce_metrics(metrics)
            differences.append((relative_error(gradient(state), expected), abs(numbers["loss"] - loss)))
            assert set(numbers) == {"loss", "accuracy"}
    return differences


def is_quick(world: int, strategy: str, accumulate: str) -> bool:
    return world < 4 and strategy != "shard_grad_op" and (accumulate == "local" or strategy == "full_shard")


CASES = [
    pytest.param(world, s, a, marks=() if is_quick(world, s, a) else pytest.mark.slow)
    for world in SPLITS
    for s in STRATEGIES
    for a in ("local", "sharded")
]


@pytest.mark.parametrize(("world_size", "strategy", "accumulate"), CASES)
def test_gradient_and_loss_equal_the_whole_batch_for_every_split(ranks, world_size, strategy, accumulate):
    for pairs in ranks(world_size).run(errors, strategy, accumulate, SPLITS[world_size]):
        assert len(pairs) == len(SIZES) * len(SPLITS[world_size])
        assert [pair for pair in pairs if not max(pair) <= FLOAT64_REORDERING] == []


@pytest.mark.parametrize("size", SIZES)
def test_a_plain_model_in_one_process_has_the_same_gradient(size):
    state = state_of(encoder())
    grad_cache_step(state, pairs(), loss_fn=loss_fn, microbatch_size=size)
    assert relative_error(gradient(state), reference()[0]) <= FLOAT64_REORDERING


def test_plain_microbatches_give_a_wrong_contrastive_gradient():
    state = state_of(encoder())
    microbatch_step(state, pairs(), loss_fn=loss_fn, microbatch_size=3)
    assert relative_error(gradient(state), reference()[0]) > 1e-2


def in_parts(size: int):
    """The loss, with the model run on ``size`` samples at a time, all with their graph: it draws the same numbers."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> LossSum:
        def embed(x: Tensor) -> Tensor:
            return torch.cat([model(rows) for rows in x.split(size * len(x) // len(batch["q"]))])

        return loss_fn(model, batch, embed)

    return loss


def noisy(loss):
    """``loss`` with a random number that is drawn after the model has run."""

    def drawn(model: nn.Module, batch: dict[str, Tensor]) -> LossSum:
        exact = loss(model, batch)
        return LossSum(total=exact.total * (1 + torch.rand(())), weight=exact.weight)

    return drawn


def with_dropout(strategy: str | None, param: str | None = None) -> list:
    """The gradient's error against a loss that keeps all graphs, and whether the generator is then where it would be."""
    options = {"dropout": 0.4}
    if param:
        options |= {"precision": Precision(param=param), "dtype": torch.float32}
    batch = part_of(pairs(options.get("dtype", torch.float64)), [6, 5] if strategy else [SAMPLES])
    grads, draws = [], []
    for grad, loss, size in ((microbatch_step, in_parts(2), None), (grad_cache_step, loss_fn, 2)):
        state = sharded(strategy, **options) if strategy else state_of(encoder(**options))
        torch.manual_seed(7 + get_dist_info().rank)
        grad(state, batch, loss_fn=noisy(loss), microbatch_size=size)
        grads.append(gradient(state))
        draws.append(torch.rand(()).item())
    return [relative_error(grads[1], grads[0]), draws[0] == draws[1]]


def test_recomputed_microbatch_uses_the_same_random_numbers(ranks):
    error, drawn_alike = with_dropout(None)
    assert error <= FLOAT64_REORDERING
    assert drawn_alike
    for error, drawn_alike in ranks(2).run(with_dropout, "full_shard"):
        assert error <= FLOAT64_REORDERING
        assert drawn_alike


def test_bf16_full_shard_gradient_matches_unsplit_up_to_rounding(ranks):
    for error, _ in ranks(2).run(with_dropout, "full_shard", "bf16"):
        assert 0 < error <= BF16_ROUNDING


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.rows = encoder(torch.float32), []

    def forward(self, x: Tensor, **_) -> Tensor:
        self.rows.append((len(x), torch.is_grad_enabled()))
        return self.net(x)


def simple_loss(model: nn.Module, batch: dict[str, Tensor]) -> LossSum:
    z = F.normalize(model(batch["q"]), dim=1)
    return LossSum(total=F.cross_entropy(z @ z.t(), torch.arange(len(z)), reduction="sum"), weight=len(z))


@pytest.mark.parametrize(
    ("size", "rows"),
    [
        (None, [(11, True)]),
        (20, [(11, True)]),
        (4, [(4, False), (4, False), (3, False), (4, True), (4, True), (3, True)]),
    ],
)
def test_single_microbatch_runs_one_forward(size, rows):
    net = Counting()
    grad_cache_step(state_of(net), pairs(torch.float32), loss_fn=simple_loss, microbatch_size=size)
    assert net.rows == rows


def test_buffer_updates_match_microbatch_step():
    buffers = []
    for grad in (microbatch_step, grad_cache_step):
        state = state_of(encoder(norm=True))
        grad(state, {"q": pairs()["q"]}, loss_fn=simple_loss, microbatch_size=4)
        buffers.append({name: buffer.clone() for name, buffer in state.model.named_buffers()})
    assert buffers[0]["layers.1.num_batches_tracked"] == 3
    for name, buffer in buffers[0].items():
        torch.testing.assert_close(buffers[1][name], buffer, rtol=0, atol=0)


def test_loss_terms_with_own_weights_are_summed():
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> LossSum:
        plain = loss_fn(model, batch)
        return LossSum(
            total=plain.total, weight=plain.weight, terms={"size": (model(batch["q"]).square().sum(), len(batch["q"]))}
        )

    def weights(batch: dict[str, Tensor]) -> dict[str, Tensor | int]:
        return {"loss": batch["weight"].sum(), "size": len(batch["q"])}

    results = []
    for grad, size in ((microbatch_step, None), (grad_cache_step, 2)):
        state = state_of(encoder())
        _, metrics = grad(state, pairs(), loss_fn=loss, microbatch_size=size, batch_spec=batch_spec(weight=weights))
        results.append((gradient(state), reduce_metrics(metrics)))
    assert relative_error(results[1][0], results[0][0]) <= FLOAT64_REORDERING
    assert results[1][1] == pytest.approx(results[0][1], rel=FLOAT64_REORDERING)


class Several(Encoder):
    """Returns a mapping of several things, takes keywords, and has a row of text per sample."""

    def forward(self, *, x: Tensor, names: list[str], scale: Tensor) -> dict:
        assert len(names) == len(x)
        z = super().forward(x) * scale
        return {"z": z, "half": (z[:, :1], None), "index": x.argmax(1), "unused": z.exp(), "kind": "several"}


def several_loss(model: nn.Module, batch: dict) -> LossSum:
    with torch.no_grad():
        still = model(x=batch["q"], names=batch["names"], scale=torch.tensor(1.0))["z"]
    assert not still.requires_grad
    out = model(x=batch["q"], names=batch["names"], scale=torch.tensor(2.0))
    assert out["kind"] == "several"
    z = out["z"] + out["half"][0] + out["index"][:, None]
    return LossSum(total=(z @ (z.t() + still.t())).logsumexp(1).sum(), weight=len(z))


def test_nested_model_inputs_and_outputs_are_supported():
    batch, flat = {"q": pairs()["q"], "names": [f"n{number}" for number in range(SAMPLES)]}, []
    for grad, size in ((microbatch_step, None), (grad_cache_step, 4)):
        torch.manual_seed(0)
        state = state_of(Several().double())
        grad(state, batch, loss_fn=several_loss, microbatch_size=size)
        grads = [p.grad for name, p in state.params.items() if name not in ("temperature", "shift")]
        flat.append(torch.cat([g.flatten() for g in grads]))
    assert relative_error(flat[1], flat[0]) <= FLOAT64_REORDERING


def test_loss_autocast_applies_to_recomputed_forwards():
    dtypes = []

    class Seen(Encoder):
        def forward(self, x: Tensor) -> Tensor:
            z = super().forward(x)
            dtypes.append(z.dtype)
            return z

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> LossSum:
        with torch.autocast(torch.get_default_device().type, torch.bfloat16):
            z = model(batch["q"])
        return LossSum(total=(z.float() @ z.float().t()).logsumexp(1).sum(), weight=len(z))

    flat = []
    for grad, size in ((microbatch_step, None), (grad_cache_step, 4)):
        torch.manual_seed(0)
        state = state_of(Seen())
        grad(state, pairs(torch.float32), loss_fn=loss, microbatch_size=size)
        flat.append(torch.cat([p.grad.flatten() for p in state.params.values() if p.grad is not None]))
    assert set(dtypes) == {torch.bfloat16}
    assert len(dtypes) == 1 + 6
    assert relative_error(flat[1], flat[0]) <= BF16_ROUNDING


def test_peak_memory_is_close_to_one_microbatch():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), *[nn.Tanh() for _ in range(32)], nn.Linear(64, 4))
    state, batch, peaks = state_of(net), {"q": torch.randn(128, 64)}, {}
    for name, grad, size in (
        ("unsplit", microbatch_step, None),
        ("cached", grad_cache_step, 16),
        ("split", microbatch_step, 16),
    ):
        with memory_budget(2**30, existing=[*state.params.values(), batch["q"]]) as held:
            grad(state, batch, loss_fn=simple_loss, microbatch_size=size)
        peaks[name] = held.peak
    similarities = 4 * 128 * 128 * 4  # the loss's own matrix, its softmax and their gradients are of the whole batch
    assert peaks["cached"] < peaks["split"] + similarities
    assert peaks["cached"] < peaks["unsplit"] / 2


# The rules for arguments and results of the model.


def needs_grad(model: nn.Module, batch: dict) -> LossSum:
    z = model(batch["q"] * model.temperature)
    return LossSum(total=z.sum(), weight=len(z))


def by_method(model: nn.Module, batch: dict) -> LossSum:
    z = model.out(model.layers(batch["q"]))
    return LossSum(total=z.sum(), weight=len(z))


def of_unlike_rows(model: nn.Module, batch: dict) -> LossSum:
    return LossSum(total=model(batch["q"], torch.ones(4)).sum(), weight=1)


def of_no_tensor(model: nn.Module, batch: dict) -> LossSum:
    return LossSum(total=model("text").sum(), weight=1)


def no_loss_sum(model: nn.Module, batch: dict) -> Tensor:
    return model(batch["q"]).sum()


class Summing(Encoder):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).sum()


class Odd(Encoder):
    def forward(self, x: Tensor) -> tuple:
        return super().forward(x), object()


def first_output(model: nn.Module, batch: dict) -> LossSum:
    return LossSum(total=model(batch["q"])[0].sum(), weight=1)


@pytest.mark.parametrize(
    ("net", "loss", "message"),
    [
        (Encoder, needs_grad, "arguments of model.{5} must not need a gradient, which would stop there. Call the model on"),
        (Encoder, by_method, "loss_fn must call model.{5} for a gradient, and never did, so nothing can be split"),
        (Encoder, of_unlike_rows, r"must have one number of rows \(first axis\), got shapes \[11, 5\], \[4\]. Give each"),
        (Encoder, of_no_tensor, r"must have one number of rows \(first axis\), got shapes of no tensor. Give each"),
        (Encoder, no_loss_sum, "loss_fn must return a LossSum, got Tensor"),
        (Summing, first_output, r"one row per input row \(4\), got shape \[\]. Return embeddings"),
        (Odd, first_output, r"one row per input row \(4\), got a object. Return embeddings"),
    ],
)
def test_unsplittable_model_call_is_refused_without_gradients(net, loss, message):
    state = state_of(net())
    with pytest.raises(ConfigError, match=f"grad_cache_step: .*{message}"):
        grad_cache_step(state, pairs(torch.float32), loss_fn=loss, microbatch_size=4)
    assert all(p.grad is None for p in state.params.values())


def test_microbatch_size_below_one_is_refused():
    with pytest.raises(ConfigError, match="microbatch_size must be an integer of at least 1, got 0"):
        grad_cache_step(state_of(encoder()), pairs(), loss_fn=loss_fn, microbatch_size=0)


def unit_by_hand() -> list:
    state = sharded("full_shard")

    def loss(model: nn.Module, batch: dict) -> LossSum:
        z = model(batch["q"])
        return LossSum(total=z.sum() + model.layers(batch["q"] + z.mean()).sum(), weight=len(z))

    try:
        grad_cache_step(state, part_of(pairs(), [6, 5]), loss_fn=loss, microbatch_size=2)
    except ConfigError as error:
        text = str(error)
    grad_cache_step(state, part_of(pairs(), [6, 5]), loss_fn=loss_fn, microbatch_size=2)
    return [text, relative_error(gradient(state), reference()[0])]


def test_loss_calling_a_sharded_unit_directly_is_refused(ranks):
    for text, error in ranks(2).run(unit_by_hand):
        assert text.startswith("grad_cache_step: the loss ran a sharded part of the model without model(")
        assert error <= FLOAT64_REORDERING


class Refused(Exception):
    pass


def after_exceptions(strategy: str) -> list:
    """Raise in each of the passes, on all ranks, then make a step: its error, and the leftovers in between."""
    state, batch, left = sharded(strategy, dropout=0.0), part_of(pairs(), [6, 5]), []

    def breaking(forward: int):
        calls = {"forwards": 0}

        def before(*_) -> None:
            calls["forwards"] += 1
            if calls["forwards"] == forward:
                raise Refused

        return before

    def broken_loss(model: nn.Module, batch: dict) -> LossSum:
        loss_fn(model, batch)
        raise Refused

    for forward in (2, 6, 7, 11):  # the first pass makes 3 forwards for each of the two calls, and the last one as many
        handle = state.model.layers.register_forward_pre_hook(breaking(forward))
        with pytest.raises(Refused):
            grad_cache_step(state, batch, loss_fn=loss_fn, microbatch_size=2)
        handle.remove()
        left += [name for name, p in state.params.items() if p.grad is not None]
    with pytest.raises(Refused):
        grad_cache_step(state, batch, loss_fn=broken_loss, microbatch_size=2)
    left += [name for name, p in state.params.items() if p.grad is not None]
    grad_cache_step(state, batch, loss_fn=loss_fn, microbatch_size=2)
    return [left, relative_error(gradient(state), reference()[0])]


def test_exception_in_any_pass_leaves_no_gradients(ranks):
    for left, error in ranks(2).run(after_exceptions, "full_shard"):
        assert left == []
        assert error <= FLOAT64_REORDERING


def bad_batch() -> str:
    batch = {"q": torch.ones(2, WIDTH), "d": torch.ones(3, 2, WIDTH)} if get_dist_info().rank else part_of(pairs(), [6, 5])
    try:
        grad_cache_step(sharded("replicate"), batch, loss_fn=loss_fn, microbatch_size=2)
    except (ConfigError, PeerError) as error:
        return str(error)
    return "no error"


def test_uncountable_batch_raises_on_all_ranks(ranks):
    first, second = ranks(2).run(bad_batch)
    assert first.startswith("step: rank 1 could not use its batch")
    assert second.startswith("batch: the first axis must be the batch axis")


# Together with compose_step and auto_microbatch.


MIB = 2**20


def wide_loss(model: nn.Module, batch: Tensor, *, gather: bool = True) -> LossSum:
    z = F.normalize(model(batch), dim=1)
    right = torch.arange(len(z)) + get_dist_info().rank * len(z) * gather
    return LossSum(
        total=F.cross_entropy(z @ (all_gather_with_grad(z) if gather else z).t(), right, reduction="sum"), weight=len(z)
    )


def trained(budget: int, gather: bool, *transforms, grad=grad_cache_step) -> tuple[Tensor, list, int]:
    """The weights after three steps, the size that each has found, and how often memory was refused."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 32)) for _ in range(4)]
    net = shard_model(nn.Sequential(*blocks), build_mesh(), strategy="full_shard", blocks=(nn.Sequential,))
    step, sizes = compose_step(partial(wide_loss, gather=gather), transforms, grad=grad), []
    state = step.init(net, torch.optim.SGD(net.parameters(), lr=0.1))
    torch.manual_seed(get_dist_info().rank)
    with memory_budget(budget, existing=state.params.values()) as held:
        for number in range(3):
            held.limit = budget if number < 2 else budget * 4 // 5
            state, _ = step(
                state, torch.randn(96, 32, generator=torch.Generator().manual_seed(10 * number + get_dist_info().rank))
            )
            sizes.append(state.transform_states["auto_microbatch"]["size"] if transforms else None)
            # By heart, a rank that fails would count on the gathers of another number of microbatches.
            assert not transforms or state._run_context.transform_cache["auto_microbatch"].prober.traces.always_check
    return torch.cat([full_tensor(p).flatten() for p in state.params.values()]).detach(), sizes, held.refused


def found_and_given(gather: bool) -> list:
    """With sizes found under a budget that shrinks, and with these sizes given: sizes, refusals, and equal weights."""
    weights, sizes, refused = trained(MIB if gather else 3 * MIB // 4, gather, auto_microbatch(headroom=0.0, grow_every=None))
    given = iter(sizes)

    def by_hand(state, batch, *, loss_fn, microbatch_size=None):
        return grad_cache_step(state, batch, loss_fn=loss_fn, microbatch_size=next(given))

    again, _, _ = trained(2**30, gather, grad=by_hand)
    return [sizes, refused, bool(weights.equal(again))]


@pytest.mark.costly
@pytest.mark.parametrize("gather", [True, False], ids=["gathered", "alone"])  # alone: no collectives but the model's own
def test_auto_microbatch_run_equals_run_with_the_found_size(ranks, gather):
    first, second = ranks(2).run(found_and_given, gather)
    assert first[0] == second[0]
    assert all(0 < size < 96 for size in first[0])
    assert first[0][2] < first[0][1]
    assert first[1] + second[1] > 0
    assert [first[2], second[2]] == [True, True]


def test_grad_cache_step_works_as_compose_step_grad():
    step = compose_step(loss_fn, grad=partial(grad_cache_step, microbatch_size=2))
    net = encoder()
    state = step.init(net, torch.optim.SGD(net.parameters(), lr=0.02))
    losses = []
    for _ in range(20):
        state, metrics = step(state, pairs())
        losses.append(reduce_metrics(metrics)["loss"])
    assert state.step == 20
    assert losses[-1] < losses[0] - 0.05


def gathers(size: int) -> list[dict[str, int]]:
    """Collectives on the training group, of both kinds of step, for two microbatches."""
    counts = []
    for grad in (microbatch_step, grad_cache_step):
        state = sharded("full_shard")
        for _ in range(2):
            with count_collectives() as seen:
                grad(state, {"q": pairs()["q"][: 2 * size]}, loss_fn=simple_loss, microbatch_size=size)
        counts.append(seen.counts()["training"])
    return counts


def test_extra_forward_adds_only_its_own_all_gathers(ranks):
    for plain, cached in ranks(2).run(gathers, 3):
        # Two forwards more gather the one block twice, and the outermost unit, which stays, once.
        assert cached == {**plain, "all_gather": plain["all_gather"] + 3}
