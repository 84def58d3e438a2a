"""Kernels of a GPU that a model may choose between: the loss of a large vocabulary, attention, optimizers, fp8.

Each table names its reference. A variant that this torch, this device or this environment does not have gets a row with the
reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import checkpoint

import dtrain as dt
from gpu_device import MIB, NOT_AVAILABLE, Memory, Setting, count_parameters, describe_missing
from gpu_memory import FULL as MEMORY_SIZES
from gpu_results import Cell, Table, band
from helpers.gpt import GPT
from measure import Run, compare
from optimizers import CLAIMS, MODELS, Side


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of the tensors: of the loss, of attention, of a linear layer, of a square product."""

    tokens: int
    dim: int
    vocab: int
    attention: tuple[int, int, int, int]
    width: int
    square: int


FULL = Sizes(tokens=16_384, dim=2048, vocab=32_768, attention=(4, 16, 4096, 128), width=4096, square=8192)
TOY = Sizes(tokens=16, dim=16, vocab=32, attention=(1, 2, 32, 16), width=16, square=16)


def kernels(setting: Setting) -> Iterator[Table]:
    """Time and memory of each variant, forward and backward, bf16."""
    sizes = TOY if setting.toy else FULL
    with setting.memory() as memory:
        yield _products(setting, sizes)
        yield _losses(setting, sizes, memory)
        setting.release()
        yield _attentions(setting, sizes, memory)
        setting.release()
        yield _optimizers(setting)
        setting.release()
        yield _fp8(setting, sizes)


def _products(setting: Setting, sizes: Sizes) -> Table:
    """Measure the rate of a large product, which bounds the MFU of a model."""
    a, b = (torch.randn(sizes.square, sizes.square, device=setting.device, dtype=torch.bfloat16) for _ in range(2))
    timings = setting.timed({"product": lambda: a @ b}, share=0.05)["device"]["product"]
    rate = 2 * sizes.square**3 / compare(timings, timings).a_s
    peak = setting.peak_flops
    return Table(
        title="Rate of one bf16 product, which bounds the MFU of a model",
        columns=("size", "TFLOP/s", "of the peak of the datasheet"),
        rows=[[f"{sizes.square} x {sizes.square} x {sizes.square}", rate / 1e12, None if peak is None else rate / peak]],
    )


def _compared(setting: Setting, runs: Mapping[str, Run], *, share: float, memory: Memory | None = None) -> list[list[Cell]]:
    """Compare all runs with the first one; a run that fails gets a row with its reason."""
    usable, reasons, peaks = {}, {}, {}
    for name, run in runs.items():
        try:
            # The first call compiles.
            run()
            if memory is not None:
                before = memory.live
                memory.reset()
                run()
                peaks[name] = (memory.peak - before) / MIB
            usable[name] = run
        except NOT_AVAILABLE as error:
            reasons[name] = describe_missing(error)
    timings = setting.timed(usable, share=share)["device"] if usable else {}
    rows: list[list[Cell]] = []
    for name in runs:
        if name in reasons:
            rows.append([name, reasons[name], None, None, *([None] if memory is not None else [])])
            continue
        comparison = compare(timings[name], timings[next(iter(usable))])
        peak = [peaks[name]] if memory is not None else []
        rows.append([name, comparison.a_s * 1e3, comparison.ratio, band(comparison), *peak])
    return rows


COLUMNS = ("variant", "ms", "over the first row", "A/A band")


def _losses(setting: Setting, sizes: Sizes, memory: Memory) -> Table:
    """The cross entropy of a linear layer with a large vocabulary."""
    torch.manual_seed(0)
    factory = {"device": setting.device, "dtype": torch.bfloat16}
    hidden = torch.randn(sizes.tokens, sizes.dim, **factory, requires_grad=True)
    weight = (torch.randn(sizes.vocab, sizes.dim, **factory) / sizes.dim**0.5).requires_grad_()
    targets = torch.randint(sizes.vocab, (sizes.tokens,), device=setting.device)

    def part(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(hidden, weight).float(), targets, reduction="sum")

    def by_hand(hidden: Tensor, weight: Tensor, *, chunks: int) -> Tensor:
        if chunks == 1:
            return part(hidden, weight, targets)
        # The logits of one chunk exist at a time, also on a torch without linear_cross_entropy.
        pieces = zip(hidden.chunk(chunks), targets.chunk(chunks), strict=True)
        return torch.stack([checkpoint(part, rows, weight, labels, use_reentrant=False) for rows, labels in pieces]).sum()

    def ours(hidden: Tensor, weight: Tensor) -> Tensor:
        return dt.cross_entropy(F.linear(hidden, weight)[None], targets[None]).total

    def of_torch(hidden: Tensor, weight: Tensor, *, chunked: bool) -> Tensor:
        if not hasattr(F, "linear_cross_entropy"):
            raise NotImplementedError(f"torch {torch.__version__} has no linear_cross_entropy")
        options = nn.LinearCrossEntropyOptions() if chunked else None
        return F.linear_cross_entropy(hidden, weight, targets, reduction="sum", options=options)

    def both_ways(loss: Callable[[Tensor, Tensor], Tensor]) -> Run:
        return lambda: torch.autograd.grad(loss(hidden, weight), (hidden, weight))

    runs = {
        "linear, cross entropy in float32": both_ways(partial(by_hand, chunks=1)),
        "the same in 8 chunks, computed again in backward": both_ways(partial(by_hand, chunks=8)),
        "`dt.cross_entropy`": both_ways(ours),
        "`dt.cross_entropy`, compiled": both_ways(torch.compile(ours, backend=setting.backend)),
        "torch's `linear_cross_entropy`": both_ways(partial(of_torch, chunked=False)),
        "torch's `linear_cross_entropy`, chunked": both_ways(partial(of_torch, chunked=True)),
    }
    return Table(
        title=f"Loss of {sizes.tokens:,} tokens, dim {sizes.dim}, vocabulary of {sizes.vocab:,}, forward and backward, bf16",
        columns=(*COLUMNS, "peak, MiB"),
        rows=_compared(setting, runs, share=0.25, memory=memory),
    )


def _attentions(setting: Setting, sizes: Sizes, memory: Memory) -> Table:
    """Causal attention by each kernel of torch, packed documents, and linear biases."""
    torch.manual_seed(0)
    batch, heads, length, dim = sizes.attention
    q, k, v = (torch.randn(sizes.attention, device=setting.device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    documents = torch.arange(length, device=setting.device) // (length // 4)
    order = torch.arange(length, device=setting.device)
    packed = (documents[:, None] == documents[None, :]) & (order[:, None] >= order[None, :])
    bias = dt.surgery.alibi_bias(heads, length, device=setting.device, dtype=torch.bfloat16)

    def both_ways(attention: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Run:
        return lambda: torch.autograd.grad(attention(q, k, v).sum(), (q, k, v))

    def causal(q: Tensor, k: Tensor, v: Tensor, *, kernel: SDPBackend | None) -> Tensor:
        with nullcontext() if kernel is None else sdpa_kernel(kernel):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def masked(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    def variable(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        starts = torch.arange(0, batch * length + 1, length // 4, dtype=torch.int32, device=setting.device)
        tokens = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (q, k, v))
        return varlen_attn(*tokens, starts, starts, length // 4, length // 4, window_size=(-1, 0))

    runs = {
        "torch's choice, causal": both_ways(partial(causal, kernel=None)),
        **{
            f"{kernel.name.replace('_', ' ').lower()}, causal": both_ways(partial(causal, kernel=kernel))
            for kernel in (
                SDPBackend.FLASH_ATTENTION,
                SDPBackend.CUDNN_ATTENTION,
                SDPBackend.EFFICIENT_ATTENTION,
                SDPBackend.MATH,
            )
        },
        "4 packed documents, mask of bools": both_ways(partial(masked, mask=packed)),
        "4 packed documents, torch's `varlen_attn`": both_ways(variable),
        "`dt.surgery.add_alibi_bias`, causal": both_ways(
            partial(masked, mask=dt.surgery.add_alibi_bias(None, bias, causal=True))
        ),
        **_flex_runs(setting, both_ways, documents, length),
    }
    return Table(
        title=f"Attention of {batch} x {heads} heads, {length} tokens, head dim {dim}, forward and backward, bf16",
        columns=(*COLUMNS, "peak, MiB"),
        rows=_compared(setting, runs, share=0.3, memory=memory),
    )


def _flex_runs(
    setting: Setting, both_ways: Callable[[Callable[[Tensor, Tensor, Tensor], Tensor]], Run], documents: Tensor, length: int
) -> dict[str, Run]:
    """Return runs of flex attention, which torch trains on a GPU alone."""

    def causal(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query >= key

    def packed(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (documents[query] == documents[key])

    if setting.device.type != "cuda":
        return {}
    compiled = torch.compile(flex_attention)
    masks = {"causal": causal, "4 packed documents": packed}
    blocks = {name: create_block_mask(mask, None, None, length, length, device="cuda") for name, mask in masks.items()}
    return {
        f"flex attention, {name}": both_ways(lambda q, k, v, block=block: compiled(q, k, v, block_mask=block))
        for name, block in blocks.items()
    }


def _optimizers(setting: Setting) -> Table:
    """Steps of dtrain's optimizers against torch's own, on the same gradients."""
    make = MODELS["tiny MLP, 6 tensors"] if setting.toy else partial(GPT, MEMORY_SIZES.config)
    build = partial(setting.build, make)
    rows: list[list[Cell]] = []
    for what, (ours, theirs) in CLAIMS.items():
        sides = {"ours": Side(build, ours, setting.device.type), "theirs": Side(build, theirs, setting.device.type)}
        for side in sides.values():
            side.step()
        values = {name: side.values() for name, side in sides.items()}
        apart = float((values["ours"] - values["theirs"]).norm() / values["theirs"].norm())
        timings = setting.timed({name: side.step for name, side in sides.items()}, share=0.2 / len(CLAIMS))["device"]
        comparison = compare(timings["ours"], timings["theirs"])
        rows.append([what, comparison.b_s * 1e3, comparison.a_s * 1e3, comparison.ratio, band(comparison), apart])
        del sides, values
        setting.release()
    return Table(
        title=f"A step of an optimizer on {count_parameters(make):,} parameters, float32",
        columns=("optimizers", "torch, ms", "dtrain, ms", "dtrain over torch", "A/A band", "relative difference"),
        rows=rows,
        note=(
            "The difference is that of all parameters after one step. SGD's sides differ by the decay, which torch's side does "
            "without."
        ),
    )


def _fp8(setting: Setting, sizes: Sizes) -> Table:
    """Two large linear layers, compiled, in bf16 and in 8 bits."""
    tokens = sizes.tokens
    x = torch.randn(tokens, sizes.width, device=setting.device, dtype=torch.bfloat16, requires_grad=True)

    def layers(recipe: str | None) -> Run:
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(
            nn.Linear(sizes.width, 4 * sizes.width, bias=False), nn.ReLU(), nn.Linear(4 * sizes.width, sizes.width, bias=False)
        ).to(setting.device, torch.bfloat16)
        if recipe is not None:
            model = dt.shard.convert_to_fp8(model, recipe=recipe, emulate=setting.device.type != "cuda")  # type: ignore[arg-type]
        model.compile(backend=setting.backend)

        def run() -> None:
            model(x).sum().backward()
            model.zero_grad()

        return run

    def lazily(recipe: str | None) -> Run:
        made: list[Run] = []

        def run() -> None:
            if not made:
                made.append(layers(recipe))
            made[0]()

        return run

    recipes: Sequence[str | None] = (None, "tensorwise") if setting.toy else (None, "tensorwise", "rowwise")
    runs = {"bf16" if recipe is None else f"fp8, `{recipe}`": lazily(recipe) for recipe in recipes}
    return Table(
        title=f"Two linear layers of {sizes.width} x {4 * sizes.width}, {tokens:,} tokens, compiled, forward and backward",
        columns=COLUMNS,
        rows=_compared(setting, runs, share=0.2),
        note="fp8 by `dt.shard.convert_to_fp8`, which needs torchao.",
    )
