"""REINFORCE with 24 parallel toy environments, split over the ranks."""
import torch
from torch import nn
import torch.distributed as dist


class Track:
    """Keep a point near the origin: state (position, speed), actions push left / none / right."""

    def __init__(self, pos, vel):
        self.s = torch.stack([pos, vel], 1)

    def step(self, a):
        pos, vel = self.s[:, 0], self.s[:, 1]
        vel = 0.95 * vel + 0.15 * (a.to(vel.dtype) - 1.0)
        pos = pos + 0.3 * vel
        self.s = torch.stack([pos, vel], 1)
        return -(pos ** 2) - 0.1 * vel ** 2


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 24), nn.Tanh(), nn.Linear(24, 3))

    def forward(self, s):
        return torch.log_softmax(self.net(s), -1)


class Trainer:
    n_envs, horizon, gamma = 24, 10, 0.97

    def __init__(self, seed=3):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(seed)
        self.policy = Policy()
        self.opt = torch.optim.Adam(self.policy.parameters(), lr=1e-2)
        self.rng = torch.Generator().manual_seed(seed + 1)
        n = self.n_envs // self.world
        self.mine = slice(self.rank * n, (self.rank + 1) * n)

    def draw(self, *shape):
        return torch.rand(self.n_envs, *shape, generator=self.rng)[self.mine]

    def rollout(self):
        start = self.draw(2) * 4 - 2
        env = Track(start[:, 0], start[:, 1] * 0.25)
        logps, rewards = [], []
        for _ in range(self.horizon):
            lp = self.policy(env.s)
            u = self.draw(1)
            a = (lp.detach().exp().cumsum(-1) < u).sum(-1).clamp(max=2)
            logps.append(lp.gather(1, a[:, None])[:, 0])
            rewards.append(env.step(a))
        ret, out = torch.zeros_like(rewards[0]), []
        for rew in reversed(rewards):
            ret = rew + self.gamma * ret
            out.append(ret)
        return torch.stack(logps), torch.stack(out[::-1])

    def normalize(self, ret):
        m = torch.stack([ret.mean(), (ret ** 2).mean()])
        dist.all_reduce(m)
        mean, sq = m / self.world
        return (ret - mean) / ((sq - mean ** 2).sqrt() + 1e-6)

    def update(self, it):
        logp, ret = self.rollout()
        loss = -(logp * self.normalize(ret)).mean()
        self.opt.zero_grad()
        loss.backward()
        for p in self.policy.parameters():
            dist.all_reduce(p.grad)
            p.grad /= self.world
        self.opt.step()
        info = torch.stack([loss.detach(), ret[0].mean()])
        dist.all_reduce(info)
        info /= self.world
        if self.rank == 0:
            print(f"update {it}: loss {info[0].item():.6f} return {info[1].item():.5f}", flush=True)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    trainer = Trainer()
    for it in range(7):
        trainer.update(it)
    dist.destroy_process_group()
