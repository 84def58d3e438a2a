"""Direct preference optimisation (DPO) with a frozen reference model. A byte-level GPT learns to write docstrings.

    dtrain launch -n 2 examples/train_dpo.py                                              # trains both models
    dtrain launch -n 2 examples/train_dpo.py --init ckpt/pretrain_gpt/checkpoints         # starts from a trained reference
    python examples/train_dpo.py                                                          # one process, no launcher

The reference is a GPT trained on source code of the standard library. The policy starts as its copy, and learns to prefer the
continuation of a function's first line that has a docstring. On two CPU cores, after 71 s, the policy prefers the chosen text
of 0.945 of the held-out pairs (the reference 0.305). The same command resumes. There are two runs: OUT/reference and
OUT/policy. Checkpoints of the policy do not contain the reference, which never changes. Rafailov et al. 2023, arXiv:2305.18290.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import dtrain as dt
from helpers.gpt import GPT, Block, GPTConfig, generate
from helpers.preferences import log_probability, read_pairs
from helpers.text import ByteWindows, cut_windows

PROMPT, LENGTH = 64, 128  # bytes of the common prompt, and of a whole text
METHODS = ("reference", "warmup", "clip")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--init", metavar="CHECKPOINT", help="checkpoint of the reference (default: train one first, in --out)")
    parser.add_argument("--read", default="300ba", help="length of the training of the reference (%(default)s)")
    parser.add_argument("--until", default="100ba", help="length of the policy's training, as 100ba or 1ep (%(default)s)")
    parser.add_argument("--beta", type=float, default=0.1, help="penalty on leaving the reference (%(default)s)")
    parser.add_argument("--lr", type=float, default=3e-4, help="the policy's peak rate (%(default)s)")
    parser.add_argument("--without", nargs="+", choices=METHODS, default=[], help="methods to leave out (none)")
    parser.add_argument("--out", type=Path, default=Path("ckpt/train_dpo"), help="metrics and checkpoints (%(default)s)")
    return parser.parse_args()


def lm_loss(model: nn.Module, batch: dt.typing.Batch) -> dt.LossSum:
    return dt.linear_cross_entropy(model(batch["input_ids"], logits=False), model.head, batch["labels"])


def dpo_loss(reference: nn.Module | None, beta: float) -> dt.typing.LossFn:
    """Return the DPO loss: the policy prefers the chosen text of each pair more than the reference does."""

    def loss_fn(policy: nn.Module, batch: dt.typing.Batch) -> dt.LossSum:
        texts = torch.cat([batch["chosen"], batch["rejected"]])  # one forward for both, so weights are gathered once
        logp, reference_logp = log_probability(policy, texts, PROMPT), torch.zeros(())
        if reference is not None:
            with dt.eval_mode(reference):  # no graph, and the weights are resharded afterwards
                reference_logp = log_probability(reference, texts, PROMPT)
        (chosen, rejected), (chosen_ratio, rejected_ratio) = logp.detach().chunk(2), (logp - reference_logp).chunk(2)
        margin = beta * (chosen_ratio - rejected_ratio)
        values_by_name = {"right": chosen > rejected, "moved": margin > 0, "nats": -chosen / (LENGTH - PROMPT)}
        aux = {name: (values.sum(), len(margin)) for name, values in values_by_name.items()}
        return dt.LossSum(total=-F.logsigmoid(margin).sum(), weight=len(margin), aux=aux)

    return loss_fn


def build_gpt(mesh: DeviceMesh) -> nn.Module:
    with torch.device("meta"):
        model = GPT(GPTConfig(n_layer=4, n_head=3, dim=96, max_seq=LENGTH))
    return dt.materialize(dt.shard_model(model, mesh, blocks=(Block,)), seed=0)


def train(
    run: dt.run.Run, args: argparse.Namespace, model: nn.Module, data: Any, loss_fn: dt.typing.LossFn, lr: float
) -> int | None:
    """Continue from the last checkpoint of the run. Return the last step, or None if the run was stopped before."""
    until = args.read if run.path.name == "reference" else args.until
    loader = dt.build_loader(data, mesh=dt.build_mesh(), global_batch_size=16, seed=0)
    steps = loader.total_steps(until)
    rate = dt.schedules.cosine(1.0, 0.1, steps)
    recipe = [dt.transforms.scale_lr(rate if "warmup" in args.without else dt.schedules.warmup(rate, steps // 10))]
    step = dt.compose_step(loss_fn, recipe if "clip" in args.without else [*recipe, dt.transforms.clip_by_norm(1.0)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1)
    checkpoints = dt.Checkpointer(run / "checkpoints", memory_every="10ba", keep_last=2)
    state = checkpoints.load(step.init(model, optimizer, loader=loader), missing_ok=True)
    log = dt.loggers.multi(
        dt.loggers.jsonl(run / "metrics.jsonl"), dt.loggers.progress_bar(steps, select=["loss", "right", "lr"])
    )
    for batch in loader.until(until):
        state, metrics = step(state, batch)
        if state.crossed("5ba"):
            log(state.step, dt.reduce_metrics(metrics))
        checkpoints.keep(state)
        if state.crossed("50ba"):
            checkpoints.save(state)
        if dt.should_stop(state):
            break
    checkpoints.save(state)
    return None if dt.should_stop(state) else state.step


def main() -> None:
    args = arguments()
    pairs = read_pairs(PROMPT, LENGTH)
    if args.init is None:
        with dt.init_dist() as dist:
            run = dt.open_run(args.out / "reference", settings=vars(args))
            dt.seed_all(0, dist.rank)
            model, windows = build_gpt(dt.build_mesh()), ByteWindows(cut_windows(pairs.text, LENGTH))
            if train(run, args, model, windows, lm_loss, 5e-3) is None:
                return
    with dt.init_dist() as dist:
        run, mesh = dt.open_run(args.out / "policy", settings=vars(args)), dt.build_mesh()
        reference, policy = build_gpt(mesh), build_gpt(mesh)
        for model in (reference, policy):
            dt.load_weights_(model, args.init or args.out / "reference" / "checkpoints")
        loss_fn = dpo_loss(None if "reference" in args.without else reference, args.beta)
        last_step = train(run, args, policy, pairs.train, loss_fn, args.lr)
        if last_step is None:
            return

        test_loader = dt.build_loader(pairs.held_out[:256], mesh=mesh, global_batch_size=64, seed=0, shuffle=False)
        prompts = [bytes(row[:PROMPT].tolist()) for row in pairs.held_out["chosen"][:256:16]]
        scores, documented = [], []
        for model in (reference, policy):
            scores.append(dt.reduce_metrics(dt.evaluate(model, test_loader, dpo_loss(reference, args.beta))))
            with dt.eval_mode(model), dt.span("generate", "evaluation"):
                texts = [generate(model, p, max_new=12, temperature=0, seed=0, device=dist.device) for p in prompts]
            documented.append(sum(b'"""' in text for text in texts))
        records = dt.loggers.jsonl(run / "metrics.jsonl")
        records(last_step, {f"held_out/{name}": value for name, value in scores[1].items()})
        if dist.is_main:
            (before, after), (few, many) = scores, documented
            print(f"of {len(prompts)} held-out functions the reference writes {few} with a docstring, the policy {many}")
            print(f"chosen text: {before['nats']:.3f} nats/byte for the reference, {after['nats']:.3f} for the policy")
            print(f"moved from the reference towards the chosen text: {after['moved']:.3f} of held-out pairs (chance: 0.5)")
            print(f"held-out preference accuracy {after['right']:.4f}, baseline {before['right']:.4f} (the reference's own)")


if __name__ == "__main__":
    main()
