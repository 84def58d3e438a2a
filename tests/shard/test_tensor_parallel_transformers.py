"""The tensor-parallel plan of models of transformers: training and checkpoints are those of one process."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import dtrain as dt
from dtrain.checkpoint.load import load_sharded
from dtrain.checkpoint.save import save_sharded
from dtrain.dist.dtensor import full_tensor
from dtrain.dist.mesh import build_mesh
from dtrain.errors import ConfigError
from dtrain.losses import transformers_loss
from dtrain.monitors.reduce_metrics import reduce_metrics
from dtrain.shard.activations import compile_blocks
from dtrain.shard.fsdp import shard_model
from dtrain.shard.precision import Precision
from dtrain.shard.unshard import full_params
from dtrain.state import init_state
from dtrain.step.compose import compose_step
from dtrain.step.microbatch_step import microbatch_step
from dtrain.transforms.gradients.clipping import clip_by_norm

TOLERANCE = 1e-12  # of float64; rounding gives about 1e-15
STEPS, VOCAB = 3, 32
KINDS: dict[str, Any] = {
    "llama": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": False}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"tie_word_embeddings": False, "head_dim": 6}),
}


def model_of(kind: str, *, own_norms: bool = False) -> PreTrainedModel:
    model, config, options = KINDS[kind]
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    made = model(config(vocab_size=VOCAB, num_hidden_layers=2, **sizes, **options))
    # The norms of transformers round to float32 in every dtype, so no tolerance of float64 would hold.
    for module in [] if own_norms else list(made.modules()):
        for name, child in module.named_children():
            if type(child).__name__.endswith("RMSNorm"):
                setattr(module, name, nn.RMSNorm(len(child.weight), eps=child.variance_epsilon))
    made.double()
    with torch.no_grad():
        for param in made.parameters():  # norms and biases begin equal everywhere, which would hide a mixture of heads
            param.add_(0.05 * torch.randn_like(param))
    return made


def layers_of(model: PreTrainedModel) -> tuple[type[nn.Module], ...]:
    return (type(model.model.layers[0]),)


def whole_batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCAB, (4, 7), generator=generator)
    labels, mask = ids.clone(), torch.ones_like(ids)
    for sample in range(4):
        labels[sample, : sample + 1] = -100
        mask[sample, 7 - sample :] = 0
    labels[mask == 0] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def share(rank: int, ranks: int) -> dict[str, torch.Tensor]:
    return {key: value[rank * 4 // ranks : (rank + 1) * 4 // ranks] for key, value in whole_batch().items()}


def loss_fn(model: nn.Module, batch: dict[str, torch.Tensor]) -> dt.LossSum:
    """The loss of the model in the dtype of its logits; its own one is that of float32."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return dt.cross_entropy(logits[:, :-1], batch["labels"][:, 1:])


def reference(kind: str, *, own_norms: bool = False) -> tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """One process, without dtrain: losses, first gradients, and weights after the steps."""
    net, batch, losses, gradients = model_of(kind, own_norms=own_norms), whole_batch(), [], {}
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for _ in range(STEPS):
        optimizer.zero_grad()
        logits = net(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
        loss.backward()
        gradients = gradients or {name: param.grad.clone() for name, param in net.named_parameters()}
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    return losses, gradients, {name: param.detach() for name, param in net.named_parameters()}


def error(values: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Norm of the difference over norm of the values."""
    assert values.keys() == expected.keys()
    whole = torch.cat([expected[name].flatten() for name in expected])
    return ((torch.cat([values[name].flatten() for name in expected]) - whole).norm() / whole.norm()).item()


def shard_by_own_plan(model, layer):
    mesh = dt.build_mesh(tp=2)
    return dt.shard_model(model, mesh, blocks=(layer,), tp_plan="auto")


def trained(kind: str, root: str, options: dict[str, Any], compiled: bool) -> list[float]:
    net = model_of(kind)
    blocks = layers_of(net)
    mesh = build_mesh(tp=2)
    net = shard_model(net, mesh, blocks=blocks, tp_plan="auto", **options)
    if compiled:
        net = compile_blocks(net, blocks=blocks, backend="aot_eager")
    split = [name for name, p in net.named_parameters() if "tp" in (p.device_mesh.mesh_dim_names or ())]
    assert len(split) >= 2 * 7, "the plan must split the layers"
    step = compose_step(loss_fn, [clip_by_norm(0.5)], microbatch_size=1)
    state = step.init(net, torch.optim.AdamW(net.parameters(), lr=0.01))
    mine = share(state.spec.data_rank, state.spec.data_ranks)
    losses, _, weights = reference(kind)
    errors = []
    for number in range(STEPS):
        state, metrics = step(state, mine)
        errors.append(abs(reduce_metrics(metrics)["loss"] - losses[number]))
    errors.append(error(dict(full_params(state)), weights))
    save_sharded(root, state)
    return errors


def gradient(kind: str, *, own_norms: bool = False) -> float:
    net = model_of(kind, own_norms=own_norms)
    net = shard_by_own_plan(net, layers_of(net)[0])
    state = init_state(net, torch.optim.SGD(net.parameters(), lr=0.1))
    mine = share(state.spec.data_rank, state.spec.data_ranks)
    state, _ = microbatch_step(state, mine, loss_fn=loss_fn, microbatch_size=1)
    gradients = {name: full_tensor(p.grad) for name, p in state.params.items()}
    return error(gradients, reference(kind, own_norms=own_norms)[1])


def by_the_plan(kind: str, root: str) -> list[float]:
    # The norms of transformers are those of float32.
    return [gradient(kind, own_norms=True), gradient(kind), *trained(kind, root, {}, False)]


def resumed(kind: str, root: str, options: dict[str, Any]) -> float:
    net = model_of(kind)
    with torch.no_grad():
        for param in net.parameters():
            param.zero_()
    net = shard_model(net, build_mesh(), blocks=layers_of(net), **options)
    step = compose_step(loss_fn, [clip_by_norm(0.5)])
    state = load_sharded(root, step.init(net, torch.optim.AdamW(net.parameters(), lr=0.01)))
    return error(dict(full_params(state)), reference(kind)[2])


@pytest.mark.costly
@pytest.mark.parametrize("kind", KINDS)
def test_training_by_the_models_plan_equals_one_process_and_its_checkpoint_loads_elsewhere(tmp_path, ranks, kind):
    for rounded, *errors in ranks(4).run(by_the_plan, kind, str(tmp_path)):
        assert rounded <= 1e-5
        assert max(errors) <= TOLERANCE
    for value in ranks(2).run(resumed, kind, str(tmp_path), {}):
        assert value <= TOLERANCE


TOGETHER: dict[str, Any] = {
    "offload": ({"offload": "params"}, False),
    "compiled": ({}, True),
    "replicate": ({"strategy": "replicate"}, False),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", TOGETHER)
def test_the_plan_stands_beside_other_options(tmp_path, ranks, case):
    options, compiled = TOGETHER[case]
    for errors in ranks(4).run(trained, "qwen3", str(tmp_path), options, compiled):
        assert max(errors) <= TOLERANCE


def cast(kind: str) -> list[float]:
    options = {"precision": Precision(param="bf16", overrides={"**.self_attn": "fp32", "lm_head": "fp32"})}
    net = model_of(kind).float()
    net = shard_model(net, build_mesh(tp=2), blocks=layers_of(net), tp_plan="auto", **options)
    step = compose_step(transformers_loss, microbatch_size=1)
    state = step.init(net, torch.optim.AdamW(net.parameters(), lr=0.01))
    losses = []
    for _ in range(STEPS):
        state, metrics = step(state, share(state.spec.data_rank, state.spec.data_ranks))
        losses.append(reduce_metrics(metrics)["loss"])
    return losses


@pytest.mark.slow
def test_the_plan_stands_beside_islands_of_float32(ranks):
    for losses in ranks(4).run(cast, "llama"):
        assert losses == pytest.approx(reference("llama")[0], rel=0.03)  # of bfloat16


class Around(nn.Module):
    """A model of one's own around a model of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = model_of("llama")


def names_planned() -> list:
    net = shard_model(Around(), build_mesh(tp=2), tp_plan="auto")
    return sorted(name for name, p in net.named_parameters() if "tp" in (p.device_mesh.mesh_dim_names or ()) and ".0." in name)


def test_a_plan_is_found_inside_of_another_model(ranks):
    for names in ranks(2).run(names_planned):
        assert "inner.model.layers.0.self_attn.q_proj.weight" in names
        assert "inner.model.layers.0.mlp.down_proj.weight" in names


def deepseek() -> PreTrainedModel:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "moe_intermediate_size": 8, "num_attention_heads": 4}
    experts = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "q_lora_rank": 8}
    heads = {"kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4, "num_key_value_heads": 4}
    return DeepseekV3ForCausalLM(DeepseekV3Config(vocab_size=VOCAB, num_hidden_layers=2, **sizes, **experts, **heads))


def odd_heads() -> PreTrainedModel:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=8, hidden_size=24, intermediate_size=8, num_hidden_layers=1, num_attention_heads=6, num_key_value_heads=3
        )
    )


REFUSED: dict[str, Any] = {
    "linear": (lambda: nn.Linear(2, 2), "tp_plan='auto' needs a model of transformers with a plan, got Linear. Pass a mapping"),
    "deepseek": (deepseek, "needs styles that torch has, but the plan of DeepseekV3ForCausalLM contains "),
    "heads": (odd_heads, "tp must divide num_key_value_heads=3 for tp_plan='auto', got tp=2. Use a smaller tp."),
}


def refused() -> list[str]:
    messages = []
    for make, _ in REFUSED.values():
        try:
            shard_model(make(), build_mesh(tp=2), tp_plan="auto")
        except ConfigError as problem:
            messages.append(str(problem))
    return messages


def test_a_plan_that_torch_cannot_express_is_refused_by_name(ranks):
    for messages in ranks(2).run(refused):
        for message, (_, expected) in zip(messages, REFUSED.values(), strict=True):
            assert expected in message
        assert "'model.layers.*.mlp.experts.gate_up_proj': 'packed_colwise'" in messages[1]
