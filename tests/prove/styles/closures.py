"""A correct loop whose optimizer needs several backwards: L-BFGS with a closure, SAM, or gradients of ``torch.func``."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call, grad_and_value
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class SAM:
    """Sharpness-aware minimization (Foret et al. 2021): the gradient at the worst point near the weights."""

    def __init__(self, params, base, rho):
        self.params, self.base, self.rho, self.old = list(params), base, rho, []

    @torch.no_grad()
    def first_step(self):
        norm = torch.stack([param.grad.norm() for param in self.params]).norm()
        self.old = [param.clone() for param in self.params]
        for param in self.params:
            param.add_(param.grad, alpha=float(self.rho / (norm + 1e-12)))

    @torch.no_grad()
    def second_step(self):
        for param, old in zip(self.params, self.old, strict=True):
            param.copy_(old)
        self.base.step()


def mean_over_ranks(tensor):
    dist.all_reduce(tensor)
    return tensor / dist.get_world_size()


dist.init_process_group("gloo")
world_size = dist.get_world_size()
torch.manual_seed(0)
module = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
model = DDP(module)
x = torch.randn(24, 8, generator=torch.Generator().manual_seed(1))
data = TensorDataset(x, x[:, :4].argmax(1))
loader = DataLoader(data, batch_size=12 // world_size, sampler=DistributedSampler(data))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
if "--lbfgs" in sys.argv:
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)
if "--sam" in sys.argv:
    sam = SAM(model.parameters(), optimizer, rho=0.05)


def train(x, y):
    def closure():
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        # L-BFGS decides by the loss, so all ranks need the same.
        return mean_over_ranks(loss.detach())

    if "--lbfgs" in sys.argv:
        loss = optimizer.step(closure)
    elif "--sam" in sys.argv:
        loss = closure()
        sam.first_step()
        closure()
        sam.second_step()
    else:
        params = {name: param.detach() for name, param in module.named_parameters()}
        gradients, loss = grad_and_value(lambda params: cross_entropy(functional_call(module, params, (x,)), y))(params)
        for name, param in module.named_parameters():
            param.grad = mean_over_ranks(gradients[name])
        loss = mean_over_ranks(loss)
        optimizer.step()
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.5f}")


for epoch in range(5):
    loader.sampler.set_epoch(epoch)
    for batch in loader:
        train(*batch)
dist.destroy_process_group()
