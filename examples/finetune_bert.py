"""Train a BERT of the transformers library, which knows nothing of dtrain, to tell which package a docstring is from.

    dtrain launch -n 2 examples/finetune_bert.py                     # a tiny BERT with random weights
    dtrain launch -n 2 examples/finetune_bert.py --weights FOLDER    # what save_pretrained has written into FOLDER
    python examples/finetune_bert.py                                 # one process, no launcher

The same command goes on after the last checkpoint. Needs `pip install transformers`; nothing is downloaded.
"""

import argparse
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import nn
from transformers import BertConfig, BertForSequenceClassification
from transformers.models.bert.modeling_bert import BertLayer

import dtrain as dt
from docstrings import PACKAGES, build_tokenizer, read_docstrings, train_and_held_out

SEQ = 64


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, metavar="FOLDER", help="config.json, model.safetensors; maybe tokenizer.json")
    parser.add_argument("--out", type=Path, default=Path("ckpt/finetune_bert"), help="metrics and checkpoints (%(default)s)")
    parser.add_argument("--until", default="8ep", help="length of the run, as 8ep or 400ba (%(default)s)")
    parser.add_argument("--save-every", default="2ep", help="time between checkpoints (%(default)s)")
    return parser.parse_args()


def tokenizer_and_config(folder: Path | None, texts: list[str]) -> tuple[Tokenizer, BertConfig]:
    """Those of the folder, or new ones of a size for a laptop."""
    has_one = folder is not None and (folder / "tokenizer.json").exists()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json")) if has_one else build_tokenizer(texts)
    if folder is not None:
        config = BertConfig.from_pretrained(folder, num_labels=len(PACKAGES))
        if (words := tokenizer.get_vocab_size()) > config.vocab_size:
            raise SystemExit(f"{folder}: {words} words, the model knows {config.vocab_size}; put its tokenizer.json there")
        return tokenizer, config
    sizes = {"hidden_size": 96, "intermediate_size": 384, "num_hidden_layers": 3, "num_attention_heads": 3}
    return tokenizer, BertConfig(vocab_size=tokenizer.get_vocab_size(), num_labels=len(PACKAGES), **sizes)


def without_old_head(name: str) -> str | None:
    """A name in a file of weights as it is in the model; the head that BERT was pretrained with is left out."""
    return None if name.startswith("cls.") else name


def loss_fn(model: nn.Module, batch: dt.Batch) -> dt.LossSum:
    output, count = model(**batch), len(batch["labels"])
    right = (output.logits.argmax(-1) == batch["labels"]).sum()
    return dt.LossSum(total=output.loss * count, weight=count, aux={"accuracy": (right, count)})


def main() -> None:
    args = arguments()
    texts, labels = read_docstrings()
    tokenizer, config = tokenizer_and_config(args.weights, texts)
    train, held_out = train_and_held_out(texts, labels, tokenizer, SEQ)
    with dt.init_dist() as dist:
        dt.seed_all(0, dist.rank)
        mesh = dt.build_mesh()
        with torch.device("meta"):
            model = BertForSequenceClassification(config)
        model = dt.shard_model(model, mesh, blocks=(BertLayer,))
        model = dt.materialize(model, seed=0, init=model._init_weights)
        if args.weights is not None:
            dt.load_weights_(model, args.weights, rename=without_old_head, missing=["classifier.*", "bert.pooler.**"])

        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3 if args.weights is None else 5e-5, weight_decay=0.01)
        loader = dt.build_loader(train, mesh=mesh, global_batch_size=32, seed=0)
        steps = loader.total_steps(args.until)
        rate = dt.with_warmup(dt.linear(1.0, 0.0, steps), steps // 10)
        step = dt.compose_step(loss_fn, [dt.scale_lr(rate), dt.clip_by_norm(1.0)])
        checkpoints, log = args.out / "checkpoints", dt.jsonl(args.out / "metrics.jsonl")
        state = dt.load_sharded(checkpoints, step.init(model, optimizer), extra={"loader": loader}, missing_ok=True).state
        for batch in loader.until(args.until):
            state, metrics = step(state, batch)
            numbers = dt.reduce_metrics(metrics)
            log(state.step, numbers)
            if state.crossed("20ba") and dist.rank == 0:
                print(f"step {state.step} of {steps}: loss {numbers['loss']:.3f}, accuracy {numbers['accuracy']:.2f}")
            stop = dt.should_stop(state)
            if stop or state.crossed(args.save_every) or state.step == steps:
                dt.save_sharded(checkpoints, state, extra={"loader": loader}, mode="async", keep_last=2)
            if stop:
                return

        quiz = dt.build_loader(held_out, mesh=mesh, global_batch_size=64, seed=0, shuffle=False)
        numbers = dt.reduce_metrics(dt.evaluate(model, quiz, loss_fn))
        if dist.rank == 0:
            print(f"held-out loss {numbers['loss']:.4f}, accuracy {numbers['accuracy']:.3f} of {len(held_out)} docstrings")


if __name__ == "__main__":
    main()
