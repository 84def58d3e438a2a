"""A language model with two blocks of experts, and the same mathematics written row by row, without dtrain."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dtrain as dt
from dtrain.experts import Experts, Router, Routing, router_terms

VOCAB, DIM, HIDDEN, EXPERTS, TOP_K = 11, 8, 12, 5, 2
BALANCE, SEQUENCE, Z = 0.1, 0.05, 0.02


class Block(nn.Module):
    """Attention to all positions before, and experts."""

    def __init__(self, scoring: str = "softmax", dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(DIM), nn.Linear(DIM, DIM)
        self.router = Router(DIM, EXPERTS, top_k=TOP_K, scoring=scoring)
        self.experts, self.dropout = Experts(DIM, HIDDEN, EXPERTS), nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Routing]:
        x = x + torch.tanh(self.mix(x)).cumsum(1)
        inner = self.dropout(self.norm(x))
        routing = self.router(inner, mask)
        return x + self.experts(inner, routing), routing


class MoE(nn.Module):
    """Logits of the next token, and the routing of each block."""

    def __init__(self, scoring: str = "softmax", dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block(scoring, dropout) for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens: Tensor) -> tuple[Tensor, list[Routing]]:
        x, mask, routings = self.embedding(tokens), tokens != 0, []
        for block in self.blocks:
            x, routing = block(x, mask)
            routings.append(routing)
        return self.head(x), routings


def make(scoring: str = "softmax", dropout: float = 0.0) -> MoE:
    torch.manual_seed(0)
    return MoE(scoring, dropout).double()


def data(steps: int = 3) -> Tensor:
    """``[steps, 8, 6]`` tokens; 0 is padding, more of it in the first sequences."""
    tokens = torch.randint(1, VOCAB, (steps, 8, 6), generator=torch.Generator().manual_seed(1))
    for row in range(4):
        tokens[:, row, 2 + row :] = 0
    return tokens


def loss_fn(model: nn.Module, tokens: Tensor) -> dt.LossSum:
    logits, routings = model(tokens)
    targets = torch.where(tokens == 0, -100, tokens).roll(-1, 1)
    loss = dt.cross_entropy(logits, targets)
    terms = router_terms(routings, balance=BALANCE, sequence=SEQUENCE, z=Z)
    return dt.LossSum(total=loss.total, weight=loss.weight, terms=terms)


def weigh(tokens: Tensor) -> dict[str, Tensor | float]:
    rows = (tokens != 0).sum()
    return {"loss": rows, "balance": rows, "z": rows, "sequence": len(tokens)}


def reference_loss(model: MoE, tokens: Tensor, *, shares: list[Tensor] | None) -> tuple[Tensor, list[Tensor]]:
    """Return the whole loss of one batch row by row, and the counts of each block.

    Args:
        model: its parameters and biases are used, and none of its code.
        tokens: whole global batch.
        shares: of each block; None uses those of this batch.
    """
    x, mask = model.embedding.weight[tokens], tokens != 0
    counts, aux = [], x.new_zeros(())
    for index, block in enumerate(model.blocks):
        x = x + torch.tanh(x @ block.mix.weight.T + block.mix.bias).cumsum(1)
        inner = F.layer_norm(x, (DIM,), block.norm.weight, block.norm.bias)
        scores = inner @ block.router.weight.T
        probs = scores.softmax(-1) if block.router.scoring == "softmax" else scores.sigmoid()
        out, count = torch.zeros_like(x), torch.zeros(EXPERTS, dtype=torch.float64)
        by_sequence = torch.zeros(len(tokens), EXPERTS, dtype=torch.float64)
        for row in range(tokens.shape[0]):
            for position in range(tokens.shape[1]):
                p, v = probs[row, position], inner[row, position]
                biased = (p.detach() + block.router.bias).tolist()
                chosen = sorted(range(EXPERTS), key=lambda e: -biased[e])[:TOP_K]
                total = sum(p[e] for e in chosen)
                for e in chosen:
                    w = block.experts
                    y = w.down[e] @ (F.silu(w.gate[e] @ v) * (w.up[e] @ v))
                    out[row, position] = out[row, position] + p[e] / total * y
                    if mask[row, position]:
                        count[e] += 1
                        by_sequence[row, e] += 1
        normal = probs / probs.sum(-1, keepdim=True)
        share = count / count.sum() if shares is None else shares[index]
        aux = aux + BALANCE * EXPERTS * (share * normal[mask].mean(0)).sum()
        aux = aux + Z * torch.logsumexp(scores, -1)[mask].square().mean()
        for row in range(len(tokens)):
            own = normal[row][mask[row]].mean(0)
            aux = aux + SEQUENCE * EXPERTS * (by_sequence[row] / by_sequence[row].sum() * own).sum() / len(tokens)
        counts.append(count)
        x = x + out
    logits = x @ model.head.weight.T + model.head.bias
    targets = torch.where(mask, tokens, -100).roll(-1, 1)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100) + aux, counts


def reference_run(scoring: str, *, rate: float, current: bool, steps: int = 3, lr: float = 0.1) -> dict[str, Tensor]:
    """Return parameters, biases and shares after some steps of SGD in one process.

    Args:
        scoring: of the routers.
        rate: of the bias.
        current: if True, the balancing loss has the shares of the batch itself, else those of the batch before.
        steps: number of batches.
        lr: learning rate.
    """
    model = make(scoring)
    shares = [torch.full((EXPERTS,), 1 / EXPERTS, dtype=torch.float64) for _ in model.blocks]
    for tokens in data(steps):
        loss, counts = reference_loss(model, tokens, shares=None if current else shares)
        grads = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for param, grad in zip(model.parameters(), grads, strict=True):
                param -= lr * grad
            for block, count in zip(model.blocks, counts, strict=True):
                block.router.bias += rate * torch.sign(count.mean() - count)
        shares = [count / count.sum() for count in counts]
    values = {name: param.detach() for name, param in model.named_parameters()}
    for index, block in enumerate(model.blocks):
        values[f"blocks.{index}.router.bias"] = block.router.bias
        values[f"blocks.{index}.router.share"] = shares[index]
    return values
