"""Curves of methods: one number of a small run, or of one call, with the method and without.

Each curve is computed by the function that the card describes; replicas, which need several ranks, are followed in one process.
``python tests/written.py`` writes the files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import dtrain as dt
from battery.plot import Plot

Points = list[tuple[float, float]]


def numbered(values: Sequence[float]) -> Points:
    """Return points over 0, 1, 2, ..."""
    return list(enumerate(values))


def held(values: Sequence[float]) -> Points:
    """Return points over 0, 1, 2, ..., each of which lasts to the next point, as a line of steps."""
    return [(k + end, value) for k, value in enumerate(values) for end in (0, 1)]


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def one_weight(value: float) -> nn.Linear:
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, value)
    return model


def trained(
    transforms: Sequence[dt.Transform], batches: Sequence[Tensor], seen: Callable[[Any, Any], float], *, lr: float = 0.1,
) -> list[float]:  # fmt: skip
    """Train one weight on the mean of its outputs; return ``seen(state, metrics)`` of each step."""
    model = one_weight(1.0)
    loss_fn = dt.mean_loss(lambda model, x: model(x).mean(), weight=len)
    step = dt.compose_step(loss_fn, transforms)
    state = step.init(model, torch.optim.SGD(model.parameters(), lr=lr, momentum=0.0))
    results = []
    for batch in batches:
        state, metrics = step(state, batch)
        results.append(seen(state, metrics))
    return results


def weight(state: Any, metrics: Any) -> float:
    return float(next(iter(state.params.values())).detach())


# Gradients.


def adaptive_clip() -> Plot:
    def after(norm: float) -> float:
        w = torch.tensor([[3.0, 4.0]], requires_grad=True)
        w.grad = torch.tensor([[0.6, 0.8]]) * norm
        dt.transforms.clip_grad_adaptive_({"w": w}, 0.1)
        return float(w.grad.norm())

    points = [(k / 40, after(k / 40)) for k in range(81)]
    about = "The weights of the unit have norm 5, so `adaptive_clip(0.1)` clips its gradient at 0.5."
    return Plot(x="norm of a unit's gradient before", y="norm after", lines={"": points}, about=about)


def centralized() -> Plot:
    w = torch.zeros(1, 12, requires_grad=True)
    w.grad = noise(1, 12) + 1.5
    before = w.grad[0].tolist()
    dt.transforms.centralize_gradients_({"w": w})
    lines = {"before": numbered(before), "after": numbered(w.grad[0].tolist())}
    return Plot(
        x="input of a unit", y="gradient", lines=lines, about="The gradient of one row of a weight: its mean becomes 0."
    )


def nonfinite() -> Plot:
    batches = [torch.full((1, 1), float("inf") if k == 5 else 0.1) for k in range(12)]
    line = held(trained([dt.transforms.nonfinite("skip")], batches, weight, lr=1.0))
    about = "The gradient of step 5 is infinite: `nonfinite` skips this update, and training goes on."
    return Plot(x="step", y="weight", lines={"": line}, about=about)


def noise_scale() -> Plot:
    batches = [1.0 + 2.0 * noise(400, 32, 1)[k] for k in range(400)]
    seen = trained(
        [dt.transforms.noise_scale(0.98, every=1)], batches, lambda _, metrics: float(metrics["noise_scale"].total), lr=0.0
    )
    lines = {
        "noise_scale(0.98, every=1)": numbered(seen)[20:],
        "variance over squared mean of the gradients": [(20, 4.0), (399, 4.0)],
    }
    return Plot(x="step", y="samples", lines=lines, about="Gradients with mean 1 and variance 4, batches of 32 samples.")


def sam() -> Plot:
    lines: dict[str, Points] = {"plain": [], "sam(0.5)": []}
    for k in range(-40, 41):
        for line, rho in zip(lines.values(), (0.0, 0.5), strict=True):
            w = torch.tensor([k / 20], requires_grad=True)
            w.grad = 2 * w.detach()
            if rho:
                dt.transforms.perturb_params_({"w": w}, rho)
            line.append((k / 20, 2 * float(w.detach())))
    about = "The gradient of a step for the loss `w**2`: SAM takes it at the point that is 0.5 further up."
    return Plot(x="weight", y="gradient", lines=lines, about=about)


# Weights.


def frozen_at() -> Plot:
    model = nn.Linear(1, 1)
    for param in model.parameters():
        nn.init.constant_(param, 1.0)
    step = dt.compose_step(
        dt.mean_loss(lambda model, x: model(x).mean(), weight=len), [dt.transforms.freeze("weight", start=6)]
    )
    state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1))
    lines: dict[str, list[float]] = {"weight": [], "bias": []}
    for _ in range(12):
        for name, values in lines.items():
            values.append(float(state.params[name].detach()))
        state, _ = step(state, torch.full((1, 1), 0.5))
    about = '`freeze("weight", start=6)`: the weight stays from step 6 on, and the bias goes on.'
    return Plot(x="step", y="value", lines={name: held(values) for name, values in lines.items()}, about=about)


def replicas(outer: Callable[[Tensor, list[Tensor]], Tensor]) -> list[Points]:
    """Two weights that follow noisy gradients towards 0; after every 20 steps both take the value of ``outer``."""
    start, drift = torch.tensor([1.0]), noise(100, 2)
    copies = [start.clone(), start.clone()]
    lines: list[Points] = [[(0, 1.0)], [(0, 1.0)]]
    for step in range(1, 101):
        for copy, line, push in zip(copies, lines, drift[step - 1], strict=True):
            copy -= 0.02 * copy + 0.03 * push
            line.append((step, float(copy)))
        if step % 20 == 0:
            start = outer(start, copies)
            copies = [start.clone(), start.clone()]
            for line in lines:
                line.append((step, float(start)))
    return lines


def averaged() -> Plot:
    def mean(start: Tensor, copies: list[Tensor]) -> Tensor:
        return torch.stack(copies).mean(0)

    lines = dict(zip(("replica 1", "replica 2"), replicas(mean), strict=True))
    about = (
        "One weight of two replicas, drawn in one process: each follows its own samples, and every 20 steps both take the mean."
    )
    return Plot(x="step", y="weight", lines=lines, about=about)


def outer_steps() -> Plot:
    momentum = torch.zeros(1)

    def outer(start: Tensor, copies: list[Tensor]) -> Tensor:
        delta = start - torch.stack(copies).mean(0)
        dt.transforms.outer_step_([start], [momentum], [delta], lr=0.7, momentum=0.9)
        return start

    lines = dict(zip(("replica 1", "replica 2"), replicas(outer), strict=True))
    about = (
        "One weight of two replicas, drawn in one process: every 20 steps `outer_step_` moves both by the mean of their deltas."
    )
    return Plot(x="step", y="weight", lines=lines, about=about)


# Low precision.


def rounded() -> Plot:
    def out(x: float, transforms: Sequence[dt.Transform]) -> float:
        values: list[float] = []

        def loss_fn(model: nn.Module, batch: Tensor) -> dt.LossSum:
            out = model(batch)
            values.append(float(out.detach()))
            return dt.LossSum(total=out.float().sum(), weight=1)

        model = one_weight(1.0)
        step = dt.compose_step(loss_fn, transforms)
        step(step.init(model, torch.optim.SGD(model.parameters(), lr=0.0)), torch.full((1, 1), x))
        return values[0]

    grid = [1 + k / 1600 for k in range(81)]
    lines = {
        "float32": [(x, out(x, [])) for x in grid],
        'autocast("bf16")': [(x, out(x, [dt.transforms.autocast("bf16")])) for x in grid],
    }
    about = "The output of a linear layer with weight 1: bf16 keeps 8 bits, so near 1 the outputs are 1/128 apart."
    return Plot(x="input", y="output", lines={name: [(x, y - 1) for x, y in line] for name, line in lines.items()}, about=about)


def scaled_loss() -> Plot:
    batches = [torch.full((1, 1), float("inf") if k == 25 else 0.1) for k in range(40)]
    transform = dt.transforms.loss_scale(1024.0, grow_every=10)
    seen = trained([transform], batches, lambda _, metrics: float(metrics["loss_scale"].total))
    about = (
        "`loss_scale(1024, grow_every=10)`: the scale doubles after 10 finite updates; step 25 overflows and halves the scale."
    )
    return Plot(x="step", y="scale", lines={"": held(seen)}, about=about)


# Options of the optimizer.


def option(transform: dt.Transform, name: str, **options: float) -> list[float]:
    model = one_weight(1.0)
    step = dt.compose_step(dt.mean_loss(lambda model, x: model(x).mean(), weight=len), [transform])
    optimizer = torch.optim.SGD(model.parameters(), **options)
    values: list[float] = []
    optimizer.register_step_pre_hook(lambda *_: values.append(float(optimizer.param_groups[0][name])))
    state = step.init(model, optimizer)
    for _ in range(100):
        state, _ = step(state, torch.ones(1, 1))
    return values


def scaled_rate() -> Plot:
    lr = dt.schedules.warmup(dt.schedules.cosine(1.0, 0.1, 100), 10)
    line = numbered(option(dt.transforms.scale_lr(lr), "lr", lr=0.3))
    about = "An optimizer with `lr=0.3` and `scale_lr(warmup(cosine(1.0, 0.1, 100), 10))`."
    return Plot(x="step", y="lr of the optimizer", lines={"": line}, about=about)


def scaled_option() -> Plot:
    decay = dt.schedules.linear(1.0, 0.0, 100)
    line = numbered(option(dt.transforms.scale_option("weight_decay", decay), "weight_decay", lr=0.1, weight_decay=0.05))
    about = 'An optimizer with `weight_decay=0.05` and `scale_option("weight_decay", linear(1.0, 0.0, 100))`.'
    return Plot(x="step", y="weight_decay", lines={"": line}, about=about)


def replaced_option() -> Plot:
    momentum = dt.schedules.one_cycle(0.95, 0.85, 0.95, 100)
    line = numbered(option(dt.transforms.set_option("momentum", momentum), "momentum", lr=0.1, momentum=0.9))
    about = '`set_option("momentum", one_cycle(0.95, 0.85, 0.95, 100))`: the value `momentum=0.9` of the optimizer is replaced.'
    return Plot(x="step", y="momentum", lines={"": line}, about=about)


# Optimizers.


def decayed(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> Points:
    """A weight without a gradient, with a rate that falls in a line over 300 steps."""
    p = nn.Parameter(torch.ones(1, dtype=torch.float64))
    optimizer = make([p])
    peak = optimizer.param_groups[0]["lr"]
    points = [(0.0, 1.0)]
    for step in range(300):
        optimizer.param_groups[0]["lr"] = peak * (1 - step / 300)
        p.grad = torch.zeros_like(p)
        optimizer.step()
        points.append((step + 1, float(p.detach())))
    return points


def decoupled(ours: Callable[..., Any], theirs: Callable[..., Any], name: str) -> Plot:
    lines = {
        f"{name}(lr={lr}, weight_decay=0.01)": decayed(lambda p, lr=lr: ours(p, lr=lr, weight_decay=0.01)) for lr in (0.1, 0.01)
    }
    lines[f"torch.optim.{theirs.__name__}(lr=0.1, weight_decay=0.01)"] = decayed(lambda p: theirs(p, lr=0.1, weight_decay=0.01))
    about = "A weight with gradient 0 and a rate that falls to 0: both rates decay it alike, so their lines coincide."
    return Plot(x="step", y="weight", lines=lines, about=about)


# Model surgery.


def factorized() -> Plot:
    def count(module: nn.Module) -> float:
        return sum(p.numel() for p in module.parameters()) / 1000

    dense = nn.Linear(256, 256)
    lines = {"factorized": [(rank, count(dt.surgery.FactorizedLinear(dense, rank))) for rank in range(8, 129, 8)],
             "nn.Linear(256, 256)": [(8, count(dense)), (128, count(dense))]}  # fmt: skip
    return Plot(
        x="rank", y="thousand parameters", lines=lines, about="The parameters of a linear layer by the rank of its two factors."
    )


def gated() -> Plot:
    unit = dt.surgery.GatedLinearUnit(1, 1, activation=nn.functional.gelu, bias=False, linear_bias=False).requires_grad_(False)
    unit.weight.fill_(1.0), unit.linear.weight.fill_(1.0)
    x = torch.linspace(-2, 2, 81)
    lines = {
        "gelu(x)": list(zip(x.tolist(), nn.functional.gelu(x).tolist(), strict=True)),
        "gated: gelu(x) * x": list(zip(x.tolist(), unit(x[:, None])[:, 0].tolist(), strict=True)),
    }
    return Plot(x="x", y="output", lines=lines, about="A unit of one input whose two weights are 1.")


def ghosts() -> Plot:
    x = torch.cat([noise(16), 4 + noise(16)])[:, None]
    norm = nn.BatchNorm1d(1)
    whole = norm(x)[:, 0].tolist()
    ghost = dt.surgery.ghost_batch_norm(norm, ghost_batch_size=16)(x)[:, 0].tolist()
    about = "A batch of 32 samples, of which the last 16 are larger by 4: each group of 16 is normalized by itself."
    lines = {"one batch of 32": numbered(whole), "ghost_batch_size=16": numbered(ghost)}
    return Plot(x="sample", y="output of the norm", lines=lines, about=about)


def subnetworks() -> Plot:
    torch.manual_seed(0)
    gyro = dt.surgery.GyroDropout(0.5, sigma=4, tau=2)
    ones = torch.ones(1, 6)

    def different(layer: nn.Module) -> Points:
        masks: set[tuple[float, ...]] = set()
        points = [(0.0, 0.0)]
        for forward in range(1, 61):
            masks.add(tuple(layer(ones)[0].tolist()))
            points.append((forward, len(masks)))
        return points

    with torch.random.fork_rng():
        torch.manual_seed(0)
        lines = {"nn.Dropout(0.5)": different(nn.Dropout(0.5)), "GyroDropout(0.5, sigma=4, tau=2)": different(gyro)}
    about = "Six units, one sample in each forward: plain dropout draws new masks, and `gyro_dropout` has `sigma` masks."
    return Plot(x="forward", y="different masks so far", lines=lines, about=about)


def excited() -> Plot:
    gate = dt.surgery.SqueezeExcite2d(8, latent_channels=2).requires_grad_(False)
    gate.reduce.weight.copy_(noise(2, 8)), gate.expand.weight.copy_(2 * noise(8, 2))
    x = torch.linspace(0.5, 1.5, 8)
    lines = {"before": numbered(x.tolist()), "after": numbered(gate(x[:, None, None])[:, 0, 0].tolist())}
    return Plot(
        x="channel", y="value", lines=lines, about="Each channel times a gate between 0 and 1, computed from all channels."
    )


def standardized() -> Plot:
    before = (0.4 + 0.2 * noise(1, 12))[:, :, None, None]
    after = dt.surgery.standardize_weight(before)
    lines = {name: numbered(w.flatten().tolist()) for name, w in (("before", before), ("after", after))}
    return Plot(
        x="element of a filter", y="weight", lines=lines, about="The weights of one filter: afterwards mean 0 and variance 1."
    )


def places_in_memory() -> Plot:
    def places(x: Tensor) -> Points:
        _, c, h, w = x.stride()
        return numbered([channel * c + row * h + column * w for channel in range(3) for row in range(4) for column in range(4)])

    x = torch.zeros(1, 3, 4, 4)
    lines = {"contiguous": places(x), "channels last": places(x.to(memory_format=torch.channels_last))}
    about = (
        "Three channels of 4 x 4 pixels: the place of each element. With channels last, the channels of a pixel are neighbours."
    )
    return Plot(x="element, channel by channel", y="place in memory", lines=lines, about=about)


class WrittenOut(nn.Module):
    """A layer norm of single operations, as old models have it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size)), 1e-5

    def forward(self, x: Tensor) -> Tensor:
        centered = x - x.mean(-1, keepdim=True)
        return centered / (centered.square().mean(-1, keepdim=True) + self.eps).sqrt() * self.weight + self.bias


def kept_bytes(module: nn.Module, x: Tensor) -> int:
    """Return the bytes that a forward keeps for its backward, parameters left out, and those of its output."""
    own = {p.data_ptr() for p in module.parameters()}
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in own:
            sizes[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = module(x)
    sizes[out.data_ptr()] = out.untyped_storage().nbytes()
    return sum(sizes.values())


SIZES = range(64, 513, 64)


def fused() -> Plot:
    def kept(module: nn.Module, size: int) -> tuple[float, float]:
        return size, kept_bytes(module, torch.ones(1, size, requires_grad=True)) / 1024

    lines = {
        "written out": [kept(WrittenOut(size), size) for size in SIZES],
        "nn.LayerNorm": [kept(nn.LayerNorm(size), size) for size in SIZES],
    }
    about = "Memory that one row of a float32 norm keeps for its backward, with its output."
    return Plot(x="size of the norm", y="KiB", lines=lines, about=about)


def decay_of_groups() -> Plot:
    model = nn.Sequential(nn.Embedding(5, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 5))
    groups = dt.optim.param_groups(model, weight_decay=0.1)
    decay = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    line = held([decay[id(p)] for p in model.parameters()])
    about = "`param_groups(model, weight_decay=0.1)`: the parameters of an embedding, a norm and two linear layers."
    return Plot(x="parameter", y="weight_decay", lines={"": line}, about=about)


PLOTS: dict[str, Callable[[], Plot]] = {
    "adaptive_clip": adaptive_clip,
    "centralize_gradients": centralized,
    "nonfinite": nonfinite,
    "noise_scale": noise_scale,
    "sam": sam,
    "freeze": frozen_at,
    "local_sgd": averaged,
    "diloco": outer_steps,
    "autocast": rounded,
    "loss_scale": scaled_loss,
    "scale_lr": scaled_rate,
    "scale_option": scaled_option,
    "set_option": replaced_option,
    "DecoupledAdamW": lambda: decoupled(dt.optim.DecoupledAdamW, torch.optim.AdamW, "DecoupledAdamW"),
    "DecoupledSGDW": lambda: decoupled(dt.optim.DecoupledSGDW, torch.optim.SGD, "DecoupledSGDW"),
    "factorize": factorized,
    "gated_linear_units": gated,
    "ghost_batch_norm": ghosts,
    "gyro_dropout": subnetworks,
    "squeeze_excite": excited,
    "weight_standardization": standardized,
    "channels_last": places_in_memory,
    "fused_layer_norm": fused,
    "param_groups": decay_of_groups,
}
