import argparse
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.distributed as dist
from torch.utils.data import Dataset, DataLoader
from torch.utils.data.distributed import DistributedSampler


class Bars(Dataset):
    """8x8 images with a horizontal and a vertical bar."""

    def __init__(self, n=288):
        g = torch.Generator().manual_seed(3)
        self.rows = torch.randint(0, 8, (n,), generator=g)
        self.cols = torch.randint(0, 8, (n,), generator=g)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        img = torch.zeros(8, 8)
        img[self.rows[i]] = 1
        img[:, self.cols[i]] = 1
        return img.flatten()


class VAE(nn.Module):
    def __init__(self, zdim=5, hid=48):
        super().__init__()
        self.zdim = zdim
        self.enc = nn.Sequential(nn.Linear(64, hid), nn.Tanh())
        self.mu = nn.Linear(hid, zdim)
        self.logvar = nn.Linear(hid, zdim)
        self.dec = nn.Sequential(nn.Linear(zdim, hid), nn.Tanh(), nn.Linear(hid, 64))

    def reparametrize(self, mu, logvar, eps):
        std = torch.exp(0.5 * logvar)
        return mu + std * eps

    def forward(self, x, eps):
        h = self.enc(x)
        mu, logvar = self.mu(h), self.logvar(h)
        return self.dec(self.reparametrize(mu, logvar, eps)), mu, logvar


def elbo_terms(logits, x, mu, logvar):
    rec = F.binary_cross_entropy_with_logits(logits, x, reduction="none").sum(1).mean()
    kl = -0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).sum(1).mean()
    return rec, kl


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--batch-size", type=int, default=36, help="global")
    ap.add_argument("--steps", type=int, default=8)
    ap.add_argument("--beta", type=float, default=1.0)
    args = ap.parse_args()

    dist.init_process_group("gloo")
    r, w = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = nn.parallel.DistributedDataParallel(VAE())
    opt = torch.optim.RMSprop(net.parameters(), lr=2e-3)

    ds = Bars()
    sampler = DistributedSampler(ds, shuffle=True, seed=11)
    loader = DataLoader(ds, batch_size=args.batch_size // w, sampler=sampler, drop_last=True)
    eps_gen = torch.Generator().manual_seed(99)

    it = 0
    epoch = 0
    while it < args.steps:
        sampler.set_epoch(epoch)
        for x in loader:
            # same noise for a sample wherever it lands
            eps = torch.randn(args.batch_size, 5, generator=eps_gen)[r::w]
            logits, mu, logvar = net(x, eps)
            rec, kl = elbo_terms(logits, x, mu, logvar)
            loss = rec + args.beta * kl
            opt.zero_grad()
            loss.backward()
            opt.step()
            log = torch.tensor([loss.item(), rec.item(), kl.item()])
            dist.all_reduce(log)
            log = (log / w).tolist()
            if r == 0:
                print("it=%d loss=%.5f rec=%.5f kl=%.5f" % (it, *log))
            it += 1
            if it == args.steps:
                break
        epoch += 1
    dist.destroy_process_group()
