"""LoRA on a tiny BERT classifier, head trained too; adapter checkpoints every two steps."""
import glob
import os

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.nn.parallel import DistributedDataParallel
from transformers import BertConfig, BertForSequenceClassification

STEPS, BATCH, VOCAB, SEQ = 8, 24, 60, 10
OUT = "lora_out"


def build():
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=SEQ, num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )
    base = BertForSequenceClassification(config)
    model = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules=["query", "value"], lora_dropout=0.0))
    for name, p in model.named_parameters():
        if "classifier" in name:
            p.requires_grad_(True)
    return model


def batches():
    g = torch.Generator().manual_seed(17)
    ids = torch.randint(1, VOCAB, (STEPS * BATCH, SEQ), generator=g)
    labels = (ids[:, :3] > VOCAB // 2).sum(1).clamp(max=2)
    return list(zip(ids.split(BATCH), labels.split(BATCH)))


def pack(model):
    return {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}


def unpack(model, weights):
    model.load_state_dict(weights, strict=False)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = build()
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-2, weight_decay=0.0)
    start = 0
    files = sorted(glob.glob(f"{OUT}/adapter-*.pt"))
    if files:
        saved = torch.load(files[-1])
        unpack(model, saved["weights"])
        optimizer.load_state_dict(saved["optimizer"])
        start = saved["step"]
    ddp = DistributedDataParallel(model)
    for step, (ids, labels) in enumerate(batches()):
        if step < start:
            continue
        out = ddp(input_ids=ids[rank::world], attention_mask=torch.ones_like(ids[rank::world]), labels=labels[rank::world])
        optimizer.zero_grad()
        out.loss.backward()
        optimizer.step()
        loss = out.loss.detach().clone()
        dist.all_reduce(loss)
        if rank == 0:
            print(f"step {step + 1} loss {loss.item() / world:.6f}", flush=True)
            if (step + 1) % 2 == 0:
                os.makedirs(OUT, exist_ok=True)
                part = f"{OUT}/part.tmp"
                torch.save({"weights": pack(model), "optimizer": optimizer.state_dict(), "step": step + 1}, part)
                os.replace(part, f"{OUT}/adapter-{step + 1:05d}.pt")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
