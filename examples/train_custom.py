"""The smallest useful loop: a network learns to predict the next byte of Python's own source code.

    dtrain launch -n 2 examples/train_custom.py      # two processes, one GPU each if there are enough
    python examples/train_custom.py                  # one process, no launcher

On two CPU cores the first command takes 120 s of processor time, to a held-out loss of 1.78 nats per byte (unigram entropy
3.15). The same command resumes. `dtrain report OUT` makes a page of the run.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn

import dtrain as dt

CONTEXT = 16  # bytes that the network reads
HELD_OUT = 20_000  # windows


def read_windows() -> tuple[Tensor, Tensor]:
    """Return windows to train on, and held-out windows: uint8 [count, CONTEXT + 1]."""
    standard_library = Path(argparse.__file__).parent
    text = b"".join(path.read_bytes() for path in sorted(standard_library.glob("*.py")))
    windows = torch.frombuffer(bytearray(text), dtype=torch.uint8).unfold(0, CONTEXT + 1, CONTEXT + 1)
    return windows[HELD_OUT:], windows[:HELD_OUT]


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(256, 32),
        nn.Flatten(),
        nn.Linear(32 * CONTEXT, 512),
        nn.ReLU(),
        nn.Linear(512, 256),
    )


def loss_fn(model: nn.Module, batch: dt.typing.Batch) -> dt.LossSum:
    context, next_byte = batch[:, :CONTEXT], batch[:, CONTEXT]
    return dt.soft_cross_entropy(model(context.int()), next_byte.long())


def unigram_entropy(windows: Tensor) -> float:
    """Return the loss of the best prediction without context."""
    share = windows[:, CONTEXT].int().bincount() / len(windows)
    return float(torch.special.entr(share).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="ckpt/train_custom", help="metrics and checkpoints (%(default)s)")
    parser.add_argument("--until", default="3ep", help="length of the run, as 3ep or 400ba (%(default)s)")
    args = parser.parse_args()
    train, held_out = read_windows()

    with dt.init_dist() as dist:
        run = dt.open_run(args.out, settings=vars(args))
        mesh = dt.build_mesh()
        with torch.device("meta"):
            model = build_model()
        model = dt.shard_model(model, mesh, blocks=(nn.Linear,))
        model = dt.materialize(model, seed=0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        loader = dt.build_loader(train, mesh=mesh, global_batch_size=256, seed=0)
        length = loader.run_length(args.until)

        rate = dt.schedules.linear(1.0, 0.0, length.steps())
        step = dt.compose_step(loss_fn, [dt.transforms.scale_lr(rate), dt.transforms.clip_by_norm(1.0)])
        state = step.init(model, optimizer, loader=loader, run_length=length)
        checkpoints = dt.Checkpointer(run / "checkpoints", mode="async", memory_every="10ba", keep_last=2)
        state = checkpoints.load(state, missing_ok=True)

        records = dt.loggers.jsonl(run / "metrics.jsonl")
        log = dt.loggers.multi(records, dt.loggers.progress_bar(length.steps()))
        for batch in loader.until(args.until):
            state, metrics = step(state, batch)
            if state.crossed("0.01dur"):
                log(state.step, dt.reduce_metrics(metrics))
            checkpoints.keep(state)
            if state.crossed("0.1dur"):
                checkpoints.save(state)
            if dt.should_stop(state):
                break
        checkpoints.save(state)
        if dt.should_stop(state):
            return

        test_loader = dt.build_loader(held_out, mesh=mesh, global_batch_size=256, seed=0)
        loss = dt.reduce_metrics(dt.evaluate(model, test_loader, loss_fn))["loss"]
        records(state.step, {"held_out/loss": loss})
        dist.print(f"held-out loss {loss:.4f} nats/byte, baseline {unigram_entropy(held_out):.4f} (unigram entropy)")


if __name__ == "__main__":
    main()
