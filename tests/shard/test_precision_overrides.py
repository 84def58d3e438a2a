"""``Precision(overrides=)``: modules by name compute and reduce in a dtype of their own, under every strategy."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import transformers
from torch import nn

from dtrain.dist.mesh import build_mesh
from dtrain.errors import ConfigError
from dtrain.fqn import compile_patterns
from dtrain.shard.fsdp import shard_model
from dtrain.shard.precision import Precision, module_dtypes
from dtrain.shard.unshard import describe
from dtrain.state import init_state
from dtrain.step.microbatch_step import microbatch_step
from dtrain.testing import count_collectives
from dtrain.typing import LossSum

STRATEGIES = ["full_shard", "shard_grad_op", "hybrid_shard", "replicate"]
VOCAB, DIM, SEQ = 61, 32, 12
NEAR = 1.01  # of the divergence: by hand, the head of BERT rounds between its layers


class Block(nn.Module):
    """A norm, a router and two experts: the router's scores have another shape than its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(DIM), nn.Linear(DIM, 2, bias=False)
        self.experts = nn.ModuleList([nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)])

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        inner = self.norm(x)
        weights = self.router(inner).softmax(-1)
        mixed = sum(weights[..., i, None] * expert(inner) for i, expert in enumerate(self.experts))
        return x + mixed * mask[..., None]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(VOCAB, DIM), nn.ModuleList([Block(), Block()])
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


OVERRIDES = {"**norm": "fp32", "**.router": "fp32", "head": "fp32"}


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(0, VOCAB, (4, SEQ), generator=torch.Generator().manual_seed(0))
    return {"ids": ids, "mask": ids > 3}


def seen_dtypes(strategy: str) -> list[object]:
    """Return the dtypes of inputs, weight and results of each module, those of the sums over ranks, and the description."""
    mesh = build_mesh(dp_replicate=2) if strategy == "hybrid_shard" else build_mesh()
    torch.manual_seed(0)
    precision = Precision(param="bf16", reduce="bf16", overrides=OVERRIDES)
    net = shard_model(Net(), mesh, strategy=strategy, blocks=(Block,), precision=precision)
    seen: dict[str, str] = {}
    for name in ("embed", "blocks.0", "blocks.0.norm", "blocks.1.router", "blocks.0.experts.1", "norm", "head"):

        def note(module: nn.Module, args: tuple[torch.Tensor, ...], out: torch.Tensor, name: str = name) -> None:
            weight = getattr(module, "weight", None)
            seen[name] = " ".join(short(tensor.dtype) for tensor in (*args, weight, out) if tensor is not None)

        net.get_submodule(name).register_forward_hook(note)
    state = init_state(net, torch.optim.SGD(net.parameters(), lr=0.1))

    def loss(net: nn.Module, given: dict[str, torch.Tensor]) -> LossSum:
        logits = net(given["ids"], given["mask"])
        return LossSum(total=logits.float().square().sum(), weight=logits.numel())

    with count_collectives() as traffic:
        state, _ = microbatch_step(state, batch(), loss_fn=loss, microbatch_size=2)
    sums = traffic.select(op="reduce_scatter") + [r for r in traffic.select(op="all_reduce") if r.dtype != "float64"]
    kept = {short(tensor.dtype) for param in state.params.values() for tensor in (param, param.grad)}
    return [seen, sorted({r.dtype for r in sums if r.group_size > 1}), sorted(kept), describe(net)]


def all_seen_dtypes() -> dict[str, list[object]]:
    return {strategy: seen_dtypes(strategy) for strategy in STRATEGIES}


def test_named_modules_compute_and_reduce_in_their_own_dtype(ranks):
    low, high = "bfloat16", "float32"
    for strategy, (seen, sums, kept, text) in ranks(2).run(all_seen_dtypes)[0].items():
        assert seen == {
            "embed": f"int64 {low} {low}",
            # The router's scores in float32 make the sum of both float32, and the next block casts its input.
            "blocks.0": f"{low} bool {high}",
            "blocks.0.norm": f"{high} {high} {low}",
            "blocks.1.router": f"{high} {high} {high}",
            "blocks.0.experts.1": f"{low} {low} {low}",
            "norm": f"{high} {high} {low}",
            "head": f"{high} {high} {high}",
        }, strategy
        assert (sums, kept) == ([low, high], [high]), strategy
        rows = {line.split()[0]: line for line in text.splitlines()}
        assert all(rows[name].count(high) == 3 for name in ("blocks.0.norm", "blocks.1.router", "norm", "head")), text
        assert [rows["model"].count(dtype) for dtype in (high, low)] == [1, 2], text


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"**.norms": "fp32"},
            r"^shard_model: overrides names '\*\*.norms', but no module matches. The nearest names end in 'norm'",
        ),
        ({"blocks": "fp32"}, r"overrides names 'blocks', a ModuleList without forward. Name 'blocks.\*' instead.$"),
    ],
)
def test_names_without_a_module_are_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        module_dtypes(Net(), Precision(param="bf16", overrides=overrides))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"norm": "fp8"}, r"Precision: overrides\['norm'\] must be 'fp32', 'bf16' or 'fp16', got 'fp8'"),
        ("**.norm", "Precision: overrides must be a mapping of names to dtypes, got '\\*\\*.norm'"),
    ],
)
def test_invalid_overrides_are_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        Precision(overrides=overrides)


SIZES = {"hidden_size": DIM, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
MODELS: dict[str, tuple[str, str, dict[str, object], tuple[str, ...], str]] = {
    # Class, block, sizes, names in overrides, and modules that share their dtype by tied parameters.
    "llama": ("LlamaForCausalLM", "LlamaDecoderLayer", SIZES, ("**norm", "lm_head"), ""),
    "qwen": (
        "Qwen3MoeForCausalLM",
        "Qwen3MoeDecoderLayer",
        {
            **SIZES,
            "head_dim": 8,
            "num_key_value_heads": 2,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "mlp_only_layers": [],
        },
        ("**norm", "**.gate", "lm_head"),
        "",
    ),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Block",
        {"n_embd": DIM, "n_layer": 2, "n_head": 4, "bos_token_id": 0, "eos_token_id": 1},
        ("**.ln_*", "lm_head"),
        "transformer.wte",
    ),
    "bert": ("BertForMaskedLM", "BertLayer", SIZES, ("**.LayerNorm", "cls.predictions"), "bert.embeddings.word_embeddings"),
}


def make(name: str) -> nn.Module:
    kind, _, sizes, _, _ = MODELS[name]
    model_class = getattr(transformers, kind)
    torch.manual_seed(0)
    config = model_class.config_class(vocab_size=VOCAB, initializer_range=0.3, **sizes)
    return model_class(config).eval()


def in_low_precision(model: nn.Module, is_named: Callable[[str], bool], block: str) -> nn.Module:
    """Round all layers and the inputs of blocks to bfloat16 by hand, but run the named layers in float32."""
    for name, layer in model.named_modules():
        is_block = type(layer).__name__ == block
        if not (layer._parameters or is_block):
            continue
        dtype = torch.float32 if is_named(name) else torch.bfloat16
        for key, param in layer._parameters.items():
            if param is not None:
                layer._parameters[key] = nn.Parameter(param.detach().to(dtype))

        def run(*args: torch.Tensor, layer=layer, forward=layer.forward, dtype=dtype, **kwargs: object) -> object:
            result = forward(
                *(arg.to(dtype) if torch.is_tensor(arg) and arg.is_floating_point() else arg for arg in args), **kwargs
            )
            return result.bfloat16() if "Norm" in type(layer).__name__ else result

        if is_block or not layer._modules:
            layer.forward = run
    return model


def divergences(name: str) -> list[float]:
    """Return the KL divergence from float32 with overrides, by hand, and without overrides."""
    _, block, _, names, tied = MODELS[name]
    ids = torch.randint(0, VOCAB, (8, SEQ), generator=torch.Generator().manual_seed(1))
    exact = make(name)(ids).logits.log_softmax(-1)
    is_named = compile_patterns([*names, *(f"{pattern}.**" for pattern in names), tied], caller="test")
    overrides = dict.fromkeys(names, "fp32")
    mesh = build_mesh()
    results = []
    for made in (
        lambda: shard_model(make(name), mesh, blocks=select(block), precision=Precision(param="bf16", overrides=overrides)),
        lambda: in_low_precision(make(name), is_named, block),
        lambda: shard_model(make(name), mesh, blocks=select(block), precision=Precision(param="bf16")),
    ):
        with torch.no_grad():
            logits = made()(ids).logits.double().log_softmax(-1)
        results.append((exact.double().exp() * (exact.double() - logits)).sum(-1).mean().item())
    return results


def select(block: str) -> Callable[[str, nn.Module], bool]:
    return lambda name, module: type(module).__name__ == block


def all_divergences() -> dict[str, list[float]]:
    with torch.no_grad():
        return {name: divergences(name) for name in MODELS}


def test_divergence_from_float32_is_that_of_float32_layers_by_hand(ranks):
    for name, (named, by_hand, low) in ranks(1).run(all_divergences)[0].items():
        assert 0 < named <= by_hand * NEAR, (name, named, by_hand, low)
        assert named < low, (name, named, by_hand, low)
