"""Train a byte-level GPT on local or streamed text. Stop the run in any way, and resume it exactly.

    dtrain launch -n 2 examples/pretrain_gpt.py                   # two processes, one GPU each if there are enough
    python examples/pretrain_gpt.py                               # one process, no launcher
    torchrun --nproc-per-node 2 examples/pretrain_gpt.py          # another launcher

On two CPU cores the first command takes 82 s to a held-out loss of 1.465 nats per byte (unigram entropy 3.197).
The same command resumes, also with another number of processes or another --strategy. The run writes to --out;
`dtrain report OUT` makes a page of it, and `dtrain top OUT` shows it live.
Stream a large corpus with --data s3://bucket/corpus. This command writes its part `train`; `val` is written alike:

    dtrain data write 'train/*.txt' s3://bucket/corpus/train --from documents --tokenizer bytes --concat 129
"""

import argparse
from functools import partial
from pathlib import Path

import torch
from torch import nn

import dtrain as dt
from helpers.gpt import GPT, Block, GPTConfig, generate
from helpers.text import next_byte_batch, read_text, train_and_held_out, unigram_entropy

SEQ = 128
GLOBAL_BATCH_SIZE = 16  # windows of SEQ bytes per step, over all ranks
BATCH = dt.batch_spec({"input_ids": "batch seq", "labels": "batch seq"})


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", metavar="GLOB", help="files to train on (default: the standard library's source code)")
    parser.add_argument("--data", metavar="URL", help="instead of --text: shards of SEQ + 1 bytes in URL/train and URL/val")
    parser.add_argument("--out", type=Path, default=Path("ckpt/pretrain_gpt"), help="metrics and checkpoints (%(default)s)")
    parser.add_argument("--steps", type=int, default=600, help="length of the run (%(default)s)")
    parser.add_argument("--save-every", type=int, default=100, metavar="STEPS", help="steps per checkpoint (%(default)s)")
    parser.add_argument("--strategy", default="full_shard", help="full_shard or replicate (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and data order (%(default)s)")
    return parser.parse_args()


def loss_fn(model: nn.Module, batch: dt.typing.Batch) -> dt.LossSum:
    return dt.linear_cross_entropy(model(batch["input_ids"], logits=False), model.head, batch["labels"])


def main() -> None:
    args = parse_args()
    if args.data is None:
        train, held_out = train_and_held_out(read_text(args.text), SEQ, held_out_windows=512)
    else:
        train, held_out = dt.data.ShardedDataset(f"{args.data}/train"), dt.data.ShardedDataset(f"{args.data}/val")
    build_loader = partial(dt.build_loader, collate=None if args.data is None else next_byte_batch)
    with dt.init_dist() as dist:
        run = dt.open_run(args.out, settings=vars(args))
        dt.seed_all(args.seed, dist.rank)
        mesh = dt.build_mesh()
        with torch.device("meta"):
            model = GPT(GPTConfig(n_layer=4, n_head=3, dim=96, max_seq=SEQ))
        model = dt.shard_model(model, mesh, strategy=args.strategy, blocks=(Block,))
        model = dt.materialize(model, seed=args.seed)
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, betas=(0.9, 0.95), weight_decay=0.1)
        loader = build_loader(train, mesh=mesh, global_batch_size=GLOBAL_BATCH_SIZE, seed=args.seed)

        lr = dt.schedules.warmup(dt.schedules.cosine(1.0, 0.1, args.steps), 40)
        step = dt.compose_step(
            loss_fn,
            [dt.transforms.scale_lr(lr), dt.monitors.norms(20), dt.transforms.clip_by_norm(1.0), dt.auto_microbatch()],
            batch_spec=BATCH,
        )
        state = step.init(model, optimizer, loader=loader, seed=args.seed)
        checkpoints = dt.Checkpointer(run / "checkpoints", mode="async", memory_every=10, keep_last=3)
        state = checkpoints.load(state, missing_ok=True)
        if state.restored:
            dist.print(f"resuming after step {state.step}, from {state.restored.path}")

        records, speed = dt.loggers.jsonl(run / "metrics.jsonl"), dt.monitors.throughput(20)
        log = dt.loggers.multi(records, dt.loggers.progress_bar(args.steps))
        for batch in loader.until(args.steps):
            state, metrics = step(state, batch)
            numbers = dt.reduce_metrics(metrics)
            if state.crossed(20):
                numbers = dt.monitors.collect(state, numbers, speed, dt.monitors.memory_stats)
            log(state.step, numbers)
            checkpoints.keep(state)
            if state.crossed(args.save_every):
                checkpoints.save(state)
            if dt.should_stop(state):
                break
        checkpoints.save(state)
        if dt.should_stop(state):
            return

        test_loader = build_loader(held_out, mesh=mesh, global_batch_size=64, seed=0, shuffle=False)
        loss = dt.reduce_metrics(dt.evaluate(model, test_loader, loss_fn))["loss"]
        records(state.step, {"held_out/loss": loss})
        with dt.span("baseline", "evaluation"):
            entropy = unigram_entropy(held_out)
        dist.print(f"held-out loss {loss:.4f} nats/byte, baseline {entropy:.4f} (unigram entropy)")
        with dt.eval_mode(model), dt.span("generate", "evaluation"):
            text = generate(model, b"def ", max_new=160, temperature=0.7, seed=args.seed, device=dist.device)
        dist.print("sample:\ndef " + text.decode(errors="replace"))


if __name__ == "__main__":
    main()
