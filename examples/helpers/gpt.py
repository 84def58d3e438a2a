"""A small byte-level GPT that can be built without storage and filled in later.

Every module that owns a parameter has ``reset_parameters``, and the only buffer comes from a module whose ``__init__``
can be run again from its attributes. So the model may be built under ``torch.device("meta")``, sharded, and only then
given real storage, one module at a time; no initialisation happens at the root.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTConfig:
    """Sizes of a model. ``max_seq`` is the longest sequence it accepts, in bytes."""

    n_layer: int
    n_head: int
    dim: int
    max_seq: int
    vocab: int = 256
    mlp_ratio: int = 4

    def __post_init__(self) -> None:
        for name in ("n_layer", "n_head", "dim", "max_seq", "vocab", "mlp_ratio"):
            if getattr(self, name) < 1:
                raise ValueError(f"GPTConfig needs {name} >= 1, got {name}={getattr(self, name)}")
        if self.dim % (2 * self.n_head):
            raise ValueError(
                "GPTConfig needs dim to be a multiple of 2 * n_head, because rotary positions turn pairs of a head's "
                f"channels, got dim={self.dim}, n_head={self.n_head}"
            )

    @property
    def head_dim(self) -> int:
        """Channels of one head."""
        return self.dim // self.n_head


class Linear(nn.Linear):
    """A linear map without bias, drawn so that its output has ``gain`` times the standard deviation of its input."""

    def __init__(self, in_features: int, out_features: int, *, gain: float = 1.0) -> None:
        self.gain = gain  # before super().__init__, which calls reset_parameters
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self) -> None:
        # in_features, not the weight's shape: the weight may be a shard here, the scale is that of the whole matrix.
        nn.init.normal_(self.weight, std=self.gain / math.sqrt(self.in_features))


class Rotary(nn.Module):
    """Turns pairs of channels by an angle that grows with the position, so that q·k depends on the distance only.

    The tables are not saved with the model. The arguments of ``__init__`` are kept under their own names, so that the
    tables can be made again once a model that was built without storage has some.

    Source: Su et al. 2021, arXiv:2104.09864, section 3.4.2, with the two channels of a pair ``dim / 2`` apart.
    """

    cos: Tensor  # [max_seq, dim / 2]
    sin: Tensor

    def __init__(self, dim: int, max_seq: int, base: float = 10_000.0) -> None:
        super().__init__()
        self.dim, self.max_seq, self.base = dim, max_seq, base
        frequency = base ** -(torch.arange(0, dim, 2) / dim)
        angle = torch.outer(torch.arange(max_seq), frequency)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, head, seq, dim] -> [batch, head, seq, dim]``, in the dtype of ``x``."""
        cos, sin = self.cos[: x.shape[-2]], self.sin[: x.shape[-2]]
        a, b = x.chunk(2, dim=-1)
        # The tables are float32, so half-precision activations are turned in float32 and rounded once.
        return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention with rotary positions: ``[batch, seq, dim] -> [batch, seq, dim]``."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.q = Linear(config.dim, config.dim)
        self.k = Linear(config.dim, config.dim)
        self.v = Linear(config.dim, config.dim)
        # One table per block and not one per model: a block is then a function of x alone, and the table is small.
        self.rotary = Rotary(config.head_dim, config.max_seq)
        self.out = Linear(config.dim, config.dim, gain=residual_gain(config))

    def forward(self, x: Tensor) -> Tensor:
        # The channels of a head are named and the heads counted, so a slice of the heads works as well.
        q, k, v = (
            rearrange(project(x), "batch seq (head dim) -> batch head seq dim", dim=self.head_dim)
            for project in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(self.rotary(q), self.rotary(k), v, is_causal=True)
        return self.out(rearrange(y, "batch head seq dim -> batch seq (head dim)"))


class MLP(nn.Module):
    """Two linear maps around a squared ReLU (So et al. 2021, arXiv:2109.08668): ``[..., dim] -> [..., dim]``."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = Linear(config.dim, config.mlp_ratio * config.dim)
        self.down = Linear(config.mlp_ratio * config.dim, config.dim, gain=residual_gain(config))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x)).square())


class Block(nn.Module):
    """Attention and MLP, each with a residual connection around its norm: ``[batch, seq, dim] -> [batch, seq, dim]``."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=1e-6)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.dim, eps=1e-6)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        # torch's own initialisation, std 1: about the sum that all blocks together add to it. The usual 0.02 learned slower in
        # a trial (stdlib text, 760 to 800 steps: held-out loss 1.434 nats with std 0.02, 1.404 with 0.5, 1.405 with 1).
        self.embedding = nn.Embedding(config.vocab, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = nn.RMSNorm(config.dim, eps=1e-6)
        self.head = Linear(config.dim, config.vocab)

    def forward(self, input_ids: Tensor, *, logits: bool = True) -> Tensor:
        """Return logits ``[batch, seq, vocab]`` of the byte after each position of ``input_ids`` (int64 ``[batch, seq]``).

        If ``logits`` is False, return the inputs of the head, ``[batch, seq, dim]``, for a loss that needs no logits.

        Raises:
            ValueError: ``seq`` is above ``max_seq``.
        """
        if input_ids.shape[1] > self.config.max_seq:
            raise ValueError(f"GPT needs seq <= max_seq, got {input_ids.shape[1]} > {self.config.max_seq}")
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return self.head(x) if logits else x


def residual_gain(config: GPTConfig) -> float:
    """Gain of a map that ends a residual branch: the sum of all ``2 * n_layer`` branches does not grow with depth."""
    return 1 / math.sqrt(2 * config.n_layer)


@torch.no_grad()  # not inference_mode: a sharded model's parameters must stay usable for training afterwards
def generate(model: GPT, prompt: bytes, *, max_new: int, temperature: float, seed: int, device: torch.device | str) -> bytes:
    """Return the ``max_new`` bytes that the model writes after ``prompt``, without the prompt.

    Every byte is one forward pass over the last ``max_seq`` bytes. How many passes there are, and their shapes, depends
    on the arguments only; so the ranks of a sharded model, whose forward passes are collective, stay in lockstep.

    Args:
        model: in training or evaluation mode; its mode is the same afterwards.
        prompt: at least one byte.
        max_new: bytes to write, >= 0.
        temperature: divides the logits; 0 takes the most likely byte each time.
        seed: of the sampling, the same on every rank.
        device: where the model lives.

    Collective: one forward pass of the model per byte; every rank must call it with the same arguments.
    Host sync: one per byte.

    Raises:
        ValueError: ``prompt`` is empty, or ``temperature`` < 0.
    """
    if not prompt:
        raise ValueError("generate needs a prompt of at least one byte, got b''")
    if temperature < 0:
        raise ValueError(f"generate needs temperature >= 0, got {temperature=}")
    generator = torch.Generator().manual_seed(seed)  # on the CPU, so that a seed means the same draw on every device
    text = bytearray(prompt)
    was_training = model.training
    model.eval()
    try:
        for _ in range(max_new):
            window = torch.tensor([list(text[-model.config.max_seq :])], device=device)
            logits = model(window)[0, -1].float().cpu()
            if temperature == 0:
                text.append(int(logits.argmax()))
            else:
                text.append(int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)))
    finally:
        model.train(was_training)
    return bytes(text[len(prompt) :])
