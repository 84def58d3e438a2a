"""The first step under ``context_parallel``: models that are exact in parts train as whole, and other models are refused."""

import warnings

import pytest
import torch

from dtrain.dist.dtensor import full_tensor
from dtrain.dist.init import get_dist_info
from dtrain.dist.mesh import build_mesh
from dtrain.errors import ConfigError
from dtrain.monitors.reduce_metrics import reduce_metrics
from dtrain.shard.fsdp import shard_model
from dtrain.step.compose import compose_step
from dtrain.transforms.context_sharding import context_parallel
from shard import sequence_models
from shard.sequence_models import Block, batch, loss_fn

DIMS = {"ids": 1, "labels": 1, "position_ids": -1}
STEPS = 3


def train(kind: str, strategy: str = "full_shard", **options) -> tuple[list[float], torch.Tensor]:
    """Return the losses of some steps and all parameters after them."""
    mesh = build_mesh(cp=2)
    net = shard_model(sequence_models.make(kind), mesh, strategy=strategy, blocks=(Block,))
    buffers = {"**.waves": 0} if kind == "buffer" else None
    step = compose_step(loss_fn, [context_parallel(mesh, batch_seq_dims=DIMS, buffer_seq_dims=buffers, **options)])
    state, losses = step.init(net, torch.optim.SGD(net.parameters(), lr=0.5)), []
    for seed in range(STEPS):
        state, metrics = step(state, batch(seed))
        losses.append(reduce_metrics(metrics)["loss"])
    return losses, torch.cat([full_tensor(param.detach()).flatten() for param in state.params.values()])


def plain(kind: str) -> tuple[list[float], torch.Tensor]:
    """Written without dtrain's step: one process, whole sequences."""
    net, losses = sequence_models.make(kind), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    for seed in range(STEPS):
        loss = loss_fn(net, batch(seed))
        mean = loss.total / loss.weight
        optimizer.zero_grad()
        mean.backward()
        optimizer.step()
        losses.append(mean.item())
    return losses, torch.cat([param.detach().flatten() for param in net.parameters()])


EXACT = ["sdpa", "scale", "grouped queries", "heads", "encoder", "declared positions", "buffer", "position-wise convolution"]
NO_CALL = "the model must attend by scaled_dot_product_attention, got no call of it on rank 0."
LOSS = "the loss of a sequence must be the sum over its parts, got the sum"
REFUSED = {
    "by hand": NO_CALL,
    "flex": NO_CALL,
    "imported by name": NO_CALL,
    "weights of heads": NO_CALL,
    "without attention": NO_CALL,
    "mix": "the module 'second.layer.out' must return the values of the whole sequence for the rank's part, got a relative",
    "over heads": "the module 'first.layer.out' must",
    "counted": "the module 'positions.table' must",
    "convolution": "the module 'over.conv' must",
    "recurrent": "the module 'over.rnn' must",
    "cumulative sum": "the module 'over' must",
    "shift": "the module 'over' must",
    "mean over positions": "the module 'over' must",
    "classifier": LOSS,
    "labels shifted inside": LOSS,
    "mean of each sequence": LOSS,
    "last position": LOSS,
    "mask": "attn_mask must be None, got a mask of shape [8, 8].",
    "not causal": "is_causal must be True, got False.",
    "dropout": "dropout_p must be 0, got 0.5.",
    "three dims": "query must be [batch, heads, seq, dim], got 3 dims.",
    "short keys": "query and key must have the same length, got 8 and 2.",
}


# Heads are exchanged, so only self-attention without a mask and without dropout is exact, also if it is not causal.
ULYSSES_EXACT = [*EXACT, "not causal"]
ULYSSES_REFUSED = {
    **{kind: REFUSED[kind] for kind in ("by hand", "imported by name", "mix", "counted", "recurrent", "last position")},
    "over heads": "scaled_dot_product_attention: query must have 1 rows of 8 tokens, as the batch, got 1 rows of 2 tokens.",
    "mask": REFUSED["mask"].removesuffix("."),
    "dropout": "dropout_p must be 0, got 0.5. Switch the dropout of attention off",
    "three dims": "query, key and value must be [batch, heads, seq, dim], got 3, 3 and 3 dims.",
    "short keys": "query, key and value must have the same length, got 8, 2 and 2.",
}


def differences(kinds: list[str], method: str) -> dict[str, float]:
    largest = {}
    for kind in kinds:
        (losses, params), (expected, whole) = train(kind, method=method), plain(kind)
        errors = [abs(loss - value) for loss, value in zip(losses, expected, strict=True)]
        largest[kind] = max(*errors, (params - whole).abs().max().item())
    return largest


@pytest.mark.costly
@pytest.mark.parametrize(("method", "exact"), [("ring", EXACT), ("ulysses", ULYSSES_EXACT)], ids=["ring", "ulysses"])
def test_models_that_are_exact_in_parts_train_as_in_one_process(ranks, method, exact):
    for largest in ranks(2).run(differences, exact, method):
        assert largest.keys() == set(exact)
        assert max(largest.values()) <= 1e-12, largest


def outcomes(kinds: list[str], method: str) -> dict[str, str]:
    messages = {}
    for kind in kinds:
        try:
            with warnings.catch_warnings():
                # torch warns that flex_attention is not compiled.
                warnings.simplefilter("ignore")
                train(kind, method=method)
        except ConfigError as error:
            messages[kind] = str(error)
        else:
            messages[kind] = "taken"
    return messages


@pytest.mark.costly
@pytest.mark.parametrize(("method", "refused"), [("ring", REFUSED), ("ulysses", ULYSSES_REFUSED)], ids=["ring", "ulysses"])
def test_models_that_are_not_exact_in_parts_are_refused_on_all_ranks(ranks, method, refused):
    first, second = ranks(2).run(outcomes, list(refused), method)
    assert first == second
    for kind, message in refused.items():
        assert first[kind].startswith(("context_parallel: ", "document_attention: ")), (kind, first[kind])
        assert message in first[kind]
        assert "\n" not in first[kind]


class FirstStep:
    """A loss that counts its calls, and fails or draws random numbers on whole sequences, as ``special`` says."""

    def __init__(self, special: str) -> None:
        self.special, self.calls = special, []

    def __call__(self, net, given):
        length = given["ids"].shape[1]
        self.calls.append([length, torch.is_grad_enabled(), net.training])
        if self.special == "no memory" and length == sequence_models.SEQ and get_dist_info().rank == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.00 GiB")
        if self.special == "random":
            torch.rand(1)
        return loss_fn(net, given)


def first_steps(special: str, kind: str, strategy: str, check: bool) -> tuple[list, list[str], bool]:
    """Return the calls of the loss in two steps, the warnings, and True if buffers, modes and random numbers are as before."""
    mesh = build_mesh(cp=2)
    net = shard_model(sequence_models.make(kind), mesh, strategy=strategy, blocks=(Block,))
    loss, transform = FirstStep(special), context_parallel(mesh, batch_seq_dims=DIMS, check=check)
    step = compose_step(loss, [transform])
    state = step.init(net, torch.optim.SGD(net.parameters(), lr=0.5))
    norm = net.over.norm.running_mean.clone()
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for seed in range(2):
            state, _ = step(state, batch(seed))
    drawn = torch.equal(torch.rand(1), expected)
    same = torch.equal(norm, net.over.norm.running_mean) and net.training
    texts = [str(warning.message) for warning in caught if "context_parallel" in str(warning.message)]
    return loss.calls, texts, bool(same and (drawn or special == "random"))


PART, WHOLE = sequence_models.SEQ // 2, sequence_models.SEQ
TRAINING = [[PART, True, True]] * 2


@pytest.mark.parametrize("strategy", ["full_shard", "replicate"])
def test_only_the_first_step_runs_the_loss_again(ranks, strategy):
    for calls, texts, same in ranks(2).run(first_steps, "", "sdpa", strategy, True):
        assert calls == [[PART, False, False], [WHOLE, False, False], *TRAINING]
        assert not texts
        assert same
    for calls, texts, same in ranks(2).run(first_steps, "", "without attention", strategy, False):
        assert calls == TRAINING
        assert not texts
        assert same


def test_parts_that_cannot_be_compared_warn_on_rank_0(ranks):
    for special, reason in (("no memory", "a whole sequence does not fit"), ("random", "loss_fn draws random numbers")):
        first, second = ranks(2).run(first_steps, special, "sdpa", "full_shard", True)
        assert len(first[1]) == 1
        assert reason in first[1][0]
        assert not second[1]
        assert first[0][-2:] == second[0][-2:] == TRAINING
