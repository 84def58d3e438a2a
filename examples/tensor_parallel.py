"""Train a byte-level GPT with tensor and sequence parallelism over two ranks, and FSDP over two more.

    dtrain launch -n 4 examples/tensor_parallel.py                # tp=2, dp_shard=2
    dtrain launch -n 4 examples/tensor_parallel.py --tp 4         # tensor parallelism alone
    python examples/tensor_parallel.py --tp 1                     # one process: the same losses, step by step

Between the layers each rank of a group has a part of the sequence. The vocabulary is sharded as well, so no rank ever holds all
logits. On two cores the first command takes 28 s of processor time, to a held-out loss of 2.42 nats per byte (unigram
entropy 3.24). The same command resumes, also with another --tp or number of processes.
"""

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

import dtrain as dt
from helpers.gpt import GPT, Block, GPTConfig
from helpers.text import read_text, train_and_held_out, unigram_entropy

SEQ = 64  # bytes; a multiple of tp, as are the heads, the channels and the vocabulary
WINDOWS = dt.batch_spec({"input_ids": "batch seq", "labels": "batch seq"})


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=2, help="ranks of a tensor-parallel group (%(default)s)")
    parser.add_argument("--steps", type=int, default=60, help="length of the run (%(default)s)")
    parser.add_argument("--text", metavar="GLOB", help="files to train on (default: the standard library's source code)")
    parser.add_argument("--out", type=Path, default=Path("ckpt/tensor_parallel"), help="metrics and checkpoints (%(default)s)")
    return parser.parse_args()


def tensor_plan() -> dict[str, ParallelStyle]:
    """Return the plan that splits a GPT's layers: heads, channels, vocabulary; and the sequence between the split layers."""
    sequence, whole = Shard(1), Replicate()
    by_columns = [f"blocks.*.{layer}" for layer in ("attention.q", "attention.k", "attention.v", "mlp.up")]
    by_rows = ["blocks.*.attention.out", "blocks.*.mlp.down"]
    enter = PrepareModuleInput(input_layouts=(sequence,), desired_input_layouts=(whole,))  # one all-gather for q, k and v
    return {
        "embedding": RowwiseParallel(input_layouts=whole, output_layouts=sequence),
        **dict.fromkeys(["blocks.*.attention_norm", "blocks.*.mlp_norm", "norm"], SequenceParallel()),
        **dict.fromkeys(["blocks.*.attention", "blocks.*.mlp"], enter),
        **dict.fromkeys(by_columns, ColwiseParallel()),
        **dict.fromkeys(by_rows, RowwiseParallel(output_layouts=sequence)),
        "head": ColwiseParallel(input_layouts=sequence, output_layouts=Shard(-1), use_local_output=False),
    }


def loss_fn(model: nn.Module, batch: dt.typing.Batch) -> dt.LossSum:
    return dt.linear_cross_entropy(model(batch["input_ids"], logits=False), model.head, batch["labels"])


def train(args: argparse.Namespace, dist: dt.dist.DistInfo) -> None:
    run = dt.open_run(args.out, settings=vars(args))
    windows, held_out = train_and_held_out(read_text(args.text), SEQ, held_out_windows=64)
    mesh = dt.build_mesh(tp=args.tp)
    with torch.device("meta"):
        model = GPT(GPTConfig(n_layer=2, n_head=4, dim=64, max_seq=SEQ))
    model = dt.materialize(dt.shard_model(model, mesh, blocks=(Block,), tp_plan=tensor_plan() if args.tp > 1 else None), seed=0)
    # The ranks of a tensor-parallel group read the same windows.
    loader = dt.build_loader(windows, mesh=mesh, global_batch_size=16, seed=0, batch_spec=WINDOWS)
    step = dt.compose_step(loss_fn, [dt.transforms.clip_by_norm(1.0)])
    state = step.init(model, torch.optim.AdamW(model.parameters(), lr=3e-3), loader=loader)
    checkpoints = dt.Checkpointer(run / "checkpoints", mode="async", memory_every="10ba", keep_last=2)
    state = checkpoints.load(state, missing_ok=True)
    records = dt.loggers.jsonl(run / "metrics.jsonl")

    log = dt.loggers.multi(records, dt.loggers.progress_bar(args.steps, select=["loss", "grad_norm"]))
    for batch in loader.until(args.steps):
        state, metrics = step(state, batch)
        log(state.step, dt.reduce_metrics(metrics))
        checkpoints.keep(state)
        if state.crossed(20):
            checkpoints.save(state)
        if dt.should_stop(state):
            break
    checkpoints.save(state)
    if dt.should_stop(state):
        return

    test_loader = dt.build_loader(held_out, mesh=mesh, global_batch_size=64, seed=0, shuffle=False, batch_spec=WINDOWS)
    loss = dt.reduce_metrics(dt.evaluate(model, test_loader, loss_fn))["loss"]
    records(state.step, {"held_out/loss": loss})
    dist.print(f"held-out loss {loss:.4f} nats/byte, baseline {unigram_entropy(held_out):.4f} (unigram entropy)")


if __name__ == "__main__":
    args = parse_args()
    with dt.init_dist() as dist:
        train(args, dist)
