"""transformers Trainer and peft: LoRA on a tiny BERT classifier."""
import os

import torch
from peft import LoraConfig, TaskType, get_peft_model
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.trainer_callback import PrinterCallback
from transformers.trainer_utils import get_last_checkpoint

GLOBAL_BATCH, STEPS, VOCAB, LENGTH = 12, 8, 40, 12
OUT = "lora_out"
world = int(os.environ.get("WORLD_SIZE", 1))


def samples(n, seed):
    g = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(n):
        label = int(torch.randint(0, 3, (1,), generator=g))
        ids = torch.randint(5, VOCAB, (LENGTH,), generator=g)
        ids[torch.rand(LENGTH, generator=g) < 0.4] = 2 + label
        length = int(torch.randint(6, LENGTH + 1, (1,), generator=g))
        mask = (torch.arange(LENGTH) < length).long()
        rows.append({"input_ids": ids * mask, "attention_mask": mask, "labels": label})
    return rows


class Show(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero and ("loss" in logs or "eval_loss" in logs):
            kept = ("loss", "eval_loss", "eval_accuracy")
            text = " ".join(f"{k} {float(logs[k]):.6f}" for k in kept if k in logs)
            print(f"step {state.global_step} {text}", flush=True)


def accuracy(prediction):
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def main():
    set_seed(0)
    config = BertConfig(
        vocab_size=VOCAB, hidden_size=24, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48,
        max_position_embeddings=LENGTH, num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    base = BertForSequenceClassification(config)
    lora = LoraConfig(
        task_type=TaskType.SEQ_CLS,
        r=4,
        lora_alpha=16,
        target_modules=["query", "value"],
    )
    model = get_peft_model(base, lora)
    arguments = TrainingArguments(
        output_dir=OUT,
        max_steps=STEPS,
        per_device_train_batch_size=GLOBAL_BATCH // world,
        per_device_eval_batch_size=GLOBAL_BATCH // world,
        learning_rate=2e-2,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=4,
        save_steps=2,
        label_names=["labels"],
        average_tokens_across_devices=False,
        disable_tqdm=True,
        report_to=[],
        use_cpu=True,
        seed=0,
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=samples(60, 1),
        eval_dataset=samples(48, 2),
        compute_metrics=accuracy,
        callbacks=[Show()],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(OUT) if os.path.isdir(OUT) else None)


if __name__ == "__main__":
    main()
