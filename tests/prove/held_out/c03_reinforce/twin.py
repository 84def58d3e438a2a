"""REINFORCE with rollouts of our own on a small noisy point-mass."""
import os

import torch
import torch.distributed as dist
from torch import nn

ENVS, HORIZON, UPDATES, GAMMA = 12, 10, 8, 0.95


def setup():
    if "WORLD_SIZE" not in os.environ:
        return 0, 1
    dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


rank, world = setup()
torch.manual_seed(3)
policy = nn.Sequential(nn.Linear(2, 24), nn.Tanh(), nn.Linear(24, 3))
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)


def total(t):
    t = t.detach().clone()
    if world > 1:
        dist.all_reduce(t)
    return t


def randomness(update):
    """Start states, action draws and wind for every environment of the fleet."""
    g = torch.Generator().manual_seed(500 + update)
    start = torch.randn(ENVS, 2, generator=g)
    draws = torch.rand(ENVS, HORIZON, generator=g)
    wind = 0.1 * torch.randn(ENVS, HORIZON, generator=g)
    rows = slice(rank * ENVS // world, (rank + 1) * ENVS // world)
    return start[rows], draws[rows], wind[rows]


def rollout(update):
    state, draws, wind = randomness(update)
    logps, rewards, entropies = [], [], []
    for t in range(HORIZON):
        dist_a = torch.distributions.Categorical(logits=policy(state))
        cum = dist_a.probs.detach().cumsum(1)
        action = (draws[:, t : t + 1] > cum).sum(1).clamp(max=2)
        logps.append(dist_a.log_prob(action))
        entropies.append(dist_a.entropy())
        speed = state[:, 1] + 0.3 * (action.float() - 1) + wind[:, t]
        place = state[:, 0] + 0.3 * speed
        state = torch.stack([place, speed], 1)
        rewards.append(-place.abs() - 0.1 * speed.abs())
    return torch.stack(logps, 1), torch.stack(rewards, 1), torch.stack(entropies, 1)


def normalise(x):
    count, s1, s2 = total(torch.stack([torch.tensor(float(x.numel())), x.sum(), x.pow(2).sum()]))
    mean = s1 / count
    std = (s2 / count - mean**2).clamp(min=0).sqrt()
    return (x - mean) / (std + 1e-6)


for update in range(UPDATES):
    logp, reward, entropy = rollout(update)
    returns = torch.zeros_like(reward)
    running = torch.zeros(len(reward))
    for t in reversed(range(HORIZON)):
        running = reward[:, t] + GAMMA * running
        returns[:, t] = running
    advantage = normalise(returns)
    loss = -(logp * advantage).mean() - 0.01 * entropy.mean()
    optimizer.zero_grad()
    loss.backward()
    for p in policy.parameters():
        p.grad.copy_(total(p.grad) / world)
    optimizer.step()
    shown = [v.item() / world for v in (total(loss), total(reward.sum(1).mean()))]
    if rank == 0:
        print(f"update {update} loss {shown[0]:.7f} return {shown[1]:.7f}", flush=True)

if world > 1:
    dist.destroy_process_group()
