"""Train a text embedding in which the description of a function lies near its code: contrastive, over the pairs of all ranks.

    dtrain launch -n 2 examples/train_embeddings.py                        # the standard library's functions, on two processes
    python examples/train_embeddings.py                                    # one process, no launcher
    python examples/train_embeddings.py --without gather cache             # an ablation of both methods

A pair's negatives are all other codes of the global batch: those of other ranks come by `dt.dist.all_gather_with_grad`, and the
model, but not the loss, is cut into microbatches by `dt.step.grad_cache_step`. On two CPU cores: 76 s, the right code is first
for 0.592 of the held-out descriptions (0.431 by the words they share). The same command resumes. Needs
`pip install tokenizers`.
"""

import argparse
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dtrain as dt
from helpers.pairs import read_pairs, token_pairs, word_overlap

METHODS = ("gather", "cache")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--until", default="10ep", metavar="LENGTH", help="as 10ep or 200ba (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("ckpt/train_embeddings"), help="metrics and checkpoints (%(default)s)")
    parser.add_argument("--batch", type=int, default=256, help="pairs that are each other's negatives (%(default)s)")
    parser.add_argument("--microbatch", type=int, default=8, help="pairs in a forward, on each rank (%(default)s)")
    parser.add_argument("--without", nargs="*", choices=METHODS, default=[], metavar="METHOD", help="gather, cache (nothing)")
    return parser.parse_args()


class Encoder(nn.Module):
    """Encode tokens, int64 [batch, seq] with padding 0, as one unit vector per text: [batch, dim]."""

    def __init__(self, vocab: int, dim: int = 256, inner: int = 64) -> None:
        super().__init__()
        # Small values, so that one learning rate suits all parameters.
        self.words = nn.Embedding(vocab, dim, _weight=0.05 * torch.randn(vocab, dim))
        self.importance = nn.Embedding(vocab, 1, _weight=torch.zeros(vocab, 1))
        self.down, self.up = nn.Linear(dim, inner), nn.Linear(inner, dim)
        self.block = nn.TransformerEncoderLayer(inner, 4, 2 * inner, 0.1, F.gelu, batch_first=True, norm_first=True)
        nn.init.zeros_(self.up.weight)  # starts as a bag of words
        self.temperature = nn.Parameter(torch.tensor(3.0))  # logarithm of the scale of the similarities

    def forward(self, tokens: Tensor) -> Tensor:
        padding, x = tokens == 0, self.words(tokens)
        x = x + self.up(self.block(self.down(x), src_key_padding_mask=padding))
        share = (20 * self.importance(tokens)[..., 0]).masked_fill(padding, -torch.inf).softmax(1)
        return F.normalize((share[..., None] * x).sum(1), dim=1)


def contrastive_loss(model: nn.Module, batch: dt.typing.Batch, *, gather: bool = True) -> dt.LossSum:
    """Return the symmetric InfoNCE loss over all descriptions and codes of the global batch."""
    local = [model(batch[side]) for side in ("summary", "code")]
    gathered = [dt.dist.all_gather_with_grad(z) for z in local] if gather else local
    ids = dt.dist.all_gather_ragged(batch["id"]) if gather else batch["id"]
    right = (batch["id"][:, None] == ids).int().argmax(1)
    scale = model.temperature.exp()
    forward, backward = (scale * z @ others.t() for z, others in zip(local, reversed(gathered), strict=True))
    total = sum(F.cross_entropy(logits, right, reduction="sum") for logits in (forward, backward)) / 2
    return dt.LossSum(total=total, weight=len(right), aux={"found": ((forward.argmax(1) == right).sum(), len(right))})


def main() -> None:
    args = arguments()
    training, held_out, vocab = token_pairs(read_pairs())
    with dt.init_dist() as dist:
        run, mesh = dt.open_run(args.out, settings=vars(args)), dt.build_mesh()
        dt.seed_all(0, dist.rank)
        model = dt.shard_model(Encoder(vocab), mesh, strategy="replicate", blocks=(nn.TransformerEncoderLayer,))
        optimizer = torch.optim.AdamW(dt.optim.param_groups(model, weight_decay=0.01), lr=4e-3)
        pairs = dt.build_loader(training, mesh=mesh, global_batch_size=args.batch, seed=0, last_batch="drop")
        length = pairs.run_length(args.until)

        grad = dt.microbatch_step if "cache" in args.without else dt.step.grad_cache_step
        step = dt.compose_step(
            partial(contrastive_loss, gather="gather" not in args.without),
            [
                dt.transforms.scale_lr(dt.schedules.warmup(dt.schedules.linear(1.0, 0.0, length.steps()), 20)),
                dt.transforms.clip_by_norm(1.0),
            ],
            grad=grad,
            microbatch_size=args.microbatch,
        )
        state = step.init(model, optimizer, loader=pairs, run_length=length)
        checkpoints = dt.Checkpointer(run / "checkpoints", mode="async", memory_every="10ba", keep_last=2)
        state = checkpoints.load(state, missing_ok=True)
        records = dt.loggers.jsonl(run / "metrics.jsonl")
        log = dt.loggers.multi(records, dt.loggers.progress_bar(length.steps(), select=["loss", "found", "lr"]))
        for batch in pairs.until(args.until):
            state, metrics = step(state, batch)
            if state.crossed("0.01dur"):
                log(state.step, dt.reduce_metrics(metrics))
            checkpoints.keep(state)
            if state.crossed("0.3dur"):
                checkpoints.save(state)
            if dt.should_stop(state):
                break
        checkpoints.save(state)
        if dt.should_stop(state):
            return

        # One batch of all held-out pairs, so that each description is compared with each code.
        test_loader = dt.build_loader(held_out, mesh=mesh, global_batch_size=len(held_out), seed=0, shuffle=False)
        recall = dt.reduce_metrics(dt.evaluate(model, test_loader, contrastive_loss))["found"]
        records(state.step, {"held_out/found": recall})
        if dist.is_main:
            with dt.span("baseline", "evaluation"):
                by_words = word_overlap(training, held_out, vocab)
            print(f"right code first {recall:.4f}, baseline {by_words:.4f} (the words they share, of {len(held_out)} codes)")


if __name__ == "__main__":
    main()
