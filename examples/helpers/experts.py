"""A byte-level GPT whose MLPs are experts, and its loss with the losses of the routers."""

import math

import torch.nn.functional as F
from torch import Tensor, nn

import dtrain as dt
from helpers.gpt import Attention, GPTConfig, Linear, residual_gain


def squared_relu(x: Tensor) -> Tensor:
    return F.relu(x).square()


class MLPExperts(dt.experts.Experts):
    """Experts of two matrices, drawn as those of the dense MLP: the output has ``gain`` times the deviation of its input."""

    def __init__(self, dim: int, hidden: int, experts: int, gain: float) -> None:
        self.gain = gain  # before super().__init__, which calls reset_parameters
        super().__init__(dim, hidden, experts, activation=squared_relu, gated=False)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.up, std=1 / math.sqrt(self.dim))
        nn.init.normal_(self.down, std=self.gain / math.sqrt(self.hidden))


class ExpertBlock(nn.Module):
    """Attention and experts, each behind a norm: ``[batch, seq, dim] -> [batch, seq, dim]`` and the routing."""

    def __init__(self, config: GPTConfig, experts: int, top_k: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=1e-6)
        self.attention = Attention(config)
        self.experts_norm = nn.RMSNorm(config.dim, eps=1e-6)
        self.router = dt.experts.Router(config.dim, experts, top_k=top_k, scoring="sigmoid")
        # A row passes through top_k experts, together as wide as the dense MLP.
        self.experts = MLPExperts(config.dim, config.mlp_ratio * config.dim // top_k, experts, residual_gain(config))

    def forward(self, x: Tensor) -> tuple[Tensor, dt.experts.Routing]:
        x = x + self.attention(self.attention_norm(x))
        rows = self.experts_norm(x)
        routing = self.router(rows)
        return x + self.experts(rows, routing), routing


class ExpertGPT(nn.Module):
    """Bytes in; inputs of the head and the routing of each block out."""

    def __init__(self, config: GPTConfig, experts: int, top_k: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab, config.dim)
        self.blocks = nn.ModuleList(ExpertBlock(config, experts, top_k) for _ in range(config.n_layer))
        self.norm = nn.RMSNorm(config.dim, eps=1e-6)
        self.head = Linear(config.dim, config.vocab)

    def forward(self, input_ids: Tensor) -> tuple[Tensor, list[dt.experts.Routing]]:
        x, routings = self.embedding(input_ids), []
        for block in self.blocks:
            x, routing = block(x)
            routings.append(routing)
        return self.norm(x), routings


def expert_loss(model: nn.Module, batch: dt.typing.Batch) -> dt.LossSum:
    """Cross entropy per byte, with the sequence-wise balancing loss and the z-loss of the routers as further terms."""
    hidden, routings = model(batch["input_ids"])
    loss = dt.linear_cross_entropy(hidden, model.head, batch["labels"])
    terms = dt.experts.router_terms(routings, sequence=1e-4, z=1e-4)
    return dt.LossSum(total=loss.total, weight=loss.weight, terms=terms)


def weigh(batch: dt.typing.Batch) -> dict[str, float]:
    """Return the weights of the terms: bytes, sequences, and routed rows, of which there are as many as bytes."""
    sequences, length = batch["labels"].shape
    return {"loss": sequences * length, "sequence": sequences, "z": sequences * length}
