"""2D segmentation with soft Dice + cross entropy, after nnU-Net's trainer, tiny."""
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_reduce
from torch.nn.parallel import DistributedDataParallel as DDP


class SoftDice(nn.Module):
    """Dice over the whole batch (not per picture): rare classes are missing in most pictures."""

    def __init__(self, smooth=1e-5, skip_background=True):
        super().__init__()
        self.smooth, self.first = smooth, int(skip_background)

    def forward(self, probs, onehot):
        axes = (0, 2, 3)
        tp = (probs * onehot).sum(axes)
        size = probs.sum(axes) + onehot.sum(axes)
        tp, size = all_reduce(tp), all_reduce(size)
        dice = (2 * tp + self.smooth) / (size + self.smooth)
        return 1 - dice[self.first :].mean()


class Blobs(torch.utils.data.Dataset):
    def __init__(self, n, classes):
        g = torch.Generator().manual_seed(6)
        self.y = torch.zeros(n, 12, 12, dtype=torch.long)
        for k in range(n):
            for _ in range(3):
                cls = int(torch.multinomial(torch.tensor([0.0, 0.7, 0.25, 0.05]), 1, generator=g))
                r, c = torch.randint(0, 9, (2,), generator=g).tolist()
                self.y[k, r : r + 4, c : c + 3] = cls
        self.x = self.y.float()[:, None] / classes + 0.3 * torch.randn(n, 1, 12, 12, generator=g)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class SegTrainer:
    num_classes = 4
    initial_lr = 0.05
    batch_size = 12
    iterations = 8

    def __init__(self):
        dist.init_process_group("gloo")
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(100)
        net = nn.Sequential(
            nn.Conv2d(1, 12, 3, padding=1), nn.InstanceNorm2d(12, affine=True), nn.LeakyReLU(),
            nn.Conv2d(12, 12, 3, padding=1), nn.InstanceNorm2d(12, affine=True), nn.LeakyReLU(),
            nn.Conv2d(12, self.num_classes, 1),
        )
        self.network = DDP(net)
        self.optimizer = torch.optim.SGD(self.network.parameters(), self.initial_lr, momentum=0.99, nesterov=True)
        self.dice, self.ce = SoftDice(), nn.CrossEntropyLoss()
        self.data = Blobs(self.batch_size * self.iterations, self.num_classes)

    def batches(self):
        share = self.batch_size // self.world
        for it in range(self.iterations):
            first = it * self.batch_size + self.rank * share
            items = [self.data[i] for i in range(first, first + share)]
            yield torch.stack([a for a, _ in items]), torch.stack([b for _, b in items])

    def poly_lr(self, it):
        for group in self.optimizer.param_groups:
            group["lr"] = self.initial_lr * (1 - it / self.iterations) ** 0.9

    def run(self):
        for it, (x, y) in enumerate(self.batches()):
            self.poly_lr(it)
            logits = self.network(x)
            onehot = nn.functional.one_hot(y, self.num_classes).movedim(-1, 1)
            loss = self.dice(logits.softmax(1), onehot) + self.ce(logits, y)
            self.optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.network.parameters(), 12)
            self.optimizer.step()
            logged = loss.detach().clone()
            dist.all_reduce(logged)
            if self.rank == 0:
                print(f"iteration {it}: loss {logged.item() / self.world:.5f}")
        dist.destroy_process_group()


if __name__ == "__main__":
    SegTrainer().run()
