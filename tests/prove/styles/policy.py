"""Correct reinforcement learning: PPO over environments by rank, ``--dqn`` with replay, ``--grpo`` over a language model."""

import copy
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

ENVIRONMENTS, LENGTH = 12, 4


class Environment:
    """A point that moves left or right on a line, with a generator of its own."""

    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed)
        self.position = torch.randn(2, generator=self.generator)

    def step(self, action):
        self.position = self.position + (0.5 if action else -0.5) * torch.tensor([1.0, 0.3])
        return -self.position.abs().sum()


def mean_over_ranks(tensor):
    dist.all_reduce(tensor)
    return tensor / world_size


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))
        self.critic = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, states):
        return self.actor(states).log_softmax(-1), self.critic(states)[..., 0]


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.rnn, self.head = nn.Embedding(8, 16), nn.GRU(16, 16, batch_first=True), nn.Linear(16, 8)

    def forward(self, tokens):
        return self.head(self.rnn(self.embed(tokens))[0]).log_softmax(-1)


@torch.no_grad()
def rollout():
    states, actions, logps, rewards, values = [], [], [], [], []
    for _ in range(LENGTH):
        state = torch.stack([environment.position for environment in environments])
        logp, value = module(state)
        action = torch.cat(
            [torch.multinomial(row.exp(), 1, generator=env.generator) for row, env in zip(logp, environments, strict=True)]
        )
        states.append(state)
        actions.append(action)
        logps.append(logp.gather(1, action[:, None])[:, 0])
        values.append(value)
        rewards.append(torch.stack([env.step(int(a)) for env, a in zip(environments, action, strict=True)]))
    returns, total = [], torch.zeros(len(environments))
    for reward in reversed(rewards):
        total = reward + 0.9 * total
        returns.insert(0, total)
    return [torch.cat(part) for part in (states, actions, logps, returns, values)]


def train_ppo():
    states, actions, old, returns, values = rollout()
    advantages = returns - values
    mean = mean_over_ranks(advantages.mean())
    advantages = (advantages - mean) / mean_over_ranks((advantages - mean).square().mean()).sqrt()
    for _ in range(2):
        for part in torch.arange(len(states)).view(LENGTH, -1).chunk(2):
            rows = part.flatten()
            logps, value = model(states[rows])
            ratio = (logps.gather(1, actions[rows, None])[:, 0] - old[rows]).exp()
            surrogate = torch.min(ratio * advantages[rows], ratio.clamp(0.8, 1.2) * advantages[rows])
            entropy = -(logps.exp() * logps).sum(1).mean()
            update(-surrogate.mean() + 0.5 * (value - returns[rows]).square().mean() - 0.01 * entropy)
    if rank == 0:
        print(f"mean advantage {mean:.4f}")


def train_dqn(number):
    with torch.no_grad():
        states, actions, _, returns, _ = rollout()
    replay.append((states, actions, returns))
    del replay[:-5]
    # All ranks choose the same rows of their own environments.
    chosen = torch.randint(len(replay), (3,), generator=torch.Generator().manual_seed(number)).tolist()
    states, actions, returns = (torch.cat(part) for part in zip(*(replay[index] for index in chosen), strict=True))
    with torch.no_grad():
        target = returns + 0.9 * reference(states)[0].max(1).values
    update(nn.functional.smooth_l1_loss(model(states)[0].gather(1, actions[:, None])[:, 0], target))
    if number % 2 == 1:
        reference.load_state_dict(module.state_dict())


def train_grpo(number):
    prompts = [prompt for prompt in range(number * 6, number * 6 + 6) if prompt % world_size == rank]
    group, completions = 4, []
    for prompt in prompts:
        generator = torch.Generator().manual_seed(prompt)
        tokens = torch.randint(8, (1, 3), generator=generator).repeat(group, 1)
        with torch.no_grad():
            for _ in range(4):
                following = torch.multinomial(module(tokens)[:, -1].exp(), 1, generator=generator)
                tokens = torch.cat([tokens, following], 1)
        completions.append(tokens)
    tokens = torch.cat(completions)
    rewards = (tokens[:, 3:] > 4).sum(1).to(module.head.weight.dtype).view(-1, group)
    advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).flatten()
    logps = model(tokens[:, :-1]).gather(2, tokens[:, 1:, None])[..., 0][:, 2:]
    with torch.no_grad():
        reference_logps = reference(tokens[:, :-1]).gather(2, tokens[:, 1:, None])[..., 0][:, 2:]
    difference = reference_logps - logps
    kl = difference.exp() - difference - 1
    update(-((logps - logps.detach()).exp() * advantages[:, None] - 0.1 * kl).mean())
    reward = mean_over_ranks(rewards.mean())
    if rank == 0:
        print(f"reward {reward:.4f}")


def update(loss):
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()


dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
module, start, replay = Language() if "--grpo" in sys.argv else ActorCritic(), 0, []
model, reference = DDP(module, find_unused_parameters="--dqn" in sys.argv), copy.deepcopy(module).requires_grad_(False)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
environments = [Environment(number) for number in range(rank, ENVIRONMENTS, world_size)]
if "--grpo" in sys.argv and os.path.exists("grpo.pt"):
    saved = torch.load("grpo.pt")
    module.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    start = saved["number"]
for number in range(start, 6):
    if "--grpo" in sys.argv:
        train_grpo(number)
        if rank == 0:
            torch.save({"model": module.state_dict(), "optimizer": optimizer.state_dict(), "number": number + 1}, "grpo.pt")
    elif "--dqn" in sys.argv:
        train_dqn(number)
    else:
        train_ppo()
dist.destroy_process_group()
