"""Measure a step of dtrain's optimizers against torch's own, on the same gradients.

    python benchmarks/optimizers.py                  # everything: about two minutes on two free cores
    python benchmarks/optimizers.py --pairs 2000     # a narrower band

Both sides compute the same, which is checked before anything is timed: ``DecoupledAdamW`` with a decay of ``x`` is fused AdamW
with one of ``x / lr``; ``Muon`` in one process is ``torch.optim.Muon`` beside fused AdamW. The claim is that of decoupled
AdamW, a speed of at least 0.98 of torch's: at most 1 / 0.98 of its time, for a model; its cost in microseconds is seen
at the tiny one. On a GPU, where there is one, wall time is judged, after the device has finished. Models are small
enough for the caches. The place of tensors in memory moves a ratio of equals by 3%, so both sides are built anew ``BUILDS``
times, in turn first.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from dtrain.optim.decoupled import DecoupledAdamW, DecoupledSGDW
from dtrain.optim.groups import muon_groups, param_groups
from dtrain.optim.muon import Muon
from measure import CPU, WALL, Comparison, compare, interleaved, machine, verdict_line

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from helpers.gpt import GPT, GPTConfig

LR, DECAY = 1e-3, 1e-5
AT_MOST = 1 / 0.98
BUILDS = 20
SAME = 1e-5  # relative, float32: the decay is divided by the rate on one side and multiplied by it on the other
MODELS = {
    "tiny MLP, 6 tensors": lambda: nn.Sequential(
        nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
    ),
    "4-layer GPT, 0.5 M": lambda: GPT(GPTConfig(n_layer=4, n_head=3, dim=96, max_seq=128)),
}

Make = Callable[[nn.Module], list[torch.optim.Optimizer]]


def _torch_muon(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices, *rest = muon_groups(model, head=HEAD, lr=0.02, weight_decay=0.1)
    muon = torch.optim.Muon(matrices["params"], lr=0.02, weight_decay=0.1)
    keep = ("params", "lr", "weight_decay")
    adamw = torch.optim.AdamW([{key: group[key] for key in keep} for group in rest], betas=(0.9, 0.95), fused=True)
    return [muon, adamw]


def _plain(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=DECAY / LR, fused=True)]


HEAD = ["4.*", "head.*"]  # of the MLP and of the GPT
CLAIMS: dict[str, tuple[Make, Make]] = {
    "DecoupledAdamW against torch AdamW, both fused": (
        lambda model: [DecoupledAdamW(model.parameters(), lr=LR, weight_decay=DECAY)],
        _plain,
    ),
    "torch AdamW against itself, for the noise of where tensors lie": (_plain, _plain),
    "DecoupledAdamW against torch AdamW with two groups": (
        lambda model: [DecoupledAdamW(param_groups(model, weight_decay=DECAY), lr=LR)],
        lambda model: [torch.optim.AdamW(param_groups(model, weight_decay=DECAY / LR), lr=LR, fused=True)],
    ),
    "DecoupledSGDW against torch SGD without decay, both foreach": (
        lambda model: [DecoupledSGDW(model.parameters(), lr=LR, momentum=0.9, weight_decay=DECAY)],
        lambda model: [torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9, foreach=True)],
    ),
    "Muon against torch Muon beside AdamW": (lambda model: [Muon(muon_groups(model, head=HEAD))], _torch_muon),
}


class Side:
    """A model with gradients, and its optimizers."""

    def __init__(self, build: Callable[[], nn.Module], make: Make, device: str) -> None:
        torch.manual_seed(0)
        self.model = build().to(device)
        draw = torch.Generator().manual_seed(1)
        for param in self.model.parameters():
            param.grad = (0.01 * torch.randn(param.shape, generator=draw)).to(device)
        self.optimizers = make(self.model)
        self.wait = torch.cuda.synchronize if device == "cuda" else lambda: None

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
        self.wait()

    def values(self) -> torch.Tensor:
        return torch.cat([param.detach().flatten().double() for param in self.model.parameters()])


def check_same(a: Side, b: Side) -> None:
    """Stop here if two sides are not where they should be: then they did different arithmetic."""
    apart = float((a.values() - b.values()).norm() / b.values().norm())
    if not apart <= SAME:
        raise SystemExit(f"the sides differ by {apart:.1e} (relative), tolerance {SAME:.0e}")


def measured(build: Callable[[], nn.Module], ours: Make, theirs: Make, pairs: int, device: str, *, same: bool) -> Comparison:
    """Return the time of a step of one side against that of the other side."""
    clock, seen = WALL if device == "cuda" else CPU, {"ours": [], "theirs": []}
    makes = {"ours": ours, "theirs": theirs}
    for turn in range(BUILDS):
        order = sorted(makes, reverse=turn % 2 == 1)
        sides = {name: Side(build, makes[name], device) for name in order}
        if same:
            for side in sides.values():
                side.step()
            check_same(*sides.values())
        runs = {name: side.step for name, side in sides.items()}
        timings = interleaved(runs, rounds=pairs // 2 // BUILDS, warmup=10, clocks={"clock": clock}, seed=turn)["clock"]
        for name, rounds in timings.items():
            seen[name] += rounds
    return compare(seen["ours"], seen["theirs"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=600, help="ratios per figure, even (%(default)s)")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(1)  # CPU time is then the work that is done, not how long threads wait for each other
    print(machine())
    for what, (ours, theirs) in CLAIMS.items():
        for name, build in MODELS.items():
            comparison = measured(build, ours, theirs, args.pairs, device, same="SGD" not in what)
            print(f"{name}, {device}, a step of {what}: {comparison}", flush=True)
            if "AdamW, both" in what:
                print(verdict_line(f"{name}, decoupled AdamW", comparison.ratio, at_most=AT_MOST), flush=True)


if __name__ == "__main__":
    main()
