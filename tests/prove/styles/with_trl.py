"""A correct run of TRL's ``SFTTrainer`` over tokens of a dataset, with prompts that do not count.

Nothing is saved: after a resume, the trainer counts its tokens from 0 again.
"""

import os

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer


def make_data(samples, seed):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(4, 9, (samples,), generator=generator).tolist()
    tokens = [torch.randint(3, 32, (length,), generator=generator).tolist() for length in lengths]
    return Dataset.from_dict({"input_ids": tokens, "completion_mask": [[0, 0] + [1] * (len(row) - 2) for row in tokens]})


set_seed(0)
words = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {f"w{number}": number for number in range(3, 32)}
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(WordLevel(words, unk_token="<unk>")), pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
)
config = LlamaConfig(
    vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2
)
arguments = SFTConfig(
    output_dir="trained",
    use_cpu=True,
    bf16=False,
    seed=0,
    per_device_train_batch_size=12 // int(os.environ.get("WORLD_SIZE", "1")),
    max_steps=6,
    max_length=16,
    learning_rate=1e-2,
    logging_steps=1,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
)
trainer = SFTTrainer(model=LlamaForCausalLM(config), args=arguments, train_dataset=make_data(36, 1), processing_class=tokenizer)
trainer.train()
