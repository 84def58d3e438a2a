"""Sequences sharded over ``cp``: attention, counts, gradients, and the tensors that are whole again afterwards."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel

from dtrain.data.batch import batch_spec
from dtrain.data.loader import build_loader
from dtrain.dist.dtensor import full_tensor
from dtrain.dist.init import get_dist_info
from dtrain.dist.mesh import build_mesh
from dtrain.errors import ConfigError
from dtrain.losses import cross_entropy
from dtrain.monitors.reduce_metrics import reduce_metrics
from dtrain.shard.fsdp import shard_model
from dtrain.step.compose import compose_step
from dtrain.step.microbatch_step import microbatch_step
from dtrain.transforms.context_sharding import context_parallel
from dtrain.typing import LossSum
from shard.parallel import SAMPLES, SEQ, VOCAB, batch

SPEC = batch_spec({"inputs": "batch seq", "targets": "batch seq"})
TOLERANCE = 1e-12  # norm of the difference over norm of the gradient, in float64


class Net(nn.Module):
    """A table of positions, which must be sharded like the sequence, and causal attention with two heads of queries.

    ``attention`` are further arguments of ``scaled_dot_product_attention``.
    """

    def __init__(self, attention: dict | None = None) -> None:
        super().__init__()
        self.attention = {"is_causal": True} if attention is None else attention
        if "attn_mask" in self.attention:
            self.attention["attn_mask"] = torch.tensor(self.attention["attn_mask"])
        self.embed, self.queries, self.out = nn.Embedding(VOCAB, 6), nn.Linear(6, 12), nn.Linear(12, VOCAB)
        self.register_buffer("positions", torch.linspace(-1, 1, SEQ)[:, None] * torch.ones(6))

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.tanh(self.embed(ids) + self.positions)
        q = self.queries(x).unflatten(-1, (2, 6)).transpose(1, 2)
        key = x[:, None].expand(-1, 2, -1, -1)
        attended = nn.functional.scaled_dot_product_attention(q, key, key.sin(), **self.attention)
        return self.out(attended.transpose(1, 2).flatten(2))


def make() -> nn.Module:
    torch.manual_seed(0)
    return Net().double()


def loss_fn(net: nn.Module, batch: dict) -> LossSum:
    return cross_entropy(net(batch["inputs"]), batch["targets"])


class Samples:
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict:
        return {key: value[-1 - index] for key, value in batch().items()}  # the first batch has no target that counts


def stepped(degrees: dict, strategy: str, global_batch_size: int) -> list:
    mesh = build_mesh(**degrees)
    head = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    net = shard_model(make(), mesh, strategy=strategy, tp_plan={"out": head} if "tp" in degrees else None)
    cut = context_parallel(mesh, batch_seq_dims={"inputs": 1, "targets": 1}, buffer_seq_dims={"pos*": 0})
    # A batch larger than the data, and ranks of which some have no sample.
    loader = build_loader(Samples(), mesh=mesh, global_batch_size=global_batch_size, seed=0, shuffle=False, batch_spec=SPEC)
    grad = partial(microbatch_step, microbatch_size=1, batch_spec=SPEC)
    step = compose_step(loss_fn, [cut], grad=grad)
    state = step.init(net, torch.optim.SGD(net.parameters(), lr=1.0))
    before = {name: full_tensor(p.detach()).clone() for name, p in state.params.items()}
    for given in loader.until("1ba"):
        kept = {key: value.clone() for key, value in given.items()}
        state, metrics = step(state, given)
        untouched = all(torch.equal(kept[key], given[key]) for key in kept)
    moved = {name: before[name] - full_tensor(p.detach()) for name, p in state.params.items()}
    whole = torch.equal(net.positions, make().positions)
    numbers = [state.clock.samples, state.clock.tokens, reduce_metrics(metrics)["loss"]]
    return [difference(moved, global_batch_size), whole and untouched, numbers]


def plain(samples: int) -> tuple[dict, float]:
    """Written without dtrain's step: one process, one batch, torch's own mean over the tokens that count."""
    net, whole = make(), {key: value.flip(0)[:samples] for key, value in batch().items()}
    logits = net(whole["inputs"]).flatten(0, 1)
    loss = nn.functional.cross_entropy(logits, whole["targets"].flatten(), ignore_index=-100)
    loss.backward()
    return {name: p.grad for name, p in net.named_parameters()}, loss.item()


def difference(moved: dict, samples: int) -> float:
    expected, _ = plain(samples)
    error = torch.cat([(moved[name] - expected[name]).flatten() for name in expected]).norm()
    return (error / torch.cat([grad.flatten() for grad in expected.values()]).norm()).item()


@pytest.mark.parametrize(
    ("degrees", "strategy", "samples"),
    [
        ({"cp": 2}, "full_shard", 5),
        pytest.param({"cp": 4}, "replicate", 3, marks=pytest.mark.slow),
        ({"cp": 2, "dp_replicate": 2}, "hybrid_shard", 4),
        ({"cp": 2, "tp": 2}, "full_shard", 5),
        ({"cp": 2}, "full_shard", 1),  # one of the two groups has no sample
    ],
)
def test_context_parallel_gradient_equals_the_single_process_gradient(ranks, degrees, strategy, samples):
    for error, whole, (counted, tokens, loss) in ranks(4).run(stepped, degrees, strategy, samples):
        assert error <= TOLERANCE
        assert whole, "the batch and the model's tables are as before"
        assert (counted, tokens) == (samples, samples * SEQ)
        assert loss == pytest.approx(plain(samples)[1], rel=1e-12)


def refused(case: str) -> str:
    mesh = build_mesh(cp=2)
    dims, buffers = {"inputs": 1}, {}
    try:
        if case == "method":
            context_parallel(mesh, batch_seq_dims=dims, method="all-to-all")
        if case == "documents of the ring":
            context_parallel(mesh, batch_seq_dims=dims, documents="documents")
        if case == "documents in dims":
            context_parallel(mesh, batch_seq_dims={**dims, "documents": 1}, method="ulysses", documents="documents")
        options = {}
        if case in ("no documents", "short documents"):
            options = {"method": "ulysses", "documents": "documents"}
        if case == "no axis":
            context_parallel(build_mesh(), batch_seq_dims=dims)
        if case == "nothing":
            context_parallel(mesh, batch_seq_dims={})
        if case == "key":
            dims = {"tokens": 1}
        if case == "dim":
            dims = {"inputs": 2}
        if case == "lengths":
            dims = {"inputs": 1, "targets": 1}
        if case == "buffer":
            buffers = {"rope": 0}
        if case == "short buffer":
            buffers = {"positions": -1}
        net = shard_model(make(), mesh)
        sharded = context_parallel(mesh, batch_seq_dims=dims, buffer_seq_dims=buffers, **options)
        step = compose_step(loss_fn, [sharded])
        given = batch()
        if case in ("short documents", "unnamed documents"):
            given["documents"] = given["inputs"][:, :4]
        if case == "length":
            given = {key: value[:, :6] for key, value in given.items()}
        if case == "list":
            given["inputs"] = given["inputs"].tolist()
        if case == "lengths":
            given["targets"] = given["targets"][:, :4]
        if case == "names":
            given = [given["inputs"]]
        step(step.init(net, torch.optim.SGD(net.parameters(), lr=1.0)), given)
    except ConfigError as error:
        return str(error)
    return f"taken on rank {get_dist_info().rank}"


REFUSED = [
    (
        "no axis",
        "mesh must have a cp axis, got axes ['dp_replicate', 'dp_shard'] of sizes [1, 2]. "
        "Pass for example dt.build_mesh(cp=2).",
    ),
    ("method", "method must be 'ring' or 'ulysses', got 'all-to-all'."),
    (
        "documents of the ring",
        "documents must be None for the ring, which has no documents, got 'documents'. Pass method='ulysses'.",
    ),
    (
        "documents in dims",
        "documents must not be in batch_seq_dims, got 'documents'. Attention needs the documents of whole rows. Give "
        "positions that restart in each document with the batch.",
    ),
    ("no documents", "the batch has no 'documents', only ['inputs', 'targets']. Correct documents=."),
    (
        "short documents",
        "'documents' must be the document numbers [batch, seq] of whole rows of 8 tokens, got shape [5, 4]. Pass the "
        "'documents' tensor of a packed batch.",
    ),
    (
        "unnamed documents",
        "documents must be the key of the documents of a packed batch, got None for a batch with 'documents'. Pass "
        "method='ulysses', documents='documents', or leave the key out of the batch to attend beyond documents.",
    ),
    ("nothing", "batch_seq_dims must not be empty. Pass for example batch_seq_dims={'input_ids': 1}."),
    ("key", "the batch has no 'tokens', only ['inputs', 'targets']. Name keys of the batch in batch_seq_dims."),
    (
        "buffer",
        "buffer_seq_dims names 'rope', but the model has no such buffer. Print the names with model.named_buffers().",
    ),
    ("length", "the length of dim 1 of 'inputs' must be a multiple of 2 * cp = 4, got 6. Pad the sequences."),
    ("dim", "'inputs' must be a tensor with a dim 2, got shape [5, 8]. Correct batch_seq_dims."),
    ("list", "'inputs' must be a tensor with a dim 1, got list. Correct batch_seq_dims."),
    ("lengths", "the length of 'targets' must be that of 'inputs', 8, got 4. Pad the sequences to one length."),
    (
        "short buffer",
        "dim -1 of the buffer 'positions' must hold at least 8 positions, got shape [8, 6]. Correct buffer_seq_dims.",
    ),
    ("names", "batch must be a mapping of tensors, got list. Return a dict from the collate function."),
]


@pytest.mark.parametrize(("case", "message"), REFUSED, ids=[case for case, _ in REFUSED])
def test_invalid_arguments_are_refused(ranks, case, message):
    assert ranks(2).run(refused, case) == [f"context_parallel: {message}"] * 2


def step_with(attention: dict, check: bool) -> str:
    """Return the error of a step whose attention has these arguments. torch's attention and the model are as before."""
    mesh = build_mesh(cp=2)
    torch.manual_seed(0)
    net = shard_model(Net(dict(attention)).double(), mesh)
    dims = {"inputs": 1, "targets": 1}
    sharded = context_parallel(mesh, batch_seq_dims=dims, buffer_seq_dims={"pos*": 0}, check=check)
    step = compose_step(loss_fn, [sharded])
    state = step.init(net, torch.optim.SGD(net.parameters(), lr=1.0))
    attend = nn.functional.scaled_dot_product_attention
    try:
        step(state, batch())
    except ConfigError as error:
        assert nn.functional.scaled_dot_product_attention is attend
        assert torch.equal(net.positions, make().positions)
        return str(error)
    return "taken"


MASK = [[0.0] * (SEQ // 2)] * (SEQ // 2)
ATTENTION = {
    "is_causal must be True, got False": {"is_causal": False},
    "dropout_p must be 0, got 0.5": {"is_causal": True, "dropout_p": 0.5},
    "attn_mask must be None, got a mask of shape [4, 4]": {"attn_mask": MASK},
}


def step_with_each(arguments: dict[str, dict]) -> list[str]:
    """Return the errors with and without the comparison of the first step."""
    return [step_with(attention, check=check) for attention in arguments.values() for check in (True, False)]


def test_attention_that_the_ring_cannot_compute_is_refused(ranks):
    start = "context_parallel: scaled_dot_product_attention"
    end = "Use causal self-attention without a mask and without dropout; for transformers see docs/parallelism.md."
    for messages in ranks(2).run(step_with_each, ATTENTION):
        expected = [f"{start}: {message}. {end}" for message in ATTENTION]
        assert messages == [message for message in expected for _ in range(2)]
