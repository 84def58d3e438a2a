"""transformers Trainer: a tiny GPT-2 on sequences of different lengths, with an own loss."""
import argparse
import os

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.trainer_callback import PrinterCallback
from transformers.trainer_utils import get_last_checkpoint

parser = argparse.ArgumentParser()
parser.add_argument("--gradient-accumulation-steps", type=int, default=2)
parser.add_argument("--global-batch-size", type=int, default=12)
parser.add_argument("--max-steps", type=int, default=8)
args = parser.parse_args()

VOCAB, LENGTH, IGNORE = 32, 16, -100
world = int(os.environ.get("WORLD_SIZE", 1))
set_seed(0)


def make_samples(n):
    g = torch.Generator().manual_seed(3)
    samples = []
    for _ in range(n):
        start, stride = torch.randint(0, VOCAB, (2,), generator=g)
        ids = (start + (1 + stride % 3) * torch.arange(LENGTH)) % VOCAB
        length = int(torch.randint(3, LENGTH + 1, (1,), generator=g))
        keep = torch.arange(LENGTH) < length
        samples.append({"input_ids": ids, "attention_mask": keep.long(), "labels": ids.where(keep, torch.tensor(IGNORE))})
    return samples


def smoothed_loss(outputs, labels, num_items_in_batch=None):
    logits = outputs.logits[:, :-1].flatten(0, 1)
    target = labels[:, 1:].flatten()
    options = dict(ignore_index=IGNORE, label_smoothing=0.1)
    if num_items_in_batch is None:
        return torch.nn.functional.cross_entropy(logits, target, **options)
    return torch.nn.functional.cross_entropy(logits, target, reduction="sum", **options) / num_items_in_batch


class Show(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero and "loss" in logs:
            print(f"step {state.global_step} loss {float(logs['loss']):.7f} grad_norm {float(logs['grad_norm']):.7f}", flush=True)


config = GPT2Config(
    vocab_size=VOCAB, n_positions=LENGTH, n_embd=24, n_layer=2, n_head=2,
    resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
)  # fmt: skip
training = TrainingArguments(
    output_dir="trainer_out",
    max_steps=args.max_steps,
    per_device_train_batch_size=args.global_batch_size // (world * args.gradient_accumulation_steps),
    gradient_accumulation_steps=args.gradient_accumulation_steps,
    learning_rate=5e-3,
    lr_scheduler_type="linear",
    warmup_steps=2,
    logging_steps=1,
    save_strategy="steps",
    save_steps=2,
    disable_tqdm=True,
    report_to=[],
    use_cpu=True,
    seed=0,
)
trainer = Trainer(
    model=GPT2LMHeadModel(config),
    args=training,
    train_dataset=make_samples(72),
    compute_loss_func=smoothed_loss,
    callbacks=[Show()],
)
trainer.remove_callback(PrinterCallback)
last = get_last_checkpoint("trainer_out") if os.path.isdir("trainer_out") else None
trainer.train(resume_from_checkpoint=last)
