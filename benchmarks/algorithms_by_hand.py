"""Methods written by hand in plain PyTorch: the baselines of the transforms of dtrain.

A ``Hand`` is a step of training; a method overrides one of its parts. Where dtrain's own tensor helper is called (RandAugment,
AugMix), it is the step around it that is compared.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dtrain as dt

CLASSES = 10
Batch = dict[str, Tensor]


class Hand:
    """A step without a method: loss, backward, fused AdamW."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.params = list(model.parameters())
        self.optimizer = torch.optim.AdamW(self.params, lr=1e-3, fused=True)
        self.count = 0
        self.begin()

    def begin(self) -> None:
        """Set up the state of the method."""

    def batch(self, batch: Batch) -> Batch:
        return batch

    def loss(self, batch: Batch) -> Tensor:
        logits = self.model(batch["x"])
        return F.cross_entropy(logits.flatten(0, -2), batch["y"].flatten(0, logits.ndim - 2))

    def gradient(self, batch: Batch) -> None:
        self.loss(batch).backward()

    def ready(self) -> None:
        """Between backward and the update."""

    def update(self) -> None:
        self.optimizer.step()

    def done(self) -> None:
        """After the update."""

    @property
    def grads(self) -> list[Tensor]:
        return [p.grad for p in self.params if p.grad is not None]

    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.count)

    def step(self, batch: Batch) -> None:
        self.gradient(self.batch(batch))
        self.ready()
        self.update()
        self.done()
        self.optimizer.zero_grad()
        self.count += 1


class ClipByNorm(Hand):
    def ready(self) -> None:
        norm = torch.stack(torch._foreach_norm(self.grads)).norm()
        torch._foreach_mul_(self.grads, (0.5 / (norm + 1e-6)).clamp(max=1.0))


class ClipByValue(Hand):
    def ready(self) -> None:
        torch._foreach_clamp_min_(self.grads, -0.01)
        torch._foreach_clamp_max_(self.grads, 0.01)


class AdaptiveClip(Hand):
    def ready(self) -> None:
        for param in self.params:
            dims = tuple(range(1, param.ndim)) or None
            of_param, of_grad = (
                torch.linalg.vector_norm(t, dim=dims, keepdim=dims is not None) for t in (param.detach(), param.grad)
            )
            most = of_param.clamp(min=1e-3) * 0.01
            param.grad.mul_((most / of_grad.clamp(min=1e-6)).clamp(max=1.0))


class Nonfinite(Hand):
    def update(self) -> None:
        if bool(torch.stack(torch._foreach_norm(self.grads, math.inf)).isfinite().all()):
            self.optimizer.step()


class CentralizeGradients(Hand):
    def ready(self) -> None:
        for grad in self.grads:
            if grad.ndim > 1:
                grad.sub_(grad.mean(dim=tuple(range(1, grad.ndim)), keepdim=True))


class NoiseScale(Hand):
    """Compute, every second step, the gradients of both halves, whose mean is the gradient of the whole batch."""

    def begin(self) -> None:
        self.noise, self.signal = torch.zeros(()), torch.zeros(())

    def gradient(self, batch: Batch) -> None:
        if self.count % 2:
            self.loss(batch).backward()
            return
        half = len(batch["x"]) // 2
        self.loss({key: value[:half] for key, value in batch.items()}).backward()
        first = [grad.clone() for grad in self.grads]
        small = torch.stack(torch._foreach_norm(first)).square().sum()
        self.loss({key: value[half:] for key, value in batch.items()}).backward()
        torch._foreach_mul_(self.grads, 0.5)
        big = torch.stack(torch._foreach_norm(self.grads)).square().sum()
        self.noise.lerp_((small - big) / (1.0 / half - 0.5 / half), 0.1)
        self.signal.lerp_(2.0 * big - small, 0.1)


class Sam(Hand):
    def gradient(self, batch: Batch) -> None:
        self.loss(batch).backward()
        norm = torch.stack(torch._foreach_norm(self.grads)).norm()
        kept = [p.detach().clone() for p in self.params]
        with torch.no_grad():
            torch._foreach_add_(self.params, torch._foreach_mul(self.grads, 0.05 / (norm + 1e-12)))
        self.optimizer.zero_grad()
        self.loss(batch).backward()
        with torch.no_grad():
            torch._foreach_copy_(self.params, kept)


class Ema(Hand):
    def begin(self) -> None:
        self.averages = [p.detach().clone() for p in self.params]

    def done(self) -> None:
        with torch.no_grad():
            torch._foreach_lerp_(self.averages, self.params, 0.001)


class Swa(Ema):
    """Average from the beginning, every fifth step."""

    averaged = 1

    def done(self) -> None:
        if self.count % 5 == 4:
            self.averaged += 1
            with torch.no_grad():
                torch._foreach_lerp_(self.averages, self.params, 1.0 / self.averaged)


class BalanceExperts(Hand):
    """The routers count in buffers; the loop moves the biases."""

    def begin(self) -> None:
        self.routers = [module for module in self.model.modules() if isinstance(module, dt.experts.Router)]

    def done(self) -> None:
        for router in self.routers:
            load = router.load.double()
            router.bias += 0.001 * (load.mean() - load).sign().to(router.bias.dtype)
            router.share.copy_(load / load.sum())
            router.load.zero_()


class Freeze(Hand):
    def begin(self) -> None:
        next(iter(self.model.children())).requires_grad_(False)


class Diloco(Hand):
    """Outer step of one replica, every fifth step."""

    def begin(self) -> None:
        self.outer = [p.detach().clone() for p in self.params]
        self.momentum = [torch.zeros_like(p) for p in self.params]

    def done(self) -> None:
        if self.count % 5 == 4:
            with torch.no_grad():
                apart = torch._foreach_sub(self.outer, self.params)
                torch._foreach_mul_(self.momentum, 0.9)
                torch._foreach_add_(self.momentum, apart)
                torch._foreach_add_(apart, self.momentum, alpha=0.9)
                torch._foreach_add_(self.outer, apart, alpha=-0.7)
                torch._foreach_copy_(self.params, self.outer)


class SelectiveBackprop(Hand):
    def batch(self, batch: Batch) -> Batch:
        with torch.no_grad():
            losses = F.cross_entropy(self.model(batch["x"]), batch["y"], reduction="none")
        ranks = losses.argsort().argsort().double()
        chosen = torch.multinomial(ranks + 1.0, len(losses) // 2, generator=self.generator())
        return {key: value[chosen] for key, value in batch.items()}


class Smooth(Hand):
    """Targets are probabilities."""

    def loss(self, batch: Batch) -> Tensor:
        return -(batch["y"] * self.model(batch["x"]).log_softmax(-1)).sum() / batch["y"].sum()


class LabelSmoothing(Smooth):
    def batch(self, batch: Batch) -> Batch:
        return {**batch, "y": F.one_hot(batch["y"], CLASSES) * 0.9 + 0.1 / CLASSES}


def _coefficient(generator: torch.Generator, alpha: float) -> Tensor:
    both = torch._standard_gamma(torch.full((2,), alpha), generator=generator)
    return both[0] / both.sum()


class Mixup(Smooth):
    def batch(self, batch: Batch) -> Batch:
        generator = self.generator()
        share, order = _coefficient(generator, 0.2), torch.randperm(len(batch["x"]), generator=generator)
        targets = F.one_hot(batch["y"], CLASSES).float()
        return {"x": batch["x"][order].lerp(batch["x"], share), "y": targets[order].lerp(targets, share)}


class Cutmix(Smooth):
    def batch(self, batch: Batch) -> Batch:
        generator = self.generator()
        side = batch["x"].shape[-1]
        share, order = float(_coefficient(generator, 1.0)), torch.randperm(len(batch["x"]), generator=generator)
        half, (row, col) = side * math.sqrt(1.0 - share) / 2, torch.randint(side, (2,), generator=generator).tolist()
        top, bottom, left, right = (min(max(round(v), 0), side) for v in (row - half, row + half, col - half, col + half))
        mixed, targets = batch["x"].clone(), F.one_hot(batch["y"], CLASSES).float()
        mixed[..., top:bottom, left:right] = batch["x"][order][..., top:bottom, left:right]
        kept = 1.0 - (bottom - top) * (right - left) / side**2
        return {"x": mixed, "y": targets[order].lerp(targets, kept)}


class Cutout(Hand):
    def batch(self, batch: Batch) -> Batch:
        x, side = batch["x"].clone(), batch["x"].shape[-1]
        centres = torch.randint(side, (len(x), 2, 1), generator=self.generator())
        inside = (torch.arange(side) - centres).abs() <= side // 4
        x.masked_fill_((inside[:, 0].unsqueeze(2) & inside[:, 1].unsqueeze(1)).unsqueeze(1), 0.0)
        return {**batch, "x": x}


class Colout(Hand):
    def batch(self, batch: Batch) -> Batch:
        x, generator = batch["x"], self.generator()
        for dim in (2, 3):
            size = x.shape[dim]
            kept = torch.randperm(size, generator=generator)[: size - int(0.15 * size)].sort().values
            x = x.index_select(dim, kept)
        return {**batch, "x": x}


class RandAugment(Hand):
    def batch(self, batch: Batch) -> Batch:
        return dt.transforms.rand_augment_batch(batch, generator=self.generator())


class Augmix(Hand):
    def batch(self, batch: Batch) -> Batch:
        return dt.transforms.augmix_batch(batch, generator=self.generator())


class ProgressiveResizing(Hand):
    def batch(self, batch: Batch) -> Batch:
        return {**batch, "x": F.interpolate(batch["x"], scale_factor=0.5, mode="bilinear", antialias=True)}


class SequenceLengthWarmup(Hand):
    def batch(self, batch: Batch) -> Batch:
        return {key: value[:, :32].contiguous() for key, value in batch.items()}


class ScaleLr(Hand):
    def update(self) -> None:
        factor = 0.1 + 0.45 * (1.0 + math.cos(math.pi * min(self.count / 10_000, 1.0)))
        for group in self.optimizer.param_groups:
            group["lr"] = 1e-3 * factor
        self.optimizer.step()


class ScaleOption(Hand):
    def update(self) -> None:
        for group in self.optimizer.param_groups:
            group["weight_decay"] = 1e-2 * max(1.0 - self.count / 10_000, 0.0)
        self.optimizer.step()


class Autocast(Hand):
    def loss(self, batch: Batch) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().loss(batch)


class LossScale(Hand):
    def begin(self) -> None:
        self.scale, self.streak = 65536.0, 0

    def gradient(self, batch: Batch) -> None:
        (self.loss(batch) * self.scale).backward()
        torch._foreach_mul_(self.grads, torch.tensor(1.0 / self.scale))

    def update(self) -> None:
        if bool(torch.stack(torch._foreach_norm(self.grads, math.inf)).isfinite().all()):
            self.optimizer.step()
            self.streak += 1
        else:
            self.scale, self.streak = self.scale / 2, 0


METHODS: dict[str, type[Any]] = {
    "balance_experts": BalanceExperts,
    "nothing": Hand,
    "clip_by_norm": ClipByNorm,
    "clip_by_value": ClipByValue,
    "adaptive_clip": AdaptiveClip,
    "nonfinite": Nonfinite,
    "centralize_gradients": CentralizeGradients,
    "noise_scale": NoiseScale,
    "sam": Sam,
    "ema": Ema,
    "swa": Swa,
    "freeze": Freeze,
    "freeze_layers": Hand,
    "local_sgd": Hand,
    "diloco": Diloco,
    "selective_backprop": SelectiveBackprop,
    "label_smoothing": LabelSmoothing,
    "mixup": Mixup,
    "cutmix": Cutmix,
    "cutout": Cutout,
    "colout": Colout,
    "rand_augment": RandAugment,
    "augmix": Augmix,
    "progressive_resizing": ProgressiveResizing,
    "sequence_length_warmup": SequenceLengthWarmup,
    "scale_lr": ScaleLr,
    "scale_option": ScaleOption,
    "set_option": ScaleOption,
    "autocast": Autocast,
    "loss_scale": LossScale,
}
