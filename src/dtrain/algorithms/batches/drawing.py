"""Random numbers of batch methods: from the generator that is given, on its device, and never from the global one."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from dtrain.errors import ConfigError
from dtrain.schedules.hyper import is_number


def needed(generator: torch.Generator | None, where: str, instead: str) -> torch.Generator:
    """``generator``, unless there is none.

    Raises:
        ConfigError: None, where ``instead`` was not given either.
    """
    if generator is None:
        raise ConfigError(f"{where}: needs generator=..., or {instead}; it never draws from the global one")
    return generator


def beta(alpha: float, count: int, generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> Tensor:
    """``count`` numbers ``[count]`` of Beta(alpha, alpha), on ``device``; ones for ``alpha=0``, its limit without mixing.

    ``torch.distributions`` draws from the global generator. Beta is the first share of a Dirichlet of two, whose draw scales
    both gammas by their sum in a way that does not give 0 / 0 for small ``alpha``.
    """
    if alpha == 0:
        return torch.ones(count, device=device, dtype=dtype)
    both = torch.full((count, 2), float(alpha), device=generator.device, dtype=dtype)
    return torch._sample_dirichlet(both, generator=generator)[:, 0].to(device, non_blocking=True)


def permutation(count: int, generator: torch.Generator, device: torch.device) -> Tensor:
    """A random order ``[count]`` of so many, on ``device``."""
    return torch.randperm(count, generator=generator, device=generator.device).to(device, non_blocking=True)


def host_random_of(generator: torch.Generator, where: str) -> random.Random:
    """Random numbers on the host that begin at the next draw of ``generator``, one of the CPU.

    Raises:
        ConfigError: a generator of another device: to read what it draws, the host would have to wait.
    """
    if generator.device.type != "cpu":
        raise ConfigError(
            f"{where}: chooses on the host, so it needs a generator of the CPU, got one on {generator.device}; "
            "give dt.generator('cpu', ...), or what it would draw"
        )
    return random.Random(int(torch.randint(2**62, (), generator=generator)))


def check_alpha(alpha: float, where: str) -> None:
    """Raise ``ConfigError`` unless ``alpha`` can be that of a Beta distribution, or 0."""
    if not is_number(alpha) or not 0 <= alpha < float("inf"):
        raise ConfigError(f"{where}: needs a finite alpha >= 0, got {alpha=}")


def check_share(value: float, where: str, name: str, *, whole: bool = True) -> None:
    """Raise ``ConfigError`` unless ``value`` is in ``[0, 1]``, or in ``[0, 1)`` where ``whole`` is False."""
    if not is_number(value) or not 0 <= value <= 1 or (value == 1 and not whole):
        raise ConfigError(f"{where}: needs {name} in [0, 1{']' if whole else ')'}, got {name}={value!r}")
