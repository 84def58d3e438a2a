"""The rotary frequencies of a Llama of transformers are not rounded, unless the user asks for it."""

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from dtrain.dist.mesh import build_mesh
from dtrain.shard.fsdp import shard_model
from dtrain.shard.precision import Precision


def llama(precision: Precision | None) -> tuple[torch.Tensor, str]:
    """Return the log-probabilities at positions up to 4,032, and the dtype of the rotary frequencies."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    net = LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=8192, attn_implementation="eager", **sizes))
    for name, param in net.named_parameters():
        if "proj" in name or "embed" in name or "lm_head" in name:
            nn.init.normal_(param, std=0.2)  # so large that attention depends on positions
    net = shard_model(net, build_mesh(), blocks=(LlamaDecoderLayer,), precision=precision)
    ids = torch.randint(0, 64, (1, 64), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = net(input_ids=ids, position_ids=torch.arange(0, 4096, 64).unsqueeze(0)).logits.float()
    return logits.log_softmax(-1), str(net.model.rotary_emb.inv_freq.dtype)


def divergences() -> dict[str, tuple[float, str]]:
    """Return the Kullback-Leibler divergence from float32 and the dtype of the frequencies, for each way to say bfloat16."""
    kinds = {
        "DEFAULT": Precision.preset("DEFAULT", "bf16"),
        "PURE": Precision.preset("PURE", "bf16"),
        "buffers named": Precision(param="bf16", buffer="bf16"),
    }
    exact, _ = llama(None)
    by_preset = {}
    for name, precision in kinds.items():
        logits, dtype = llama(precision)
        by_preset[name] = ((exact.exp() * (exact - logits)).sum(-1).mean().item(), dtype)
    return by_preset


def test_precision_presets_keep_llama_rotary_frequencies_in_float32(ranks):
    by_preset = ranks(2).run(divergences)[0]
    assert by_preset["DEFAULT"][0] < 0.02  # the effect of bfloat16 on the layers themselves
    assert by_preset["DEFAULT"][1] == by_preset["PURE"][1] == "torch.float32"
    assert by_preset["PURE"] == by_preset["DEFAULT"]
    assert by_preset["buffers named"][1] == "torch.bfloat16"
    assert by_preset["buffers named"][0] > 10 * by_preset["DEFAULT"][0]  # the test detects a fault that a preset once had
