"""A stock Llama of transformers under ``context_parallel``: one way is exact, all other ways are refused."""

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import dtrain as dt
from dtrain.dist.dtensor import full_tensor
from dtrain.errors import ConfigError, PeerError
from shard.llama import VOCAB, llama

SEQ, SAMPLES, STEPS = 16, 4, 3
DIMS = {"input_ids": 1, "labels": 1, "position_ids": 1}
TOLERANCE = 1e-12  # largest difference of a loss or a parameter, in float64


def batch(step: int, samples: slice = slice(None)) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, VOCAB, (SAMPLES, SEQ + 1), generator=torch.Generator().manual_seed(step))[samples]
    labels = ids[:, 1:].clone()
    labels[0, 9:] = -100
    return {"input_ids": ids[:, :-1].clone(), "labels": labels, "position_ids": torch.arange(SEQ).repeat(len(ids), 1)}


def loss_fn(net: nn.Module, given: dict[str, torch.Tensor]) -> dt.LossSum:
    return dt.cross_entropy(net(given["input_ids"], position_ids=given.get("position_ids")).logits, given["labels"])


def summed_by_the_model(net: nn.Module, given: dict[str, torch.Tensor]) -> dt.LossSum:
    loss, count = net(**given, use_cache=False).loss, (given["labels"][:, 1:] != -100).sum()
    return dt.LossSum(total=loss * count, weight=count)


def one_process(kv_heads: int) -> tuple[list[float], torch.Tensor]:
    """Plain torch on whole sequences, as without dtrain: stock ``sdpa``, and the model counts the positions."""
    net, losses = llama("sdpa", kv_heads), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3)
    for step in range(STEPS):
        given = batch(step)
        loss = nn.functional.cross_entropy(net(given["input_ids"]).logits.flatten(0, 1), given["labels"].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, torch.cat([param.detach().flatten() for param in net.parameters()])


def trained(
    attention: str,
    kv_heads: int = 4,
    *,
    degrees: dict | None = None,
    strategy: str = "full_shard",
    checkpointed: bool = False,
    drop: str = "",
    labels_in_model: bool = False,
    microbatches: str = "",
) -> tuple[list[float], torch.Tensor]:
    """Return the losses of some steps and all parameters after them."""
    mesh = dt.build_mesh(**(degrees or {"cp": 2}))
    assert dt.shard.register_attention() == "dtrain"
    net = llama(attention, kv_heads)
    if checkpointed:
        dt.shard.checkpoint_activations(net, blocks=(LlamaDecoderLayer,))
    net = dt.shard_model(net, mesh, strategy=strategy, blocks=(LlamaDecoderLayer,))
    dims = {key: dim for key, dim in DIMS.items() if key != drop}
    transforms = [dt.transforms.context_parallel(mesh, batch_seq_dims=dims)]
    if microbatches:
        transforms.insert({"outside": 0, "inside": 1}[microbatches], dt.auto_microbatch(initial_size=1))
    step = dt.compose_step(summed_by_the_model if labels_in_model else loss_fn, transforms)
    state, losses = step.init(net, torch.optim.SGD(net.parameters(), lr=0.3)), []
    index, count = dt.dist.data_rank(mesh)
    own = slice(index * SAMPLES // count, (index + 1) * SAMPLES // count)
    for number in range(STEPS):
        given = batch(number)
        state, metrics = step(state, {key: value[own] for key, value in given.items() if key != drop})
        losses.append(dt.reduce_metrics(metrics)["loss"])
    return losses, torch.cat([full_tensor(param.detach()).flatten() for param in state.params.values()])


CASES = {
    "stock": {},
    "grouped queries": {"kv_heads": 2},
    "one key head": {"kv_heads": 1, "strategy": "replicate"},
    "checkpointed": {"kv_heads": 2, "checkpointed": True},
    "microbatches": {"kv_heads": 2, "microbatches": "outside"},
    "microbatches inside": {"kv_heads": 2, "microbatches": "inside", "strategy": "shard_grad_op"},
}


def differences(cases: dict[str, dict]) -> dict[str, float]:
    largest = {}
    for name, options in cases.items():
        losses, params = trained("dtrain", **options)
        expected_losses, expected = one_process(options.get("kv_heads", 4))
        pairs = zip(losses, expected_losses, strict=True)
        largest[name] = max((params - expected).abs().max().item(), *(abs(loss - value) for loss, value in pairs))
    return largest


@pytest.mark.costly
def test_llama_in_parts_equals_one_process(ranks):
    for largest in ranks(2).run(differences, CASES):
        assert largest.keys() == CASES.keys()
        assert max(largest.values()) <= TOLERANCE, largest


@pytest.mark.costly
def test_llama_in_parts_on_data_parallel_ranks_equals_one_process(ranks):
    grouped = {"kv_heads": 2, "degrees": {"cp": 2}}
    cases = {strategy: {**grouped, "strategy": strategy} for strategy in ("full_shard", "replicate")}
    cases["hybrid_shard"] = {**grouped, "strategy": "hybrid_shard", "degrees": {"cp": 2, "dp_replicate": 2}}
    for largest in ranks(4).run(differences, cases):
        assert max(largest.values()) <= TOLERANCE, largest


REFUSED = {
    "eager": ({"attention": "eager"}, "got no call of it on rank 0"),
    "counted positions": ({"attention": "dtrain", "drop": "position_ids"}, "the module 'model.rotary_emb' must return"),
    "stock sdpa": (
        {"attention": "sdpa", "drop": "position_ids"},
        "the module 'model.rotary_emb' must return",
    ),
    "labels": ({"attention": "dtrain", "labels_in_model": True}, "not by a model's labels="),
    "mask of stock sdpa": ({"attention": "sdpa", "labels_in_model": True}, "attn_mask must be None"),
}


def refusals(cases: list[dict]) -> list[str]:
    messages = []
    for options in cases:
        try:
            trained(**options)
        # A mask that only rank 0 needs fails on rank 0 only.
        except (ConfigError, PeerError) as error:
            messages.append(str(error))
        else:
            messages.append("taken")
    return messages


def test_ways_of_llama_that_are_not_exact_in_parts_are_refused(ranks):
    first, second = ranks(2).run(refusals, [options for options, _ in REFUSED.values()])
    for (name, (_, message)), error, peer in zip(REFUSED.items(), first, second, strict=True):
        assert message in error, (name, error)
        assert "\n" not in error
        assert peer == error or (name == "mask of stock sdpa" and "rank 0 failed" in peer)
