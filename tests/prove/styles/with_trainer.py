"""A correct run of transformers' ``Trainer``: padded sequences, evaluations, checkpoints; ``--lora``, ``--accumulate``."""

import os
import sys

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint


def make_data(samples, seed):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(4, 9, (samples,), generator=generator)
    return [{"input_ids": torch.randint(1, 32, (int(length),), generator=generator)} for length in lengths]


def collate(samples):
    ids = torch.nn.utils.rnn.pad_sequence([sample["input_ids"] for sample in samples], batch_first=True)
    mask = ids != 0
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": ids.masked_fill(~mask, -100)}


set_seed(0)
config = LlamaConfig(
    vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2
)
model = LlamaForCausalLM(config)
if "--lora" in sys.argv:
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
accumulation = 2 if "--accumulate" in sys.argv else 1
arguments = TrainingArguments(
    output_dir="trained",
    use_cpu=True,
    seed=0,
    per_device_train_batch_size=12 // accumulation // int(os.environ.get("WORLD_SIZE", "1")),
    gradient_accumulation_steps=accumulation,
    per_device_eval_batch_size=6 // int(os.environ.get("WORLD_SIZE", "1")),
    max_steps=6,
    learning_rate=1e-2,
    warmup_steps=2,
    logging_steps=1,
    eval_strategy="steps",
    eval_steps=2,
    save_steps=2,
    report_to=[],
    disable_tqdm=True,
)
trainer = Trainer(
    model=model, args=arguments, train_dataset=make_data(36, 1), eval_dataset=make_data(12, 2), data_collator=collate
)
checkpoint = get_last_checkpoint("trained") if os.path.isdir("trained") else None
trainer.train(resume_from_checkpoint=checkpoint)
trainer.save_model("final")
