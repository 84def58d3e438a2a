import os
import random
import torch
import torch.distributed as dist
import torch.nn as nn

random.seed(10)
torch.manual_seed(10)

GOOD = "great lovely superb fine bright funny warm clever".split()
BAD = "awful dull poor bad slow cold silly flat".split()
FILL = "the a film plot actor scene was and it with very".split()


def make_reviews(n):
    reviews = []
    for _ in range(n):
        label = random.randint(0, 1)
        words = random.choices(FILL, k=8) + random.choices(GOOD if label else BAD, k=3)
        random.shuffle(words)
        reviews.append((" ".join(words), label))
    return reviews


def build_vocab(reviews):
    words = set()
    for text, _ in reviews:
        words.update(text.split())
    return {w: i for i, w in enumerate(sorted(words))}


class BagClassifier(nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.emb = nn.EmbeddingBag(vocab_size, 16, mode="mean")
        self.fc = nn.Linear(16, 2)

    def forward(self, ids):
        return self.fc(torch.relu(self.emb(ids)))


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
batch_size = 24
reviews = make_reviews(batch_size * 8)
vocab = build_vocab(reviews)
model = nn.parallel.DistributedDataParallel(BagClassifier(len(vocab)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.8, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)

step = 0
if os.path.exists("model.pt"):
    saved = torch.load("model.pt")
    model.module.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    scheduler.load_state_dict(saved["scheduler"])
    step = saved["step"]

while step < 8:
    chunk = reviews[step * batch_size:(step + 1) * batch_size][rank::world]
    ids = torch.tensor([[vocab[w] for w in text.split()] for text, _ in chunk])
    labels = torch.tensor([label for _, label in chunk])
    logits = model(ids)
    loss = nn.functional.cross_entropy(logits, labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    step += 1
    stats = torch.stack([loss.detach(), (logits.argmax(1) == labels).to(loss.dtype).mean()])
    dist.all_reduce(stats)
    stats /= world
    if rank == 0:
        print(f"step {step} loss {stats[0]:.6f} acc {stats[1]:.3f}", flush=True)
        torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict(),
                    "scheduler": scheduler.state_dict(), "step": step}, "model.tmp")
        os.replace("model.tmp", "model.pt")
    dist.barrier()

dist.destroy_process_group()
