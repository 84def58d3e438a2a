# Small CNN on synthetic shapes, plain DDP
import argparse
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Shapes(Dataset):
    """10x10 pictures: a horizontal bar, a vertical bar, or a cross"""
    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, idx):
        g = torch.Generator().manual_seed(idx)
        img = 0.4 * torch.randn(1, 10, 10, generator=g)
        cls = idx % 3
        r, c = torch.randint(1, 9, (2,), generator=g).tolist()
        if cls != 1:
            img[0, r, 1:-1] += 1
        if cls != 0:
            img[0, 1:-1, c] += 1
        return img, cls


class Net(nn.Module):
    def __init__(self):
        super(Net, self).__init__()
        self.conv1 = nn.Conv2d(1, 8, 3)
        self.conv2 = nn.Conv2d(8, 8, 3)
        self.gn = nn.GroupNorm(2, 8)
        self.fc = nn.Linear(8 * 9, 3)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.gn(self.conv2(x))), 2)
        return self.fc(torch.flatten(x, 1))


def train(args, model, loader, sampler, optimizer, scheduler, rank, world):
    for epoch in range(1, args.epochs + 1):
        sampler.set_epoch(epoch)
        model.train()
        for batch_idx, (data, target) in enumerate(loader):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(data), target)
            loss.backward()
            optimizer.step()
            shown = loss.detach() / world
            dist.all_reduce(shown)
            if rank == 0:
                print("Train Epoch: {} [{}/{}]\tLoss: {:.6f}".format(epoch, batch_idx + 1, len(loader), shown.item()))
        scheduler.step()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=12, help="over all processes")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--gamma", type=float, default=0.7)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    dataset = Shapes(48)
    sampler = DistributedSampler(dataset, num_replicas=world, rank=rank, shuffle=True, seed=args.seed)
    loader = DataLoader(dataset, batch_size=args.batch_size // world, sampler=sampler)
    model = DDP(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=args.gamma)
    train(args, model, loader, sampler, optimizer, scheduler, rank, world)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
