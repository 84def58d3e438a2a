"""Group-relative policy optimisation (GRPO): a policy learns to sort digits from rewards alone. Kill it at any moment.

    dtrain launch -n 2 examples/train_grpo.py                     # two processes, one GPU each if there are enough
    python examples/train_grpo.py                                 # one process, no launcher

The policy is a GPT with random weights. It writes a group of answers to each prompt of a rollout, an exact checker scores them,
and answers become likelier that are better than their group. Each rollout has four updates with a clipped ratio, and a penalty
on leaving the reference, a copy of the first weights. On two CPU cores, after 70 s, 0.757 of the held-out digits
stand in their place (0.114 at the start). The same command resumes, between rollouts and inside of one, also with another
number of processes: a checkpoint holds the rollout. Shao et al. 2024, arXiv:2402.03300.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn

import dtrain as dt
from helpers.gpt import GPT, Block, GPTConfig
from helpers.sorting import DIGITS, generate, prompts, roll_out, score

CONFIG = GPTConfig(n_layer=2, n_head=2, dim=64, max_seq=2 * DIGITS, vocab=11)
GROUPS, GROUP_SIZE = 32, 16  # prompts of a rollout, and answers to each
MINIBATCH, EPOCHS = 256, 2  # answers per update, and passes over a rollout: four updates


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("ckpt/train_grpo"), help="metrics and checkpoints (%(default)s)")
    parser.add_argument("--steps", type=int, default=400, help="updates, in whole rollouts (%(default)s)")
    parser.add_argument("--save-every", type=int, default=50, metavar="STEPS", help="updates per checkpoint (%(default)s)")
    parser.add_argument("--beta", type=float, default=0.001, help="penalty on leaving the reference (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and rollouts (%(default)s)")
    return parser.parse_args()


def answer_log_probs(policy: nn.Module, texts: Tensor) -> Tensor:
    """Return the log-probabilities of the answers, ``[n, DIGITS]``."""
    return dt.linear_token_log_probs(policy(texts[:, :-1], logits=False)[:, DIGITS:], policy.head, texts[:, DIGITS + 1 :])


def grpo_loss(beta: float) -> dt.typing.LossFn:
    def loss_fn(policy: nn.Module, batch: dt.typing.Batch) -> dt.LossSum:
        log_probs = answer_log_probs(policy, batch["texts"])
        ratio = (log_probs - batch["log_probs"]).exp()
        advantage = batch["advantage"][:, None].to(ratio)
        gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        apart = batch["reference"] - log_probs
        kl = apart.exp() - apart - 1
        clipped = ((ratio - 1).abs() > 0.2).to(ratio)
        loss = dt.sum_loss(beta * kl - gain, kl=kl, clipped=clipped)
        rewards = {"reward": (batch["reward"].sum(), len(ratio))}
        return dt.LossSum(
            total=loss.total,
            weight=loss.weight,
            aux={**loss.aux, **rewards, **dt.monitors.rollout_mismatch(log_probs, batch["log_probs"])},
        )

    return loss_fn


def held_out_score(policy: nn.Module, batch: Tensor) -> dt.LossSum:
    scores = score(generate(policy, batch)[0])
    return dt.sum_loss(scores, exact=(scores == 1).double())


def main() -> None:
    args = parse_args()
    with dt.init_dist() as dist:
        run = dt.open_run(args.out, settings=vars(args))
        dt.seed_all(args.seed, dist.rank)
        mesh = dt.build_mesh()
        with torch.device("meta"):
            policy = GPT(CONFIG)
        policy = dt.materialize(dt.shard_model(policy, mesh, blocks=(Block,)), seed=args.seed)
        reference = dt.shard.snapshot(policy)  # a resume makes the same one: its weights are loaded below
        optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0)
        step = dt.compose_step(grpo_loss(args.beta), [dt.transforms.clip_by_norm(1.0)])
        buffer = dt.data.RolloutBuffer(mesh=mesh, global_batch_size=MINIBATCH, epochs=EPOCHS, seed=args.seed)
        checkpoints = dt.Checkpointer(run / "checkpoints", memory_every="10ba", keep_last=2)
        state = checkpoints.load(step.init(policy, optimizer, loader=buffer), missing_ok=True)

        records = dt.loggers.jsonl(run / "metrics.jsonl")
        log = dt.loggers.multi(records, dt.loggers.progress_bar(args.steps, select=["reward", "kl", "clipped"]))
        index, count = dt.dist.data_rank(mesh)
        while state.step < args.steps and not dt.should_stop(state):
            if buffer.is_finished:
                groups = torch.arange(GROUPS)[index::count]
                rows = roll_out(policy, groups, GROUP_SIZE, buffer.rollouts, seed=args.seed, device=dist.device)
                with dt.shard.use_snapshot(policy, reference), dt.eval_mode(policy):
                    rows["reference"] = answer_log_probs(policy, rows["texts"])
                buffer.fill(rows, order=rows["number"])
            for batch in buffer:
                state, metrics = step(state, batch)
                log(state.step, dt.reduce_metrics(metrics))
                checkpoints.keep(state)
                if state.crossed(args.save_every):
                    checkpoints.save(state)
                if dt.should_stop(state):
                    break
        checkpoints.save(state)
        if dt.should_stop(state):
            return

        held_out = dt.build_loader(
            prompts(torch.arange(512), "held out"), mesh=mesh, global_batch_size=256, seed=0, shuffle=False
        )
        after = dt.reduce_metrics(dt.evaluate(policy, held_out, held_out_score))
        with dt.shard.use_snapshot(policy, reference):
            before = dt.reduce_metrics(dt.evaluate(policy, held_out, held_out_score))
        records(state.step, {f"held_out/{name}": value for name, value in after.items()})
        dist.print(f"answers without a mistake: {after['exact']:.3f} of held-out prompts, {before['exact']:.3f} at the start")
        dist.print(f"held-out score {after['loss']:.4f}, baseline {before['loss']:.4f} (the policy before its training)")


if __name__ == "__main__":
    main()
