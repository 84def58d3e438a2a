"""Functions of experts against loops over rows, grouped products against a loop over experts, and refusals by name."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dtrain as dt
from dtrain import experts as experts_module
from dtrain.dist.init import get_dist_info
from dtrain.errors import ConfigError, DtrainError
from dtrain.experts import (
    Experts,
    Router,
    count_choices,
    grouped_linear,
    load_balancing_loss,
    route,
    router_terms,
    router_z_loss,
    set_shares_,
)

COUNTS = torch.tensor([3, 0, 5, 1, 0])


def grouped(dtype: torch.dtype, *, inputs: int = 8, outputs: int = 16) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return output and gradients of ``grouped_linear``, and those of a loop over experts."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(9, inputs, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(5, outputs, inputs, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    results = []
    by_loop = torch.cat([part @ matrix.T for part, matrix in zip(x.split(COUNTS.tolist()), weight, strict=True)])
    for out in (grouped_linear(x, weight, COUNTS), by_loop):
        # A sum, whose gradient is one number that is expanded.
        results.append([out, *torch.autograd.grad(out.sum(), [x, weight])])
    return results[0], results[1]


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-5), (torch.bfloat16, 0.1)], ids=str
)
@pytest.mark.parametrize("inputs", [8, 5], ids=["aligned", "not a multiple of 16 bytes"])
def test_grouped_product_equals_a_loop_over_experts(dtype, tolerance, inputs):
    for ours, expected in zip(*grouped(dtype, inputs=inputs), strict=True):
        torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance)


def test_grouped_product_runs_in_torch_where_it_can(monkeypatch):
    """A loop would pass the test above, too."""
    if not hasattr(F, "grouped_mm"):
        pytest.skip("this torch has no grouped_mm")
    calls = []
    monkeypatch.setattr(F, "grouped_mm", lambda *args, **kwargs: calls.append(args) or torch.zeros(9, 16))
    for dtype in (torch.float32, torch.float64):
        grouped_linear(torch.zeros(9, 8, dtype=dtype), torch.zeros(5, 16, 8, dtype=dtype), COUNTS)
    assert len(calls) == 1
    monkeypatch.delattr(F, "grouped_mm")
    assert grouped_linear(torch.zeros(9, 8), torch.zeros(5, 16, 8), COUNTS).shape == (9, 16)


def test_grouped_product_computes_in_the_dtype_of_autocast():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert grouped_linear(torch.zeros(9, 8), torch.zeros(5, 16, 8), COUNTS).dtype == torch.bfloat16
        router = Router(8, 5, top_k=2)
        routing = router(torch.randn(3, 8))
        assert routing.logits.dtype == routing.gates.dtype == torch.float32


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("rows", [7, 0])
def test_experts_equal_a_loop_over_rows(gated, rows):
    torch.manual_seed(0)
    router, experts = Router(4, 5, top_k=3, scale=1.5).double(), Experts(4, 6, 5, gated=gated).double()
    x = torch.randn(rows, 4, dtype=torch.float64, requires_grad=True)
    routing = router(x)
    expected = x * 0
    for row in range(rows):
        for gate, e in zip(routing.gates[row], routing.experts[row].tolist(), strict=True):
            up = experts.up[e] @ x[row]
            hidden = F.silu(up) if experts.gate is None else F.silu(experts.gate[e] @ x[row]) * up
            expected[row] = expected[row].clone() + gate * (experts.down[e] @ hidden)
    out = experts(x, routing)
    torch.testing.assert_close(out, expected, rtol=0.0, atol=1e-14)
    params = [x, *experts.parameters(), router.weight]
    grads = [torch.autograd.grad(y.square().sum(), params, retain_graph=True, materialize_grads=True) for y in (out, expected)]
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.0, atol=1e-13)
    torch.testing.assert_close(routing.gates.sum(-1), torch.full((rows,), 1.5, dtype=torch.float64))


def test_bias_decides_the_choice_and_not_the_gates():
    logits = torch.tensor([[2.0, 1.0, 0.0]], requires_grad=True)
    plain = route(logits, top_k=2, normalize=False)
    biased = route(logits, top_k=2, normalize=False, bias=torch.tensor([0.0, 0.0, 1.0]))
    assert plain.experts.tolist() == [[0, 1]]
    assert biased.experts.tolist() == [[2, 0]]
    assert torch.equal(biased.gates, logits.softmax(-1)[:, [2, 0]])


def test_rows_that_a_mask_leaves_out_are_routed_and_do_not_count():
    mask = torch.tensor([[True, True, False], [False, False, False]])
    logits = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    share = torch.tensor([0.5, 0.25, 0.25, 0.0], dtype=torch.float64)
    masked, alone = route(logits, top_k=2, share=share, mask=mask), route(logits[:1, :2], top_k=2, share=share)
    assert torch.equal(count_choices(masked), count_choices(alone))
    for loss in (load_balancing_loss, router_z_loss, lambda r: load_balancing_loss(r, scope="sequence")):
        for ours, expected in zip(loss(masked), loss(alone), strict=True):
            torch.testing.assert_close(ours, expected, rtol=0.0, atol=1e-14)


def test_losses_split_into_sums_over_rows():
    generator = torch.Generator().manual_seed(0)
    logits, share = torch.randn(6, 5, 4, generator=generator, dtype=torch.float64), torch.rand(4, generator=generator).double()
    whole = router_terms([route(logits, top_k=2, share=share)] * 2, balance=0.1, sequence=0.2, z=0.3)
    parts = [
        router_terms([route(part, top_k=2, share=share)] * 2, balance=0.1, sequence=0.2, z=0.3) for part in logits.split(4)
    ]
    for name, (total, weight) in whole.items():
        torch.testing.assert_close(sum(part[name][0] for part in parts), total, rtol=0.0, atol=1e-14)
        assert sum(part[name][1] for part in parts) == weight
    assert {name: float(weight) for name, (_, weight) in whole.items()} == {"balance": 30, "sequence": 6, "z": 30}


def test_even_load_has_a_loss_of_one_and_one_expert_the_largest():
    even = route(torch.zeros(8, 4), top_k=1, share=torch.full((4,), 0.25))
    total, weight = load_balancing_loss(even)
    assert float(total / weight) == pytest.approx(1.0)
    one = route(torch.tensor([[100.0, 0.0, 0.0, 0.0]]), top_k=1, share=torch.tensor([1.0, 0.0, 0.0, 0.0]))
    assert float(load_balancing_loss(one)[0]) == pytest.approx(4.0)


def test_counters_of_evaluations_stay():
    router = Router(4, 5, top_k=2)
    router.eval()(torch.randn(3, 4))
    assert router.load.sum() == 0
    router.train()(torch.randn(3, 4))
    assert router.load.sum() == 6
    set_shares_(router, {"load": torch.zeros(5)})
    assert router.share.tolist() == pytest.approx([0.2] * 5), "nothing was counted"


def test_router_and_experts_are_filled_on_the_meta_device():
    with torch.device("meta"):
        model = nn.ModuleDict({"router": Router(4, 5, top_k=2), "experts": Experts(4, 6, 5)})
    model = dt.materialize(model, seed=0)
    assert model["router"].bias.tolist() == [0.0] * 5
    assert model["router"].share.tolist() == pytest.approx([0.2] * 5)
    assert model["router"].load.tolist() == [0] * 5
    assert 0.3 < model["experts"].up.std() < 0.7


class Layer(nn.Module):
    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.router, self.experts = Router(4, experts, top_k=2), Experts(4, 6, experts)

    def forward(self, x):
        return self.experts(x, self.router(x))


LOSS = dt.mean_loss(lambda model, x: model(x).square().mean(), weight=len)


def start(model: nn.Module, rate: float = 0.1, **names: str) -> tuple[dt.step.Step, dt.TrainState]:
    step = dt.compose_step(LOSS, [dt.transforms.balance_experts(rate, **names)])
    return step, step.init(model, torch.optim.SGD(model.parameters(), lr=0.1), allow_equal_batches=True)


def test_checkpoint_of_another_number_of_experts_is_refused(tmp_path):
    step, state = start(Layer(4))
    state, _ = step(state, torch.randn(8, 4))
    dt.save_sharded(tmp_path, state)
    _, other = start(Layer(6))
    before = {name: value.clone() for name, value in other.model.state_dict().items()}
    with pytest.raises(DtrainError, match=r"router\.(weight|bias|share)") as refused:
        dt.load_sharded(tmp_path, other)
    assert "4" in str(refused.value)
    assert "6" in str(refused.value)
    assert all(torch.equal(value, before[name]) for name, value in other.model.state_dict().items())


def with_bias(bias: object, *, load: torch.Tensor | None = None) -> nn.Module:
    model = Layer()
    del model.router.bias
    if bias is not None:
        setattr(model.router, "bias", bias) if isinstance(bias, nn.Parameter) else model.router.register_buffer("bias", bias)
    return model


REFUSED = [
    (lambda: Router(4, 3, top_k=4), "Router: top_k must be at most the number of experts (3), got 4. Lower top_k, or add"),
    (lambda: Router(4, 3, top_k=0), "Router: top_k must be an integer of at least 1, got 0"),
    (lambda: Router(4, 3, top_k=1, scoring="relu"), "Router: scoring must be 'softmax' or 'sigmoid', got 'relu'"),
    (lambda: Router(4, 3, top_k=1, scale=0.0), "Router: scale must be a finite number above 0, got 0.0"),
    (lambda: Experts(4, 0, 3), "Experts: hidden must be an integer of at least 1, got 0"),
    (lambda: route(torch.zeros(2, 3), top_k=4), "route: top_k must be at most the number of experts (3), got 4."),
    (
        lambda: route(torch.zeros(2, 3), top_k=1, bias=torch.zeros(4)),
        "route: bias must have shape (3,), one number per expert, got (4,). Make it with the router's number of experts.",
    ),
    (
        lambda: route(torch.zeros(2, 3), top_k=1, bias=nn.Parameter(torch.zeros(3))),
        "route: bias must need no gradient, got a parameter. Register it as a buffer:",
    ),
    (
        lambda: route(torch.zeros(2, 3), top_k=1, mask=torch.ones(2)),
        "route: mask must be bool (2,), one value per row, got torch.float32 (2,). Write for example",
    ),
    (
        lambda: load_balancing_loss(route(torch.zeros(2, 3), top_k=1)),
        "load_balancing_loss: routing.share must be the shares of a global batch, got None. Use dt.experts.Router",
    ),
    (
        lambda: load_balancing_loss(route(torch.zeros(2, 3), top_k=1), scope="sequence"),
        "load_balancing_loss: routing must have rows [*, seq] for scope='sequence', got [2]. Route before you flatten",
    ),
    (lambda: router_terms([], z=1.0), "router_terms: routings must have a routing per router, got none."),
    (
        lambda: router_terms([route(torch.zeros(2, 3), top_k=1)], z=-1.0),
        "router_terms: z must be a finite number at least 0, got -1.0",
    ),
    (
        lambda: Experts(4, 6, 3)(torch.zeros(2, 4), route(torch.zeros(2, 5), top_k=1)),
        "Experts: routing must be of the rows (2,) to 3 experts, got rows (2,) to 5. Route the same rows",
    ),
    (lambda: dt.transforms.balance_experts(-1.0), "balance_experts: rate must be a finite number at least 0, got -1.0"),
    (
        lambda: start(nn.Linear(4, 4)),
        "balance_experts: the model must have a module with a buffer 'load', got none. Route with dt.experts.Router",
    ),
    (
        lambda: start(with_bias(nn.Parameter(torch.zeros(4)))),
        "balance_experts: the bias 'router.bias' must be a buffer, got a parameter, which is sharded and decays. Register it",
    ),
    (lambda: start(with_bias(None)), "balance_experts: the router 'router' must have a buffer 'bias', got none. Register one"),
    (
        lambda: start(with_bias(torch.zeros(5))),
        "balance_experts: the bias 'router.bias' must have one number per expert, (4,), got (5,). Make it as long as the load.",
    ),
    (
        lambda: start(Layer().bfloat16()),
        "balance_experts: the bias 'router.bias' must be float32 or float64, got torch.bfloat16, which loses small changes.",
    ),
]


@pytest.mark.parametrize(("make", "message"), REFUSED, ids=[message[:60] for _, message in REFUSED])
def test_bad_input_is_refused_with_advice(make, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        make()


def test_a_rate_of_zero_needs_no_bias():
    step, state = start(with_bias(None), rate=0)
    model = state.model
    model.router.bias = None
    state, metrics = step(state, torch.randn(8, 4))
    assert model.router.share.sum() == pytest.approx(1.0)
    assert metrics["max_violation"].total > 0


class Own(nn.Module):
    """A router of another library: other names of buffers, and a counter in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 4, bias=False)
        self.register_buffer("expert_bias", torch.zeros(4))
        self.register_buffer("tokens_per_expert", torch.zeros(4), persistent=False)

    def forward(self, x):
        scores = self.gate(x).sigmoid()
        chosen = (scores + self.expert_bias).argmax(-1)
        self.tokens_per_expert += torch.bincount(chosen, minlength=4)
        return x * scores.gather(-1, chosen[:, None])


NAMES = {"bias": "expert_bias", "load": "tokens_per_expert"}
X = torch.randn(16, 4, generator=torch.Generator().manual_seed(2))


def own_router(buffers) -> list:
    torch.manual_seed(0)
    model = dt.shard_model(nn.Sequential(Own()), dt.build_mesh(), buffers=buffers)
    try:
        step, state = start(model, 0.25, **NAMES)
    except ConfigError as error:
        return [str(error)]
    rank = get_dist_info().rank
    for _ in range(3):
        state, _ = step(state, X[8 * rank : 8 * rank + 8])
    return [model[0].expert_bias.tolist(), model[0].tokens_per_expert.tolist()]


def test_other_routers_balance_if_ranks_sum_their_load(ranks):
    torch.manual_seed(0)
    model = nn.Sequential(Own())
    step, state = start(model, 0.25, **NAMES)
    for _ in range(3):
        state, _ = step(state, X)
    expected = [model[0].expert_bias.tolist(), model[0].tokens_per_expert.tolist()]
    assert ranks(2).run(own_router, {"**.tokens_per_expert": "sum"}) == [expected, expected]
    for (message,) in ranks(2).run(own_router, None):
        assert (
            "balance_experts: ranks must sum the buffer '0.tokens_per_expert', got buffers=None, so the load would be"
            in message
        )
        assert "Pass shard_model(buffers={'**.tokens_per_expert': 'sum'})." in message


def counted(buffers) -> list[int]:
    model = dt.shard_model(nn.Sequential(Layer()), dt.build_mesh(), buffers=buffers)
    step, state = start(model)
    rank = get_dist_info().rank
    step(state, X[8 * rank : 8 * rank + 8])
    return [int(model[0].router.load.sum())]


@pytest.mark.parametrize("buffers", [None, "mean", {"**": "broadcast"}], ids=str)
def test_load_of_a_router_is_a_sum_whatever_is_chosen(ranks, buffers):
    assert ranks(2).run(counted, buffers) == [[32], [32]]


def test_public_names_are_defined_here():
    assert {"Router", "Experts", "Routing", "route"} <= set(vars(experts_module))
