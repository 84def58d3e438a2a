"""Train a small network on handwritten digits with and without each recipe, and print one table.

    python benchmarks/ablation.py                          # everything: about twenty minutes on two free cores
    python benchmarks/ablation.py --only mixup sam         # some
    python benchmarks/ablation.py --epochs 4 --seeds 1     # quicker

Every run is that of examples/train_resnet.py without its recipe: a ResNet-8 on scikit-learn's digits, moved by a pixel,
with SGD and a cosine rate. A recipe is added to it alone; "off" is the same network, seeds and batches without. Times are
of whole runs, one after the other in one process, in processor time.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev

import torch
from torch import nn

import dtrain as dt
from measure import machine

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from helpers.pictures import read_digits, shifted
from helpers.resnet import ARCHS, ResNet
from train_resnet import eval_loss_fn, loss_fn

CLASSES, BATCH = 10, 64


def same(model: nn.Module) -> nn.Module:
    """No surgery."""
    return model


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Parts that a recipe adds to the run.

    Args:
        surgery: on the model before it is trained.
        transforms: of the step, made anew for each run.
        finish: change of the last state before its evaluation.
    """

    surgery: Callable[[nn.Module], nn.Module] = same
    transforms: Callable[[], Sequence[dt.Transform]] = list
    finish: Callable[[dt.TrainState, dt.data.Loader], object] = lambda state, loader: None


OFF = Recipe()
RECIPES: dict[str, Recipe] = {
    "label_smoothing": Recipe(transforms=lambda: [dt.transforms.label_smoothing(0.1, num_classes=CLASSES)]),
    "mixup": Recipe(transforms=lambda: [dt.transforms.mixup(0.2, num_classes=CLASSES)]),
    "cutmix": Recipe(transforms=lambda: [dt.transforms.cutmix(num_classes=CLASSES)]),
    "cutout": Recipe(transforms=lambda: [dt.transforms.cutout()]),
    "colout": Recipe(transforms=lambda: [dt.transforms.colout()]),
    "progressive_resizing": Recipe(transforms=lambda: [dt.transforms.progressive_resizing(size_increment=2)]),
    "selective_backprop": Recipe(transforms=lambda: [dt.transforms.selective_backprop(sample_losses)]),
    "clip_by_norm": Recipe(transforms=lambda: [dt.transforms.clip_by_norm(1.0)]),
    "clip_by_value": Recipe(transforms=lambda: [dt.transforms.clip_by_value(0.1)]),
    "adaptive_clip": Recipe(transforms=lambda: [dt.transforms.adaptive_clip(0.01)]),
    "centralize_gradients": Recipe(transforms=lambda: [dt.transforms.centralize_gradients()]),
    "sam": Recipe(transforms=lambda: [dt.transforms.sam(0.05)]),
    "freeze_layers": Recipe(transforms=lambda: [dt.transforms.freeze_layers()]),
    "ema": Recipe(
        transforms=lambda: [dt.transforms.ema(half_life="0.05dur")], finish=lambda state, loader: averaged(state, loader)
    ),
    "swa": Recipe(transforms=lambda: [dt.transforms.swa()], finish=lambda state, loader: with_statistics(state, loader)),
    "blur_pool": Recipe(surgery=dt.surgery.blur_pool),
    "channels_last": Recipe(surgery=dt.surgery.channels_last),
    "squeeze_excite": Recipe(surgery=lambda model: dt.surgery.squeeze_excite(model, min_channels=32, latent_channels=8)),
    "stochastic_depth": Recipe(
        surgery=lambda model: dt.surgery.stochastic_depth(model, ["blocks.*.branch"], drop_rate=0.2, kind="branch")
    ),
    "ghost_batch_norm": Recipe(surgery=lambda model: dt.surgery.ghost_batch_norm(model, ghost_batch_size=16)),
    "weight_standardization": Recipe(surgery=dt.surgery.weight_standardization),
    "factorize": Recipe(surgery=lambda model: dt.surgery.factorize(model, min_channels=64, latent_channels=0.5)),
}


def sample_losses(model: nn.Module, batch: dt.typing.Batch) -> torch.Tensor:
    """The loss of every sample ``[batch]``."""
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


def with_statistics(state: dt.TrainState, loader: dt.data.Loader) -> None:
    """Batch statistics that fit the weights, which are an average."""
    dt.transforms.update_batch_norm_(state.model, loader.one_epoch(), lambda model, batch: model(batch["x"]))


def averaged(state: dt.TrainState, loader: dt.data.Loader) -> None:
    """The average in place of the weights."""
    dt.transforms.load_average_(state, "ema")
    with_statistics(state, loader)


def train(recipe: Recipe, epochs: int, seed: int) -> tuple[float, float, float]:
    """Held-out accuracy and loss of a run, and its processor seconds."""
    pictures = read_digits()
    dt.seed_all(seed)
    model = recipe.surgery(ResNet(ARCHS["resnet8"], channels=1, classes=CLASSES))
    optimizer = dt.optim.DecoupledSGDW(dt.optim.param_groups(model, weight_decay=5e-4), lr=0.1, momentum=0.9, nesterov=True)
    loader = dt.build_loader(pictures.train, global_batch_size=BATCH, seed=seed, transform=shifted)
    run = loader.run_length(f"{epochs}ep")
    rate = dt.schedules.warmup(dt.schedules.cosine(1.0, 0.0, run.steps()), run.steps() // 10)
    step = dt.compose_step(loss_fn, [dt.transforms.scale_lr(rate), *recipe.transforms()])
    state = step.init(model, optimizer, run_length=run, seed=seed)
    begun = time.process_time()
    for batch in loader.until(f"{epochs}ep"):
        state, _ = step(state, batch)
    used = time.process_time() - begun
    recipe.finish(state, loader)
    test_loader = dt.build_loader(pictures.held_out, global_batch_size=256, seed=0, shuffle=False)
    scores = dt.reduce_metrics(dt.evaluate(model, test_loader, eval_loss_fn))
    return scores["accuracy"], scores["loss"], used


def shown(values: Sequence[float], digits: int) -> str:
    """Their mean, and how far they are spread."""
    spread = f" +- {stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{mean(values):.{digits}f}{spread}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=RECIPES, metavar="RECIPE", help=f"of {', '.join(RECIPES)} (default: all)")
    parser.add_argument("--epochs", type=int, default=8, help="length of a run (%(default)s)")
    parser.add_argument("--seeds", type=int, default=2, help="runs of each (%(default)s)")
    args = parser.parse_args()
    if args.epochs < 1 or args.seeds < 1:
        parser.error(f"--epochs and --seeds must be at least 1, got {args.epochs} and {args.seeds}")
    torch.set_num_threads(1)  # processor time is then the work that is done, not how long threads wait for each other
    print(machine())
    print(f"\nResNet-8 on digits, {args.epochs} epochs, {args.seeds} seeds; processor time against the run without\n")
    print("| recipe | accuracy | held-out loss | time |\n|---|---|---|---|")
    train(OFF, 1, 0)  # warm up, so that the first run of the table does not pay for imports
    off: list[tuple[float, float, float]] = []
    for name in ["off", *(args.only or RECIPES)]:
        runs = [train(RECIPES.get(name, OFF), args.epochs, seed) for seed in range(args.seeds)]
        off = off or runs
        accuracy, loss, seconds = (list(values) for values in zip(*runs, strict=True))
        ratio = [mine / without for mine, (*_, without) in zip(seconds, off, strict=True)]
        print(f"| {name} | {shown(accuracy, 3)} | {shown(loss, 3)} | {shown(ratio, 2)}x |", flush=True)


if __name__ == "__main__":
    main()
