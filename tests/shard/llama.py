"""A stock Llama of transformers, small and in float64."""

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

VOCAB = 61


def llama(attention: str, kv_heads: int, *, heads: int = 4, **options) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": heads}
    config = LlamaConfig(
        vocab_size=VOCAB,
        max_position_embeddings=64,
        num_key_value_heads=kv_heads,
        attn_implementation=attention,
        **{**sizes, **options},
    )
    net = LlamaForCausalLM(config)
    # The norm of transformers rounds to float32 in every dtype, so no tolerance of float64 would hold.
    for module in list(net.modules()):
        for name, child in module.named_children():
            if isinstance(child, LlamaRMSNorm):
                setattr(module, name, nn.RMSNorm(len(child.weight), eps=child.variance_epsilon))
    net.double()
    for param in net.parameters():
        if param.ndim == 2:
            nn.init.normal_(param, std=0.3)  # so large that attention depends on positions
    return net
