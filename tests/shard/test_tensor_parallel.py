"""Tensor parallelism beside sharding: gradients, counts, weights at the start, training, and refused plans."""

import math

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel

from dtrain.data.batch import batch_spec
from dtrain.dist.dtensor import full_tensor, shard_box, to_local
from dtrain.dist.init import get_dist_info
from dtrain.dist.mesh import build_mesh, data_rank
from dtrain.dist.rng import seed_all
from dtrain.errors import ConfigError, StepError
from dtrain.losses import cross_entropy
from dtrain.monitors.reduce_metrics import reduce_metrics
from dtrain.shard.fsdp import shard_model
from dtrain.shard.materialize import materialize
from dtrain.shard.precision import Precision
from dtrain.shard.unshard import describe, full_params
from dtrain.state import init_state
from dtrain.step.compose import compose_step
from dtrain.step.evaluate import evaluate
from dtrain.step.microbatch_step import microbatch_step
from dtrain.step.optimizer import optimizer_step
from dtrain.transforms.gradients.clipping import clip_by_norm
from dtrain.transforms.weights.averaging import ema
from helpers.gpt import GPT, Block, GPTConfig
from shard.parallel import PLANS, SAMPLES, VOCAB, Tied, batch, degrees, difference, layers, loss_fn, make, reference, share

TOLERANCE = 1e-12  # norm of the difference over norm of the gradient, in float64; rounding gives about 1e-15
KINDS = {"gpt": GPT, "tied": Tied}
SLOW = pytest.mark.slow


def laid_out(kind: str, plan: str, strategy: str, tp: int, **options) -> nn.Module:
    mesh = build_mesh(**degrees(strategy, tp))
    return shard_model(make(KINDS[kind]), mesh, strategy=strategy, blocks=(Block,), tp_plan=PLANS[plan](), **options)


def gradient(kind: str, plan: str, strategy: str, tp: int, microbatch_size: int | None, options: dict, weighed: bool) -> list:
    net = laid_out(kind, plan, strategy, tp, **options)
    state = init_state(net, torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1))
    weigh = (lambda batch: (batch["targets"] != -100).sum()) if weighed else None
    mine = share(state.spec.data_rank, state.spec.data_ranks)
    errors = []
    for _ in range(2):  # twice: nothing of the first must be left
        state, metrics = microbatch_step(
            state, mine, loss_fn=loss_fn, microbatch_size=microbatch_size, batch_spec=batch_spec(weight=weigh)
        )
        errors.append(difference(state.params, reference(KINDS[kind])))
    state, _ = optimizer_step(state, metrics)
    return [max(errors), state.clock.samples, reduce_metrics(metrics)["loss"]]


def mean_loss(kind: str) -> float:
    loss = loss_fn(make(KINDS[kind]), batch())
    return (loss.total / loss.weight).item()


CASES = [  # kind, plan, strategy, tp, microbatch_size, options, weighed: the first five in the quick set
    ("gpt", "layers", "full_shard", 2, 2, {"accumulate": "sharded"}, False),
    ("gpt", "layers", "full_shard", 2, None, {"ignored_params": ("norm.weight", "head.*")}, True),
    ("gpt", "sequence", "hybrid_shard", 2, None, {}, True),
    ("tied", "sequence", "shard_grad_op", 2, 2, {}, False),
    ("tied", "vocabulary", "replicate", 4, 2, {}, False),
    ("gpt", "layers", "shard_grad_op", 2, 1, {"offload": "params"}, False),
    ("gpt", "layers", "replicate", 2, 2, {}, True),
    ("gpt", "vocabulary", "full_shard", 2, 2, {}, False),
    ("gpt", "sequence", "full_shard", 2, 2, {}, False),
    ("tied", "vocabulary", "full_shard", 2, 2, {}, False),
]
TOGETHER = [
    pytest.param(case, marks=() if number < 5 else SLOW, id="-".join(map(str, case[:5]))) for number, case in enumerate(CASES)
]


@pytest.mark.parametrize("case", TOGETHER)
def test_gradient_equals_that_of_one_process(ranks, case):
    for error, samples, loss in ranks(4).run(gradient, *case):
        assert error <= TOLERANCE
        assert samples == SAMPLES
        assert loss == pytest.approx(mean_loss(case[0]), rel=1e-12)


def test_gradient_matches_with_tensor_parallelism_only(ranks):
    for error, samples, _ in ranks(2).run(gradient, "gpt", "sequence", "full_shard", 2, 2, {}, False):
        assert error <= TOLERANCE
        assert samples == SAMPLES


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["full_shard", "hybrid_shard", "replicate"])
@pytest.mark.parametrize("plan", PLANS)
def test_gradient_matches_on_replicate_shard_and_tp_axes(ranks, plan, strategy):
    for error, samples, _ in ranks(8).run(gradient, "gpt", plan, strategy, 2, 2, {}, False):
        assert error <= TOLERANCE
        assert samples == SAMPLES


def optimizer_of(net: nn.Module, **form: bool) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=0.01, **form)


def by_hand() -> tuple[dict, dict]:
    """torch alone: one process, the whole batch at once."""
    net, whole = make(Tied), batch()
    optimizer = optimizer_of(net)
    averages = {name: p.detach().clone() for name, p in net.named_parameters()}
    for _ in range(3):
        optimizer.zero_grad()
        logits = net(whole["inputs"])
        nn.functional.cross_entropy(logits.flatten(0, 1), whole["targets"].flatten(), ignore_index=-100).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()
        for name, p in net.named_parameters():
            averages[name].lerp_(p.detach(), 0.5)
    return dict(net.named_parameters()), averages


def trained(plan: str, form: dict) -> list:
    net = laid_out("tied", plan, "full_shard", 2)
    step = compose_step(loss_fn, [clip_by_norm(0.1), ema(0.5)])
    state = step.init(net, optimizer_of(net, **form))
    for _ in range(3):
        state, _ = step(state, share(state.spec.data_rank, state.spec.data_ranks))
    params, averages = by_hand()
    evaluations = [evaluate(net, [share(state.spec.data_rank, state.spec.data_ranks)], loss_fn)]
    return [
        max((tensor - params[name]).abs().max().item() for name, tensor in full_params(state)),
        max(
            (tensor - averages[name]).abs().max().item()
            for name, tensor in full_params(state.transform_states["ema"]["params"])
        ),
        [reduce_metrics(metrics)["loss"] for metrics in evaluations],
        sorted(name for name, p in net.named_parameters() if not p.requires_grad),
    ]


@pytest.mark.parametrize(
    "form",
    [{"foreach": True}, pytest.param({"foreach": False}, marks=SLOW), pytest.param({"fused": True}, marks=SLOW)],
    ids=str,
)
def test_training_equals_that_of_plain_torch(ranks, form):
    params, _ = by_hand()
    net = make(Tied)
    net.load_state_dict({**params, "head.weight": params["embedding.weight"]})
    loss = loss_fn(net, batch())
    frozen = sorted(name for name, p in net.named_parameters() if not p.requires_grad)
    for weights, averages, (evaluated,), still in ranks(4).run(trained, "vocabulary", form):
        assert max(weights, averages) <= 1e-9  # Adam's quotient of moments magnifies rounding in tiny gradients
        assert evaluated == pytest.approx((loss.total / loss.weight).item(), rel=1e-9)
        assert still == frozen


def first_weights(plan: str, tp: int) -> list:
    config = GPTConfig(n_layer=1, n_head=2, dim=12, max_seq=8, vocab=VOCAB)
    with torch.device("meta"):
        alone, net = GPT(config), GPT(config)
    alone = materialize(alone, seed=3)
    net = materialize(shard_model(net, build_mesh(tp=tp), blocks=(Block,), tp_plan=PLANS[plan]()), seed=3)
    pairs = zip(alone.parameters(), net.parameters(), strict=True)
    tables = torch.equal(net.blocks[0].attention.rotary.cos, alone.blocks[0].attention.rotary.cos)
    return [all(torch.equal(a, full_tensor(b.detach())) for a, b in pairs), tables, describe(net)]


@pytest.mark.parametrize("plan", ["layers", "sequence"])
def test_initial_weights_equal_those_of_one_process(ranks, plan):
    for equal, tables, shown in ranks(4).run(first_weights, plan, 2):
        assert equal
        assert tables
        assert "full_shard over 2 ranks (dp_replicate=1, dp_shard=2, tp=2)" in shown
        assert "cut on dim 0 over dp_all=2, cut on dim 0 over tp=2" in shown


def uneven_boxes() -> list:
    """Two data ranks cut three rows of each of two: FSDP2's boxes against torch's own way of putting them together."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 5), nn.LayerNorm(5))
    expected = {name: p.detach().clone() for name, p in plain.named_parameters()}
    net = shard_model(plain, build_mesh(tp=2), tp_plan={"0": ColwiseParallel(), "1": RowwiseParallel()}, blocks=(nn.Linear,))
    right = []
    for name, p in net.named_parameters():
        box = shard_box(p)
        piece = expected[name][tuple(slice(begin, begin + n) for begin, n in zip(box.offset, box.size, strict=True))]
        right += [torch.equal(piece, to_local(p.detach())), torch.equal(full_tensor(p.detach()), expected[name])]
    boxes = {
        name: [shard_box(p).offset, shard_box(p).size, shard_box(p).replica, shard_box(p).num_replicas]
        for name, p in net.named_parameters()
    }
    return [all(right), boxes]


def test_uneven_shard_boxes_match_the_local_shards(ranks):
    results = ranks(4).run(uneven_boxes)
    assert all(right for right, _ in results)
    boxes = [boxes for _, boxes in results]
    assert [by_name["0.weight"][:2] for by_name in boxes] == [
        [[0, 0], [2, 5]],
        [[3, 0], [2, 5]],
        [[2, 0], [1, 5]],
        [[5, 0], [1, 5]],
    ]
    # The bias of a row-cut layer is whole along tp, as torch says; a norm is, because only FSDP2 knows of it.
    assert [by_name["1.bias"] for by_name in boxes] == [[[0], [3], 0, 2], [[0], [3], 1, 2], [[3], [2], 0, 2], [[3], [2], 1, 2]]
    assert [by_name["2.weight"] for by_name in boxes] == [
        [[0], [3], 0, 2],
        [[0], [3], 1, 2],
        [[3], [2], 0, 2],
        [[3], [2], 1, 2],
    ]


def dropped(seeds: str) -> list:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(4, 8), nn.Linear(8, 4), nn.Dropout(0.0 if seeds == "no matter" else 0.5), nn.Linear(4, 1)
    ).double()
    mesh = build_mesh(tp=2)
    rank = get_dist_info().rank
    seed_all(7, data_rank(mesh)[0] if seeds == "data" else rank)
    net = shard_model(net, mesh, tp_plan={"0": ColwiseParallel(), "1": RowwiseParallel()})
    state = init_state(net, torch.optim.SGD(net.parameters(), lr=0.1))
    batch = torch.arange(8.0).double().reshape(2, 4) + data_rank(mesh)[0] + (rank if seeds == "batch" else 0)
    batch = batch[: 1 + (seeds == "batch" and rank)] if seeds == "batch" else batch

    def squared(net: nn.Module, x: torch.Tensor):
        from dtrain.typing import LossSum

        return LossSum(total=net(x).square().sum(), weight=float(len(x)))

    try:
        state, _ = microbatch_step(state, batch, loss_fn=squared)
    except StepError as error:
        return [str(error)]
    return [
        full_tensor(state.params["3.weight"].grad).tolist(),
        [to_local(p.grad).tolist() for p in (state.params["3.weight"],)],
    ]


def test_tp_ranks_may_have_different_seeds_without_dropout(ranks):
    results = ranks(4).run(dropped, "no matter")
    assert all(gradient == results[0][0] for gradient, _ in results)


def test_tp_ranks_with_data_rank_seeds_share_dropout_masks(ranks):
    results = ranks(4).run(dropped, "data")
    assert results[0] == results[1]
    assert results[2] == results[3]
    assert results[0][1] != results[2][1]


@pytest.mark.parametrize(
    ("seeds", "message"),
    [
        (
            "rank",
            "but drew different random numbers in the step, as for dropout. Call dt.seed_all(seed, dt.dist.data_rank(mesh)[0])",
        ),
        ("batch", "but have 1 and 2 samples, 0 and 0 tokens. Build the loader with mesh="),
    ],
)
def test_tp_ranks_with_different_seeds_or_batches_are_refused(ranks, seeds, message):
    for (error,) in ranks(4).run(dropped, seeds):
        assert error.startswith(f"step: ranks 0 and 1 work on one batch together (cp, tp), {message}")


class Buffered(nn.LayerNorm):
    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.register_buffer("seen", torch.zeros(3))


class Own(ParallelStyle):
    """A style of the user's that does nothing."""

    def _apply(self, module: nn.Module, device_mesh) -> nn.Module:
        return module


def refused(case: str) -> str:
    net = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4), nn.Tanh(), Buffered(4), nn.Linear(4, 3))
    colwise, mesh, options = ColwiseParallel(), build_mesh(tp=2), {}
    plans = {
        "no plan": None,
        "empty": {},
        "no mapping": [colwise],
        "no module": {"5": colwise},
        "no style": {"0": "colwise"},
        "text": {0: colwise},
        "misfit": {"2": colwise},
        "uneven": {"4": colwise},
        "buffer": {"3": SequenceParallel()},
        "left out": {"0": colwise},
        "tied": {"0": colwise, "1": colwise},
        "no axis": {"0": colwise},
        "order": {"0": colwise},
        "differs": {"0": colwise if get_dist_info().rank else RowwiseParallel()},
    }
    if case == "left out":
        options = {"ignored_params": ("0.bias",)}
    if case == "tied":
        net[1] = nn.Linear(6, 6)
        net[3], net[4] = nn.Identity(), nn.Linear(4, 6)
        net[4].weight = net[0].weight
    if case == "no axis":
        mesh = build_mesh()
    if case == "order":
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("tp", "dp_shard"))
    try:
        shard_model(net, mesh, tp_plan=plans[case], **options)
    except ConfigError as error:
        return str(error)
    return "taken"


REFUSED = [
    ("no plan", "a mesh with tp=2 needs a tp_plan. Pass tp_plan=, or build the mesh without tp."),
    ("empty", "a mesh with tp=2 needs a tp_plan"),
    ("no mapping", "tp_plan must be a mapping of module names to styles, or 'auto', got list"),
    ("no module", "tp_plan names '5', but the model has no such module"),
    ("no style", "tp_plan['0'] must be a ParallelStyle, got 'colwise'. Pass for example ColwiseParallel()"),
    ("text", "tp_plan: patterns of names must be text, got 0"),
    ("misfit", "tp_plan: ColwiseParallel does not fit '2', a Tanh: ColwiseParallel currently only support"),
    ("uneven", "tp_plan shards '4.weight' [3, 4] along dim 0 into 2 uneven pieces. Use a size that tp=2 d"),
    ("buffer", "tp_plan: SequenceParallel on '3' shards the buffer 'seen', but every rank must hold full buffers"),
    ("left out", "tp_plan shards '0.bias', which is an ignored parameter (ignored_params, a scalar, or empty)"),
    ("tied", "tp_plan: 0.weight, 4.weight are one parameter, but get different placements"),
    (
        "no axis",
        "tp_plan needs a mesh with a tp axis, got axes ['dp_replicate', 'dp_shard'] of sizes [1, 2]. "
        "Pass for example dt.build_mesh(tp",
    ),
    ("order", "cp and tp must be the last axes of a mesh of all ranks in order, got ['tp', 'dp_shard']. Use dt.build_mesh."),
    ("differs", "the model of rank 1 must equal the model of rank 0 ('option 0: RowwiseParallel"),
]


@pytest.mark.parametrize(("case", "message"), REFUSED, ids=[case for case, _ in REFUSED])
def test_invalid_tp_plans_are_refused_on_all_ranks(ranks, case, message):
    for error in ranks(2).run(refused, case):
        assert error.partition(": ")[2].startswith(message)


def with_own_style() -> bool:
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))
    before = [p.detach().clone() for p in net.parameters()]
    net = shard_model(net, build_mesh(tp=2), tp_plan={"": Own(), "*": Own()})
    return all(torch.equal(a, full_tensor(b.detach())) for a, b in zip(before, net.parameters(), strict=True))


def test_custom_parallel_styles_are_accepted(ranks):
    assert ranks(2).run(with_own_style) == [True, True]


def half_precision() -> list:
    precision = Precision(param="bf16", reduce="fp32")
    net = shard_model(make(dtype=torch.float32), build_mesh(tp=2), blocks=(Block,), tp_plan=layers(), precision=precision)
    state = init_state(net, torch.optim.SGD(net.parameters(), lr=0.1))
    state, _ = microbatch_step(state, share(state.spec.data_rank, state.spec.data_ranks), loss_fn=loss_fn, microbatch_size=2)
    grads = {name: p.grad for name, p in state.params.items()}
    expected = reference()
    error = torch.stack([(full_tensor(grads[name]) - expected[name]).norm() for name in grads]).norm()
    whole = torch.stack([grad.norm() for grad in expected.values()]).norm()
    return [(error / whole).item(), sorted({str(grad.dtype) for grad in grads.values()})]


def test_tp_plan_trains_with_low_precision(ranks):
    for error, dtypes in ranks(4).run(half_precision):
        assert error < 0.05  # bfloat16 has 8 bits
        assert dtypes == ["torch.float32"]


def cross_entropies() -> list:
    """Compare losses of sharded logits with torch's, with an ignored target; then the error of unsupported logits."""
    mesh = init_device_mesh("cpu", (2,))
    logits = torch.randn(2, 3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 50
    targets = torch.tensor([[0, 5, 2], [-100, 3, 1]])
    plain = logits.clone().requires_grad_()
    expected = cross_entropy(plain, targets)
    expected.total.backward()
    placed = distribute_tensor(logits, mesh, [Shard(2)]).requires_grad_()
    sharded = cross_entropy(placed, targets)
    (sharded.total * 1.0).backward()
    copied = cross_entropy(distribute_tensor(logits, mesh, [Replicate()]), targets)
    stray = cross_entropy(distribute_tensor(logits, mesh, [Shard(2)]), torch.full((2, 3), 6))
    try:
        cross_entropy(distribute_tensor(logits, mesh, [Shard(0)]), targets)
        said = ""
    except ConfigError as error:
        said = str(error)
    apart = (full_tensor(placed.grad) - plain.grad).abs().max().item()
    totals = max((loss.total - expected.total).abs().item() for loss in (sharded, copied))
    return [totals, apart, int(sharded.weight), math.isnan(float(stray.total)), said]


def test_cross_entropy_with_sharded_vocabulary_equals_unsharded(ranks):
    for total, gradients, weight, stray, said in ranks(2).run(cross_entropies):
        assert max(total, gradients) < 1e-12
        assert weight == 5
        assert stray, "a target that no rank has shows"
        assert said.startswith("cross_entropy: takes a DTensor whose last dim is sharded evenly over one axis, got shape (2,")
