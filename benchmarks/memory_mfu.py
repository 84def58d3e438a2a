"""Measure the MFU of a compiled GPT of a billion parameters in bf16, against the same model in a loop by hand.

    python benchmarks/memory_mfu.py --peak-tflops 989     # a CUDA device; 989 is an H200's for dense bf16, from its data sheet
    python benchmarks/memory_mfu.py --smoke               # a tiny model on any device: shows that both sides run

Model FLOPs of a token are 6 per parameter (without the embedding of positions) and 12 * layers * dim * sequence for attention
(Chowdhery et al. 2022, arXiv:2204.02311, appendix B).
"""

import argparse
import sys
from collections.abc import Callable
from itertools import cycle
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dtrain as dt
from measure import WALL, paired, verdict_line
from measure import machine as described

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from gpt import GPT, Block, GPTConfig

LARGE = GPTConfig(n_layer=20, n_head=16, dim=2048, max_seq=2048)
SMALL = GPTConfig(n_layer=2, n_head=2, dim=32, max_seq=32)


def loss_fn(model: nn.Module, batch: Tensor) -> dt.LossSum:
    """The summed cross entropy of the next byte."""
    return dt.token_cross_entropy(model(batch[:, :-1]), batch[:, 1:])


def with_dtrain(config: GPTConfig, samples: int) -> Callable[[Tensor], None]:
    """A composed step that has found its microbatch."""
    with torch.device("meta"):
        model: nn.Module = GPT(config)
    precision = dt.Precision.preset("DEFAULT", "bf16")
    model = dt.shard_model(model, dt.build_mesh(), strategy="replicate", blocks=(Block,), precision=precision)
    model = dt.materialize(model, seed=0)
    dt.compile_blocks(model, blocks=(Block,))
    step = dt.compose_step(loss_fn, [dt.transforms.clip_by_norm(1.0), dt.auto_microbatch(initial=samples)])
    box = [step.init(model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))]

    def run(batch: Tensor) -> None:
        box[0], _ = step(box[0], batch)

    return run


def by_hand(config: GPTConfig, device: torch.device) -> Callable[[Tensor], None]:
    """The loop that one writes: float32 weights, autocast, a compiled block, clipping, fused AdamW."""
    torch.manual_seed(0)
    model = GPT(config).to(device)
    for block in (module for module in model.modules() if isinstance(module, Block)):
        block.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def run(batch: Tensor) -> None:
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(batch[:, :-1])
        F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return run


def timed(run: Callable[[Tensor], None], batches: list[Tensor], device: torch.device) -> Callable[[], None]:
    """Time one step, to its end on the device."""
    endless = cycle(batches)

    def once() -> None:
        run(next(endless))
        if device.type == "cuda":
            torch.cuda.synchronize()

    return once


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peak-tflops", type=float, help="of the device, for dense bf16; without it no MFU is printed")
    parser.add_argument("--samples", type=int, default=16, help="sequences a step")
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--smoke", action="store_true", help="a tiny model")
    given = parser.parse_args()
    if not (given.smoke or torch.cuda.is_available()):
        parser.error("a model of a billion parameters needs a CUDA device; --smoke runs a tiny one")
    config = SMALL if given.smoke else LARGE
    with dt.init_dist() as dist:
        batches = [torch.randint(256, (given.samples, config.max_seq + 1), device=dist.device) for _ in range(4)]
        sides = [with_dtrain(config, given.samples), by_hand(config, dist.device)]
        a, b = (timed(side, batches, dist.device) for side in sides)
        result = paired(a, b, pairs=given.pairs, warmup=5, clock=WALL)
        params = sum(param.numel() for param in GPT(config).parameters())
    tokens = given.samples * config.max_seq
    flops = tokens * (6 * params + 12 * config.n_layer * config.dim * config.max_seq)
    print(described())
    print(f"GPT of {params / 1e6:.0f} M parameters, {tokens} tokens a step: dtrain / by hand: {result}")
    print(verdict_line("time of a step", result.ratio, at_most=1 / 0.99))
    for name, seconds in (("dtrain", result.a_s), ("by hand", result.b_s)):
        share = f", MFU {flops / seconds / given.peak_tflops / 1e12:.1%}" if given.peak_tflops else ""
        print(f"{name}: {tokens / seconds:,.0f} tokens/s{share}")


if __name__ == "__main__":
    main()
