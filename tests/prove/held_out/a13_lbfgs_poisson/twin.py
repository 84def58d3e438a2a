"""Poisson regression with L-BFGS and backtracking; rows are split over the ranks."""
import torch
import torch.distributed as dist
from torch.nn.utils import parameters_to_vector, vector_to_parameters


class BacktrackingLBFGS(torch.optim.Optimizer):
    def __init__(self, params, memory=5, trials=6, c1=0.1):
        super().__init__(params, dict(memory=memory, trials=trials, c1=c1))
        self.pairs = []
        self.prev = None

    def direction(self, g):
        q, stack = g.clone(), []
        for s, y, rho in reversed(self.pairs):
            a = rho * s.dot(q)
            q -= a * y
            stack.append((a, s, y, rho))
        if self.pairs:
            s, y, _ = self.pairs[-1]
            q *= s.dot(y) / y.dot(y)
        for a, s, y, rho in reversed(stack):
            q += (a - rho * y.dot(q)) * s
        return -q

    @torch.no_grad()
    def step(self, value_and_grad, value):
        opts = self.param_groups[0]
        params = opts["params"]
        x = parameters_to_vector(params)
        f, g = value_and_grad()
        if self.prev is not None:
            s, y = x - self.prev[0], g - self.prev[1]
            if s.dot(y) > 1e-10:
                self.pairs = (self.pairs + [(s, y, 1 / s.dot(y))])[-opts["memory"]:]
        self.prev = (x, g)
        d = self.direction(g)
        slope = g.dot(d)
        t = 1.0
        for _ in range(opts["trials"]):
            vector_to_parameters(x + t * d, params)
            if value() <= f + opts["c1"] * t * slope:
                break
            t *= 0.5
        return f, t


class Problem:
    def __init__(self, rank, world, n=180, dim=6):
        g = torch.Generator().manual_seed(13)
        x = torch.randn(n, dim, generator=g)
        rate = torch.exp(x @ torch.linspace(-1.2, 1.2, dim) + 0.5)
        y = torch.poisson(rate, generator=g)
        self.x, self.y = x[rank::world], y[rank::world]
        self.world = world
        torch.manual_seed(1)
        self.model = torch.nn.Linear(dim, 1)

    def local(self):
        eta = self.model(self.x)[:, 0]
        return (torch.exp(eta) - self.y * eta).mean()

    @torch.no_grad()
    def value(self):
        loss = self.local()
        dist.all_reduce(loss)
        return loss / self.world

    def value_and_grad(self):
        self.model.zero_grad()
        with torch.enable_grad():
            loss = self.local()
            loss.backward()
        out = torch.cat([loss.detach()[None], *[p.grad.flatten() for p in self.model.parameters()]])
        dist.all_reduce(out)
        out /= self.world
        return out[0], out[1:]


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    prob = Problem(rank, dist.get_world_size())
    opt = BacktrackingLBFGS(prob.model.parameters())
    for it in range(8):
        f, t = opt.step(prob.value_and_grad, prob.value)
        if rank == 0:
            print(f"iter {it} nll {f.item():.6f} step {t}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
