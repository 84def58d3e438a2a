"""Workloads that tests plan for, and the same ones run for real under a count of their bytes."""

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dtrain as dt
from dtrain.dist.dtensor import to_local
from dtrain.dist.mesh import build_mesh
from dtrain.planning.workload import Workload
from dtrain.shard.activations import checkpoint_activations
from dtrain.shard.fsdp import shard_model
from dtrain.shard.materialize import materialize
from dtrain.shard.precision import Precision
from dtrain.step.compose import compose_step
from dtrain.step.microbatch_step import microbatch_step
from dtrain.testing.checks import UNLIMITED, memory_budget
from helpers.gpt import GPT, Block, GPTConfig

SEQ = 32
CLASSES = 10


def tokens_loss(model: nn.Module, batch: dt.typing.Batch) -> dt.LossSum:
    return dt.cross_entropy(model(batch["input_ids"]), batch["labels"])


def tokens(n: int) -> dict[str, Tensor]:
    return {"input_ids": torch.zeros(n, SEQ, dtype=torch.int64), "labels": torch.zeros(n, SEQ, dtype=torch.int64)}


class Convs(nn.Module):
    """Convolutions with BatchNorm and dropout: buffers that a forward changes, and activations of several sizes."""

    def __init__(self) -> None:
        super().__init__()
        layers = [ConvBlock(3, 32), ConvBlock(32, 64), ConvBlock(64, 64)]
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(64, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean((-2, -1)))


class ConvBlock(nn.Module):
    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inside, outside, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(outside)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(F.gelu(self.norm(self.conv(x))))


def images_loss(model: nn.Module, batch: dt.typing.Batch) -> dt.LossSum:
    total = F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum")
    return dt.LossSum(total=total, weight=len(batch["y"]))


def images(n: int) -> dict[str, Tensor]:
    return {"x": torch.zeros(n, 3, 16, 16), "y": torch.zeros(n, dtype=torch.int64)}


class Tied(nn.Module):
    """A head tied to the embedding, a frozen layer, a scalar that is left out, and a loss that looks at its values."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 128)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(128, 4, 256, batch_first=True) for _ in range(2))
        self.frozen = nn.Linear(128, 128)
        self.frozen.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(128, 256, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.frozen(x) * self.scale)


def masked_loss(model: nn.Module, batch: dt.typing.Batch) -> dt.LossSum:
    logits, labels = model(batch["input_ids"]), batch["labels"]
    counted = labels != -100
    if counted.any().item():
        return dt.LossSum(total=F.cross_entropy(logits[counted], labels[counted], reduction="sum"), weight=counted.sum())
    return dt.LossSum(total=logits.sum() * 0.0, weight=0.0)


WIDTH = 64


class Linears(nn.Module):
    """Equal linear maps, of which all but the last are blocks: small enough to count by hand."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(blocks))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def squares(model: nn.Module, batch: Tensor) -> dt.LossSum:
    return dt.LossSum(total=model(batch).square().sum(), weight=len(batch))


def rows(n: int) -> Tensor:
    return torch.zeros(n, WIDTH)


def linears(**changes) -> Workload:
    return Workload(**{"model": Linears, "loss_fn": squares, "batch": rows, "blocks": "blocks.*", **changes})


WORKLOADS = {
    "gpt": Workload(
        model=lambda: GPT(GPTConfig(n_layer=2, n_head=4, dim=96, max_seq=SEQ)),
        loss_fn=tokens_loss,
        batch=tokens,
        blocks=(Block,),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
        transforms=[dt.transforms.clip_by_norm(1.0), dt.transforms.ema(0.99)],
        batch_seq_dims={"input_ids": 1, "labels": 1},
        buffer_seq_dims={"**.cos": 0, "**.sin": 0},
    ),
    "convs": Workload(
        model=Convs,
        loss_fn=images_loss,
        batch=images,
        blocks=(ConvBlock,),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=True),
    ),
    "tied": Workload(
        model=Tied,
        loss_fn=masked_loss,
        batch=tokens,
        blocks=("blocks.*",),
        optimizer=lambda params: torch.optim.Adam(params, lr=1e-3),
    ),
}


def tensors_of(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_of(item)


def measured(name: str, size: int, count: int, setting: dict) -> int:
    """Return the peak bytes of a rank's tensors in a real step, after a step that created the optimizer state."""
    workload, setting = WORKLOADS[name], dict(setting)
    torch.manual_seed(0)
    model = workload.model()
    if setting.get("checkpoint"):
        checkpoint_activations(model, blocks=workload.blocks, keep=setting["checkpoint"])
    low = setting.get("precision")
    mesh, transforms = build_mesh(dp_replicate=setting.get("dp_replicate", 1), cp=setting.get("cp", 1)), [*workload.transforms]
    if "cp" in setting:
        dims, buffer_dims = workload.batch_seq_dims, workload.buffer_seq_dims
        # The forward of a whole sequence in the first step is not part of the plan.
        method = setting.get("cp_method", "ring")
        cut = dt.transforms.context_parallel(mesh, batch_seq_dims=dims, buffer_seq_dims=buffer_dims, method=method, check=False)
        transforms.append(cut)
    model = shard_model(
        model,
        mesh,
        strategy=setting.get("strategy", "full_shard"),
        accumulate=setting.get("accumulate", "local"),
        precision=Precision.preset("DEFAULT", low) if low else None,
        blocks=workload.blocks,
        **workload.shard_args,
    )
    model = materialize(model, seed=0)
    optimizer = workload.optimizer(model.parameters())
    step = compose_step(workload.loss_fn, transforms, grad=partial(microbatch_step, microbatch_size=size))
    state = step.init(model, optimizer)
    state, _ = step(state, workload.batch(size * count))
    held = tensors_of([list(model.parameters()), list(model.buffers()), optimizer.state, state.transform_states])
    with memory_budget(UNLIMITED, existing=map(to_local, held)) as budget:
        peaks = []
        for _ in range(5):  # gloo's threads may drop sent tensors late, on a busy machine
            budget.reset()
            state, _ = step(state, workload.batch(size * count))
            peaks.append(budget.peak)
    return min(peaks)
