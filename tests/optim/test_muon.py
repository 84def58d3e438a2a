"""Muon compared with torch's, under FSDP2 in every layout, its collectives, and its refusals."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dtrain as dt
from dtrain.errors import ConfigError
from dtrain.optim.groups import muon_groups
from dtrain.optim.muon import Muon, orthogonalize
from dtrain.testing import count_collectives
from optim.trained import trained

# float64; five steps of the iteration magnify the rounding of small singular values by 500 and more
TOLERANCE = 1e-11
SHAPES = ((4, 6), (7, 3), (5, 5), (1, 4))


def matrices(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(*shape, generator=generator, dtype=dtype)) for shape in SHAPES]


@pytest.mark.parametrize(("adjust_lr_fn", "theirs"), [("original", "original"), ("match_rms_adamw", "match_rms_adamw")])
@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_matches_torch_bit_for_bit(adjust_lr_fn, theirs, nesterov):
    ours, peers = matrices(), matrices()
    got = trained(Muon(ours, lr=0.02, adjust_lr_fn=adjust_lr_fn, nesterov=nesterov), ours)
    expected = trained(torch.optim.Muon(peers, lr=0.02, weight_decay=0.1, adjust_lr_fn=theirs, nesterov=nesterov), peers)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_muon_adamw_groups_match_torch():
    ours, peers = matrices(), matrices()
    got = trained(Muon([{"params": ours, "method": "adamw", "weight_decay": 0.2}]), ours)
    expected = trained(torch.optim.AdamW(peers, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.2, fused=True), peers)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    plain = [{"params": (plain := matrices()), "method": "adamw", "weight_decay": 0.2, "fused": False}]
    for a, b in zip(trained(Muon(plain), plain[0]["params"]), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (5, 5)])
def test_orthogonalize_keeps_singular_vectors_with_values_near_one(shape):
    matrix = torch.randn(*shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    inner = left.T @ orthogonalize(matrix) @ right.T
    assert torch.allclose(inner, inner.diagonal().diag(), atol=1e-12)
    assert inner.diagonal().min() > 0.6
    assert inner.diagonal().max() < 1.3


@pytest.mark.parametrize("shape", [(64, 128), (128, 64), (96, 108)])
def test_orthogonalize_of_rectangular_matrices_brings_singular_values_near_one(shape):
    matrix = torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values = torch.linalg.svdvals(orthogonalize(matrix))
    assert 0.65 < values.min() <= values.max() < 1.21


def test_orthogonalize_keeps_very_small_singular_values_small():
    given = torch.logspace(-5, 0, 64, dtype=torch.float64)
    before = given / torch.linalg.vector_norm(given)
    left, _ = torch.linalg.qr(torch.randn(64, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    after = (left.T @ orthogonalize(left @ given.diag())).diagonal()
    assert 0.65 < after[before >= 0.0015].min() <= after.max() < 1.21
    assert (after <= before * 485).all()
    assert after.min() < 0.01
    matrix = torch.randn(256, 256, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values = torch.linalg.svdvals(orthogonalize(matrix))
    assert values.min() < 0.3
    assert 0.96 < (values > 0.65).double().mean() < 1


def test_zero_matrix_stays_zero_and_ns_dtype_sets_precision():
    assert orthogonalize(torch.zeros(2, 3)).tolist() == [[0.0] * 3] * 2
    wide, half = matrices(), matrices()
    a, b = trained(Muon(wide, ns_dtype="fp32"), wide), trained(Muon(half), half)
    for one, other in zip(a, b, strict=True):
        assert not torch.equal(one, other)
        torch.testing.assert_close(one, other, rtol=0.0, atol=0.02)


class Deep(nn.Module):
    """Matrices with few even sizes, tied embedding and head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 5)
        self.layers = nn.ModuleList([nn.Linear(5, 7), nn.Linear(7, 3, bias=False), nn.Linear(3, 1), nn.Linear(1, 5)])
        self.head = nn.Linear(5, 11)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


IDS = torch.randint(11, (8, 4), generator=torch.Generator().manual_seed(0))
LOSS = dt.mean_loss(
    lambda model, ids: nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.roll(1, 1).flatten()), weight=len
)


def deep(strategy: str | None, **options) -> list[float]:
    """All parameters after a few steps in a layout."""
    torch.manual_seed(5)
    model: nn.Module = Deep().double()
    world = 1
    if strategy is not None:
        world = dist.get_world_size()
        mesh = dt.build_mesh(dp_replicate=2) if strategy == "hybrid_shard" else dt.build_mesh()
        model = dt.shard_model(model, mesh, strategy=strategy, blocks="layers.*")
    optimizer = Muon(muon_groups(model, head="head.bias", lr=0.05, adamw_lr=0.02, ns_dtype="param", **options))
    step = dt.compose_step(LOSS, [dt.transforms.scale_lr({"matrices": dt.schedules.linear(1.0, 0.0, 6)})])
    state = step.init(model, optimizer)
    share = len(IDS) // world
    rank = dist.get_rank() if strategy is not None else 0
    for _ in range(4):
        state, _ = step(state, IDS[rank * share : (rank + 1) * share])
    return [value for _, param in dt.full_params(state) for value in param.flatten().tolist()]


@pytest.mark.parametrize("strategy", ["full_shard", "hybrid_shard", "replicate"])
def test_every_sharding_layout_matches_one_process(ranks, strategy):
    expected = torch.tensor(deep(None), dtype=torch.float64)
    for params in ranks(4).run(deep, strategy):
        assert ((torch.tensor(params, dtype=torch.float64) - expected).norm() / expected.norm()).item() <= TOLERANCE


def messages() -> list:
    """The collectives of a step of the optimizer alone, and the bytes that this rank puts in and gets out."""
    model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Linear(6, 4, bias=False), nn.Linear(4, 8, bias=False))
    model = dt.shard_model(model, dt.build_mesh(), blocks=(nn.Linear,))
    optimizer = Muon(model.parameters(), ns_dtype="bf16")
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    with count_collectives() as seen:
        optimizer.step()
    shapes = [tuple(optimizer.state[p]["momentum_buffer"].to_local().shape) for p in model.parameters()]
    return [seen.counts(), seen.bytes(), shapes]


def test_step_uses_two_all_to_alls_and_keeps_buffers_sharded(ranks):
    """Three matrices on two ranks are two rounds of two all-to-alls, in bfloat16."""
    for counts, size, shapes in ranks(2).run(messages):
        assert [op for ops in counts.values() for op in ops.items()] == [("all_to_all", 4)]
        here = 2 * (12 + 12 + 16)  # this rank's shards in bfloat16
        assert size <= 4 * here
        assert shapes == [[3, 4], [2, 6], [4, 4]]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Muon([nn.Parameter(torch.ones(3))]),
            r"Muon: parameters of a group with method='muon' must have two dims, got shape \(3,\). .*as muon_groups",
        ),
        (
            lambda: Muon([{"params": matrices(), "method": "sgd"}]),
            "Muon: method of a group must be 'muon' or 'adamw', got 'sgd'",
        ),
        (
            lambda: Muon([{"params": matrices(), "method": "adamw", "momentum": 0.9}]),
            "Muon: options of a group with method='adamw' must be among lr, betas, eps, .* got 'momentum'",
        ),
        (lambda: Muon(matrices(), lr=-1.0), "Muon: lr must be a finite number at least 0, got -1.0"),
        (lambda: Muon(matrices(), lr=torch.tensor(0.1)), r"Muon: lr must be a finite number at least 0, got tensor"),
        (lambda: Muon(matrices(), momentum=1.0), "Muon: momentum must be a finite number at least 0 and below 1, got 1.0"),
        (
            lambda: Muon([{"params": matrices(), "method": "adamw", "betas": (0.9, 1.0)}]),
            r"Muon: betas\[1\] must be a finite number at least 0 and below 1, got 1\.0",
        ),
        (lambda: Muon(matrices(), adjust_lr_fn="rms"), "Muon: adjust_lr_fn must be 'original' or 'match_rms_adamw', got 'rms'"),
        (lambda: Muon(matrices(), ns_dtype="fp16"), "Muon: ns_dtype must be 'bf16', 'fp32' or 'param', got 'fp16'"),
        (lambda: Muon(matrices(), ns_steps=0), "Muon: ns_steps must be an integer of at least 1, got 0"),
        (
            lambda: muon_groups(Deep(), head="nothing"),
            "muon_groups: head='nothing' matches none of 9 trainable parameters. Pass",
        ),
        (
            lambda: muon_groups(Deep(), head="head.*", matrices=["layers.0.weight", "embed.*"]),
            "muon_groups: matrices must match hidden matrices only, got embed.weight, which belongs to an embedding. Use AdamW",
        ),
        (
            lambda: muon_groups(Deep(), head="layers.3.*", matrices="layers.3.weight"),
            "which belongs to the head. Use AdamW",
        ),
        (lambda: muon_groups(Deep(), head=(), matrices="layers.0.*"), "layers.0.bias, which has 1 dims. Use AdamW"),
        (
            lambda: muon_groups(nn.Linear(2, 2), head="*"),
            "muon_groups: no trainable parameter is a hidden matrix. Use torch.optim.AdamW",
        ),
    ],
)
def test_invalid_arguments_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_muon_groups_assign_embeddings_heads_and_filters_to_adamw():
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    groups = {
        g["name"]: g for g in muon_groups(model, head=lambda name, _: name.startswith("3."), nesterov=False, momentum=0.8)
    }
    shapes = {name: [tuple(p.shape) for p in group["params"]] for name, group in groups.items()}
    assert shapes == {
        "matrices": [(4, 3)],
        "adamw": [(3, 2, 3, 3), (2, 4)],
        "adamw.no_decay": [(3,), (4,), (4,), (4,), (2,)],
    }
    assert [(group["method"], group["weight_decay"]) for group in groups.values()] == [
        ("muon", 0.1), ("adamw", 0.1), ("adamw", 0.0)
    ]  # fmt: skip
    optimizer = Muon(groups.values())
    assert optimizer.param_groups[0]["momentum"] == 0.8
    assert [group.get("fused") for group in optimizer.param_groups] == [None, True, True]
    only = muon_groups(nn.Sequential(nn.Linear(2, 2, bias=False)), head=())
    assert [group["name"] for group in only] == ["matrices"]


def test_closure_runs_with_gradients_and_missing_gradients_are_skipped():
    params = matrices()
    optimizer = Muon(params)
    before = [param.detach().clone() for param in params]
    assert optimizer.step(lambda: float(torch.is_grad_enabled())) == 1.0
    assert all(torch.equal(a, b) for a, b in zip(before, params, strict=True))
    assert not optimizer.state
