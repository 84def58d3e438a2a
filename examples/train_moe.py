"""Train a mixture of experts with a balancing bias, beside a dense GPT of equal active parameters, on local text.

    dtrain launch -n 2 examples/train_moe.py              # trains both models
    python examples/train_moe.py                          # one process, no launcher
    dtrain launch -n 2 examples/train_moe.py --rate 0     # no bias: see how uneven the load becomes

Each MLP of the dense model becomes EXPERTS experts of half its width, of which every byte uses two. On two CPU
cores that other work shared, both runs take 301 s. The held-out loss is 1.787 nats per byte, that of the dense model 1.778:
so few bytes are not enough for the experts. The busiest expert has 1.18 times the mean load, and 2.53 times without a bias.
The same command resumes, also with another number of processes: biases and loads are those of the global batch. There are two
runs: OUT/dense and OUT/experts. DeepSeek-V3, arXiv:2412.19437; Wang et al. 2024, arXiv:2408.15664.
"""

import argparse
from pathlib import Path

import torch
from torch import nn

import dtrain as dt
from helpers.experts import ExpertBlock, ExpertGPT, MLPExperts, expert_loss, weigh
from helpers.gpt import GPT, Block, GPTConfig
from helpers.text import read_text, train_and_held_out

CONFIG = GPTConfig(n_layer=3, n_head=3, dim=96, max_seq=128)
EXPERTS, TOP_K = 8, 2


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("ckpt/train_moe"), help="metrics and checkpoints (%(default)s)")
    parser.add_argument("--text", metavar="GLOB", help="files to train on (default: the standard library's source code)")
    parser.add_argument("--until", default="300ba", help="length of each run (%(default)s)")
    parser.add_argument("--save-every", default="50ba", help="time between checkpoints (%(default)s)")
    parser.add_argument("--rate", type=float, default=0.01, help="change of a bias in a step; 0 for no bias (%(default)s)")
    parser.add_argument("--microbatch", type=int, default=8, help="sequences per forward of a rank (%(default)s)")
    return parser.parse_args()


def dense_loss(model: nn.Module, batch: dt.typing.Batch) -> dt.LossSum:
    return dt.linear_cross_entropy(model(batch["input_ids"], logits=False), model.head, batch["labels"])


def train(
    run: dt.run.Run, args: argparse.Namespace, data: tuple[object, object]
) -> tuple[dt.TrainState, dict[str, float]] | None:
    """Train one model; return the last state and the held-out losses, or None if the run was stopped before."""
    mesh, is_dense = dt.build_mesh(), run.path.name == "dense"
    with torch.device("meta"):
        model = GPT(CONFIG) if is_dense else ExpertGPT(CONFIG, EXPERTS, TOP_K)
    model = dt.shard_model(model, mesh, blocks=(Block,) if is_dense else (MLPExperts, ExpertBlock))
    model = dt.materialize(model, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, betas=(0.9, 0.95), weight_decay=0.1)
    loader, held_out = (
        dt.build_loader(part, mesh=mesh, global_batch_size=16, seed=0, shuffle=part is data[0]) for part in data
    )
    steps = loader.total_steps(args.until)
    lr = dt.schedules.warmup(dt.schedules.cosine(1.0, 0.1, steps), steps // 10)
    transforms = [dt.transforms.scale_lr(lr), dt.transforms.clip_by_norm(1.0)]
    if is_dense:
        step = dt.compose_step(dense_loss, transforms, microbatch_size=args.microbatch)
    else:
        balance, spec = dt.transforms.balance_experts(args.rate), dt.batch_spec(weight=weigh)
        step = dt.compose_step(expert_loss, [*transforms, balance], microbatch_size=args.microbatch, batch_spec=spec)
    checkpoints = dt.Checkpointer(run / "checkpoints", memory_every="10ba", keep_last=2)
    state = checkpoints.load(step.init(model, optimizer, loader=loader), missing_ok=True)
    records = dt.loggers.jsonl(run / "metrics.jsonl")
    log = dt.loggers.multi(records, dt.loggers.progress_bar(steps, select=["loss", "max_violation", "lr"]))
    for batch in loader.until(args.until):
        state, metrics = step(state, batch)
        log(state.step, dt.reduce_metrics(metrics))
        checkpoints.keep(state)
        if state.crossed(args.save_every):
            checkpoints.save(state)
        if dt.should_stop(state):
            break
    checkpoints.save(state)
    if dt.should_stop(state):
        return None
    losses = dt.reduce_metrics(dt.evaluate(model, held_out, dense_loss if is_dense else expert_loss))
    records(state.step, {f"held_out/{name}": loss for name, loss in losses.items()})
    return state, losses


def main() -> None:
    args = parse_args()
    data = train_and_held_out(read_text(args.text), CONFIG.max_seq, held_out_windows=256)
    ended = {}
    for name in ("dense", "experts"):
        with dt.init_dist() as dist:
            run = dt.open_run(args.out / name, settings=vars(args))
            dt.seed_all(0, dist.rank)
            result = train(run, args, data)
            if result is None:
                return
            state, ended[name] = result
            if name == "experts":
                shares = torch.stack([block.router.share for block in state.model.blocks])
                dist.print(f"largest share of an expert in the last batch {shares.max():.3f}, even {1 / EXPERTS:.3f}")
            sizes = sum(param.numel() for param in state.params.values())
            dist.print(f"{name}: {sizes / 1e6:.2f} M parameters, held-out loss {ended[name]['loss']:.4f}")
            if len(ended) == 2:
                loss, baseline = ended["experts"]["loss"], ended["dense"]["loss"]
                dist.print(
                    f"held-out loss {loss:.4f} nats/byte, baseline {baseline:.4f} (a dense model of equal active parameters)"
                )


if __name__ == "__main__":
    main()
