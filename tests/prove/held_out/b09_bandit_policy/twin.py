# contextual bandit, REINFORCE with normalised advantages
import torch
from torch import nn
from torch.distributions import Categorical

import dtrain as dt


class Policy(nn.Module):
    def __init__(self, obs, arms):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(obs, 24), nn.ELU())
        self.arms = nn.Linear(24, arms)

    def forward(self, x):
        return self.arms(self.body(x))


class Env:
    def __init__(self, obs=6, arms=4):
        g = torch.Generator().manual_seed(77)
        self.payoff = torch.randn(obs, arms, generator=g)
        self.contexts = torch.randn(288, obs, generator=g)

    def reward(self, x, a):
        return (x @ self.payoff).gather(1, a[:, None])[:, 0]


def with_draw(x, generator):
    return {"x": x, "u": torch.rand((), generator=generator)}


@torch.no_grad()
def rollout(policy, env, batch):
    probs = policy(batch["x"]).softmax(-1)
    a = (probs.cumsum(-1) < batch["u"][:, None]).sum(-1).clamp(max=probs.shape[1] - 1)
    r = env.reward(batch["x"], a)
    everyone = dt.dist.all_gather_ragged(r)
    adv = (r - everyone.mean()) / (everyone.std() + 1e-8)
    return {"x": batch["x"], "a": a, "adv": adv, "r": r}


def pg_loss(policy, batch):
    d = Categorical(logits=policy(batch["x"]))
    pg = -(d.log_prob(batch["a"]) * batch["adv"]) - 0.01 * d.entropy()
    n = len(pg)
    return dt.LossSum(total=pg.sum(), weight=n, aux={"reward": (batch["r"].sum(), n)})


def main():
    with dt.init_dist() as dist:
        torch.manual_seed(0)
        env = Env()
        mesh = dt.build_mesh()
        policy = dt.shard_model(Policy(6, 4), mesh, strategy="replicate")
        opt = torch.optim.RMSprop(policy.parameters(), lr=3e-3)
        loader = dt.build_loader(env.contexts, mesh=mesh, global_batch_size=36, seed=2, transform=with_draw)
        step = dt.compose_step(pg_loss, [dt.transforms.clip_by_norm(0.5)])
        state = step.init(policy, opt, loader=loader)
        for contexts in loader.until("8ba"):
            played = rollout(state.model, env, contexts)
            state, metrics = step(state, played)
            m = dt.reduce_metrics(metrics)
            dist.print(f"update {state.step}: loss={m['loss']:.5f} reward={m['reward']:.5f}")


if __name__ == "__main__":
    main()
