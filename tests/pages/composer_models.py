"""The loop of docs/from_composer_models.md. After a change: ``python tests/written.py``."""

import torch
import torch.nn.functional as F
from transformers.models.bert.modeling_bert import BertLayer

import dtrain as dt

# The page shows this code at 88 columns.
# fmt: off


def finetune(model, train_dataset, eval_dataset, collate):
    mesh = dt.build_mesh()
    model = dt.shard_model(model, mesh, blocks=(BertLayer,))
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=3e-5, betas=(0.9, 0.98), eps=1e-6, weight_decay=3e-6
    )
    # 16 on all ranks together
    data = {"mesh": mesh, "global_batch_size": 16, "collate": collate}
    loader = dt.build_loader(train_dataset, seed=17, **data)
    eval_loader = dt.build_loader(eval_dataset, seed=17, shuffle=False, **data)
    decay = dt.schedules.linear(1.0, 0.0, 150)
    step = dt.compose_step(dt.transformers_loss, [dt.transforms.scale_lr(decay)])
    state = step.init(model, optimizer, loader=loader, seed=17)
    losses = []
    for batch in loader.until("1ep"):
        state, metrics = step(state, batch)
        losses.append(dt.reduce_metrics(metrics)["loss"])
    valid = dt.reduce_metrics(dt.evaluate(model, eval_loader, accuracy_loss))
    return state, losses, valid


def accuracy_loss(model, batch):
    logits, labels = model(**batch).logits, batch["labels"]
    losses = F.cross_entropy(logits, labels, reduction="none")
    # one number per sample
    return dt.sum_loss(losses, accuracy=(logits.argmax(-1) == labels).double())


def exact_match(model, batch):
    prompt, answers = batch["input_ids"], batch["answers"]
    length = answers.shape[1]
    mask = batch["attention_mask"]
    tokens = model.generate(
        input_ids=prompt,
        attention_mask=mask,
        min_new_tokens=length,
        max_new_tokens=length,
        do_sample=False,
    )
    hits = (tokens[:, prompt.shape[1]:] == answers).all(dim=1)
    # the share of wrong answers
    return dt.sum_loss((~hits).double())
