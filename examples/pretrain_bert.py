"""Pretrain a BERT of the transformers library: predict masked tokens in the documentation that comes with Python.

    dtrain launch -n 2 examples/pretrain_bert.py                                       # all methods
    dtrain launch -n 2 examples/pretrain_bert.py --without alibi packing --out OTHER   # without two methods
    python examples/pretrain_bert.py                                                   # one process, no launcher

Surgery adds ALiBi, gated linear units and low-precision layer norms before sharding. Documents are packed into blocks.
On two CPU cores: 153 s, held-out loss 4.13 (unigram entropy 5.36). The same command resumes. Needs `pip install transformers`.
"""

import argparse
import warnings
from pathlib import Path

import torch
from torch import nn
from transformers import BertConfig, BertForMaskedLM
from transformers.models.bert.modeling_bert import BertLayer, BertLMPredictionHead

import dtrain as dt
from helpers.masked_text import Corpus, MaskedOnce, Masking, packed, padded, read_corpus

SEQ = 128
METHODS = ("alibi", "glu", "low_precision_norm", "length_warmup", "packing")

# In bfloat16 on a CPU the logits are a view of the last matmul's output. Only a loss that writes into its logits is affected.
warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--until", default="3ep", help="length of the run, as 3ep or 400ba (%(default)s)")
    parser.add_argument("--without", nargs="+", choices=METHODS, default=[], metavar="METHOD", help=f"of {', '.join(METHODS)}")
    parser.add_argument("--out", type=Path, default=Path("ckpt/pretrain_bert"), help="metrics and checkpoints (%(default)s)")
    return parser.parse_args()


def build_bert(words: int, methods: set[str]) -> nn.Module:
    """Build BERT with the methods on the meta device. The gate adds a third matrix, so the intermediate size is smaller."""
    config = BertConfig(
        vocab_size=words,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=344 if "glu" in methods else 512,
        max_position_embeddings=SEQ,
        hidden_dropout_prob=0.0,  # three epochs are too few to overfit
        attention_probs_dropout_prob=0.0,
    )
    with torch.device("meta"):
        model: nn.Module = BertForMaskedLM(config)
    edits = {
        "alibi": dt.surgery.alibi,
        "glu": dt.surgery.gated_linear_units,
        "low_precision_norm": dt.surgery.low_precision_layer_norm,
    }
    for name, edit in edits.items():
        model = edit(model) if name in methods else model
    return model


def shard_and_initialize(model: nn.Module, mesh: object, corpus: Corpus) -> nn.Module:
    """Shard the model and initialize it as BERT does, except for the output bias: the logarithm of the token frequencies."""
    bert_init, frequency = model._init_weights, corpus.log_frequency()

    def init(module: nn.Module) -> None:
        bert_init(module)
        if isinstance(module, BertLMPredictionHead):
            module.bias.data.copy_(frequency)

    return dt.materialize(dt.shard_model(model, mesh, blocks=(BertLayer,)), seed=0, init=init)


def loss_fn(model: nn.Module, batch: dt.typing.Batch) -> dt.LossSum:
    tokens, labels = batch["input_ids"], batch["labels"]
    attention_mask = dt.data.document_mask(batch["documents"], causal=False)
    logits = model(input_ids=tokens, attention_mask=attention_mask, position_ids=batch["positions"]).logits
    loss = dt.cross_entropy(logits, labels)
    right, length = (logits.argmax(-1) == labels).sum(), (tokens.numel(), len(tokens))
    return dt.LossSum(total=loss.total, weight=loss.weight, aux={"right": (right, loss.weight), "length": length})


def main() -> None:
    args = arguments()
    methods, corpus = set(METHODS) - set(args.without), read_corpus()
    masking = Masking(corpus)
    blocks = (packed if "packing" in methods else padded)(corpus.train, SEQ)
    with dt.init_dist() as dist:
        run, mesh = dt.open_run(args.out, settings=vars(args)), dt.build_mesh()
        model = shard_and_initialize(build_bert(corpus.words, methods), mesh, corpus)
        optimizer = dt.optim.DecoupledAdamW(dt.optim.param_groups(model, weight_decay=1e-5), lr=2e-3, betas=(0.9, 0.98))
        loader = dt.build_loader(blocks, mesh=mesh, global_batch_size=16, seed=0, transform=masking)
        length = loader.run_length(args.until)
        rate = dt.schedules.warmup(dt.schedules.linear(1.0, 0.02, length.steps()), length.steps() * 6 // 100)
        recipe = [dt.transforms.scale_lr(rate), dt.transforms.clip_by_norm(1.0), dt.transforms.autocast("bf16")]
        if "length_warmup" in methods:
            recipe.append(dt.transforms.sequence_length_warmup(end="0.3dur", initial_length=32, max_length=SEQ))
        step = dt.compose_step(loss_fn, recipe)
        state = step.init(model, optimizer, loader=loader, run_length=length)
        checkpoints = dt.Checkpointer(run / "checkpoints", mode="async", memory_every="10ba", keep_last=2)
        state = checkpoints.load(state, missing_ok=True)
        records = dt.loggers.jsonl(run / "metrics.jsonl")
        log = dt.loggers.multi(records, dt.loggers.progress_bar(length.steps(), select=["loss", "right", "length", "lr"]))
        for batch in loader.until(args.until):
            state, metrics = step(state, batch)
            log(state.step, dt.reduce_metrics(metrics))
            checkpoints.keep(state)
            if state.crossed("0.25dur"):
                checkpoints.save(state)
            if dt.should_stop(state):
                break
        checkpoints.save(state)
        if dt.should_stop(state):
            return

        with dt.span("gaps", "evaluation"):
            gaps = MaskedOnce(packed(corpus.held_out, SEQ), masking)
        test_loader = dt.build_loader(gaps, mesh=mesh, global_batch_size=64, seed=0, shuffle=False)
        scores = dt.reduce_metrics(dt.evaluate(model, test_loader, loss_fn))
        records(state.step, {"held_out/loss": scores["loss"], "held_out/right": scores["right"]})
        if dist.is_main:
            counts = gaps.counts()
            frequent = f"the most frequent token {counts.max() / counts.sum():.1%}"
            print(f"{scores['right']:.1%} of {counts.sum()} masked tokens are predicted, baseline: {frequent}")
            print(f"held-out loss {scores['loss']:.4f} nats/token, baseline {gaps.entropy():.4f} (unigram entropy)")


if __name__ == "__main__":
    main()
