"""Estimate the memory of a GPT on hundreds of ranks; on a laptop, in seconds.

dtrain plan examples/plan_gpt.py:workload --world 512 --memory 80GiB --precision bf16
dtrain plan examples/plan_gpt.py:workload --world 64 --strategy full_shard --arg layers=48 --seq 8192
"""

import torch
from torch import nn

import dtrain as dt
from helpers.gpt import GPT, Block, GPTConfig


def loss_fn(model: nn.Module, batch: dt.typing.Batch) -> dt.LossSum:
    return dt.cross_entropy(model(batch["input_ids"]), batch["labels"])


def workload(
    *, layers: int = 24, heads: int = 16, dim: int = 2048, seq: int = 2048, vocab: int = 50_304
) -> dt.planning.Workload:
    """The model, loss, batch and optimizer of a training loop, as functions that build them."""
    config = GPTConfig(n_layer=layers, n_head=heads, dim=dim, max_seq=seq, vocab=vocab)

    def batch(samples: int) -> dict[str, torch.Tensor]:
        ids = torch.zeros(samples, seq, dtype=torch.int64)
        return {"input_ids": ids, "labels": ids.clone()}

    return dt.planning.Workload(
        model=lambda: GPT(config),
        loss_fn=loss_fn,
        batch=batch,
        blocks=(Block,),
        optimizer=lambda params: torch.optim.AdamW(params, lr=3e-4),
        transforms=[dt.transforms.clip_by_norm(1.0)],
        batch_seq_dims={"input_ids": 1, "labels": 1},
        buffer_seq_dims={"**.cos": 0, "**.sin": 0},
    )
