"""A small GPT, ways to cut it over ``tp``, a ragged batch, and a plain reference in one process."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel

from dtrain.dist.dtensor import full_tensor
from dtrain.dist.init import get_dist_info
from dtrain.losses import cross_entropy
from dtrain.typing import LossSum
from helpers.gpt import GPT, GPTConfig

SAMPLES, SEQ, VOCAB = 5, 8, 12


class Tied(GPT):
    """The head's weight is the embedding; a frozen norm."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        self.head.weight = self.embedding.weight
        self.blocks[0].mlp_norm.requires_grad_(False)
        self.blocks[1].mlp.up.requires_grad_(False)


def make(kind: type[GPT] = GPT, *, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return kind(GPTConfig(n_layer=2, n_head=4, dim=16, max_seq=SEQ, vocab=VOCAB, mlp_ratio=3)).to(dtype)


def layers() -> dict[str, Any]:
    """Attention by heads, MLP by channels; the rest is whole along ``tp``."""
    plan = {f"blocks.*.attention.{name}": ColwiseParallel() for name in "qkv"}
    return plan | {
        "blocks.*.attention.out": RowwiseParallel(),
        "blocks.*.mlp.up": ColwiseParallel(),
        "blocks.*.mlp.down": RowwiseParallel(),
    }


def vocabulary() -> dict[str, Any]:
    """The same, and the vocabulary: embedding, head and loss."""
    head = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    return layers() | {"embedding": RowwiseParallel(input_layouts=Replicate()), "head": head}


def sequence() -> dict[str, Any]:
    """The same, and between the layers each rank has a part of the sequence."""
    gather = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    return layers() | {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "blocks.*.*_norm": SequenceParallel(),
        "blocks.*.attention": gather,
        "blocks.*.mlp": gather,
        "blocks.*.attention.out": RowwiseParallel(output_layouts=Shard(1)),
        "blocks.*.mlp.down": RowwiseParallel(output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }


PLANS = {"layers": layers, "vocabulary": vocabulary, "sequence": sequence}


def batch() -> dict[str, Tensor]:
    """Every sample has another number of targets that count, one of them none."""
    generator = torch.Generator().manual_seed(1)
    inputs, targets = torch.randint(VOCAB, (2, SAMPLES, SEQ), generator=generator)
    for sample in range(SAMPLES):
        targets[sample, 2 * sample :] = -100
    return {"inputs": inputs, "targets": targets}


def share(data_rank: int, data_ranks: int) -> dict[str, Tensor]:
    mine = slice(data_rank * SAMPLES // data_ranks, (data_rank + 1) * SAMPLES // data_ranks)
    return {key: value[mine] for key, value in batch().items()}


def loss_fn(net: nn.Module, batch: dict) -> LossSum:
    return cross_entropy(net(batch["inputs"]), batch["targets"])


def reference(kind: type[GPT] = GPT) -> dict[str, Tensor | None]:
    """Written without dtrain's step: one process, one batch, torch's own mean over the tokens that count."""
    net, whole = make(kind), batch()
    logits = net(whole["inputs"])
    nn.functional.cross_entropy(logits.flatten(0, 1), whole["targets"].flatten(), ignore_index=-100).backward()
    return {name: p.grad for name, p in net.named_parameters()}


def difference(params: dict, expected: dict) -> float:
    """Norm of the gradient's error over norm of the gradient; infinite when a parameter lacks a gradient on one side."""
    if any((p.grad is None) != (expected[name] is None) for name, p in params.items()):
        return float("inf")
    pairs = [(full_tensor(p.grad), expected[name]) for name, p in params.items() if p.grad is not None]
    error = torch.cat([(a - b).flatten() for a, b in pairs]).norm()
    return (error / torch.cat([b.flatten() for _, b in pairs]).norm()).item()


def degrees(strategy: str, tp: int) -> dict[str, int]:
    world = get_dist_info().world_size
    return {"dp_replicate": min(2, world // tp) if strategy == "hybrid_shard" else 1, "tp": tp}
