import torch, math
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from accelerate import Accelerator
from accelerate.utils import set_seed

# ---- config
global_batch = 30
epochs = 2
base_lr = 0.05
warmup = 2

accelerator = Accelerator(cpu=True)
set_seed(7)

# ---- wide & deep style CTR model on made up clicks
n_users, n_items = 40, 25
g = torch.Generator().manual_seed(0)
users = torch.randint(n_users, (120,), generator=g)
items = torch.randint(n_items, (120,), generator=g)
affinity = torch.randn(n_users, 3, generator=g) @ torch.randn(3, n_items, generator=g)
clicks = (affinity[users, items] > 0.3).float()


class WideDeep(nn.Module):
    def __init__(self, dim=8):
        super().__init__()
        self.u = nn.Embedding(n_users, dim)
        self.i = nn.Embedding(n_items, dim)
        self.wide = nn.Embedding(n_items, 1)
        self.deep = nn.Sequential(nn.Linear(2 * dim, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, user, item):
        h = torch.cat([self.u(user), self.i(item)], -1)
        return (self.deep(h) + self.wide(item)).squeeze(-1)


model = WideDeep()
optimizer = torch.optim.Adagrad(model.parameters(), lr=base_lr)
loader = DataLoader(
    TensorDataset(users, items, clicks), batch_size=global_batch // accelerator.num_processes, drop_last=True
)
total = epochs * (len(users) // global_batch)


def factor(step):
    if step < warmup:
        return (step + 1) / (warmup + 1)
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))


scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
bce = nn.BCEWithLogitsLoss()

step = 0
for epoch in range(epochs):
    for user, item, click in loader:
        lr = scheduler.get_last_lr()[0]
        loss = bce(model(user, item), click)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        step += 1
        mean = accelerator.gather(loss.detach()).mean().item()
        accelerator.print(f"epoch {epoch} step {step} lr {lr:.6f} logloss {mean:.6f}")
accelerator.end_training()
