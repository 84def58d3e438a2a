"""The recipe cards, ``docs/recipes/*.md``, made of docstrings, registries and measurements by ``python tests/written.py``."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import dtrain as dt
from battery import curves, pictures
from battery.pages import ROOMS, ROOT, costs, exported, rows_of, section, signature

FOLDER = ROOT / "docs" / "recipes"
EFFECTS = ROOT / "benchmarks" / "results" / "recipes.json"
FIGURES = ROOT / "docs" / "figures.md"

PARTS: dict[str, tuple[str, ...]] = {
    "adaptive_clip": ("clip_grad_adaptive_",),
    "centralize_gradients": ("centralize_gradients_",),
    "clip_by_norm": ("dt.clip_grad_norm_",),
    "clip_by_value": ("clip_grad_value_",),
    "noise_scale": ("estimate_noise_and_signal",),
    "sam": ("perturb_params_", "restore_params_"),
    "diloco": ("outer_step_",),
    "balance_experts": ("move_bias_",),
    "ema": ("update_ema_", "use_average", "load_average_"),
    "local_sgd": ("split_replicas", "average_replicas_", "join_replicas"),
    "swa": ("update_swa_", "update_batch_norm_"),
    "augmix": ("augmix_batch", "jensen_shannon"),
    "colout": ("colout_batch",),
    "cutmix": ("cutmix_batch",),
    "cutout": ("cutout_batch",),
    "label_smoothing": ("smooth_labels", "as_probabilities"),
    "mixup": ("mixup_batch",),
    "progressive_resizing": ("resize_batch",),
    "rand_augment": ("rand_augment_batch",),
    "selective_backprop": ("select_by_loss",),
    "sequence_length_warmup": ("shorten_batch",),
    "alibi": ("alibi_slopes", "alibi_bias", "add_alibi_bias", "AlibiMultiheadAttention"),
    "blur_pool": ("blur_2d", "blur_kernel"),
    "factorize": ("factorize_matrix", "FactorizedLinear", "FactorizedConv2d"),
    "gated_linear_units": ("GatedLinearUnit",),
    "ghost_batch_norm": ("ghost_batches",),
    "gyro_dropout": ("GyroDropout", "subnetwork_masks", "drop_by_masks"),
    "low_precision_group_norm": ("LowPrecisionGroupNorm",),
    "low_precision_layer_norm": ("LowPrecisionLayerNorm", "LowPrecisionRMSNorm"),
    "squeeze_excite": ("SqueezeExcite2d",),
    "stochastic_depth": ("drop_rates", "drop_samples"),
    "weight_standardization": ("standardize_weight",),
    "Muon": ("muon_groups", "orthogonalize"),
    "constant": ("composer.constant", "composer.constant_with_warmup"),
    "cosine": ("composer.cosine", "composer.cosine_with_warmup"),
    "cosine_restarts": ("composer.cosine_warm_restarts",),
    "exponential": ("composer.exponential",),
    "linear": ("composer.linear", "composer.linear_with_warmup"),
    "multi_step": ("composer.multi_step", "composer.multi_step_with_warmup"),
    "polynomial": ("composer.polynomial", "composer.polynomial_with_warmup"),
    "step_decay": ("composer.step",),
    "combine_schedules": ("sequential", "multiply", "clip", "time_scale", "with_unit", "to_lambda_lr", "plot"),
}
"""By card, the functions for a loop written by hand, the modules of a surgery, and Composer's forms of a schedule."""

COMBINED = "Run schedules one after another, multiply, clip or stretch a schedule, and use it in a torch optimizer."

TITLES = {
    "DecoupledAdamW": "AdamW with decoupled weight decay",
    "DecoupledSGDW": "SGD with decoupled weight decay",
    "MatrixOptimizer": "Optimizers of whole matrices",
    "Muon": "Muon",
    "adaptive_clip": "Adaptive gradient clipping",
    "alibi": "ALiBi: attention with linear biases",
    "augmix": "AugMix",
    "autocast": "Mixed precision by autocast",
    "balance_experts": "Balance experts by a bias",
    "centralize_gradients": "Gradient centralization",
    "clip_by_norm": "Gradient clipping by norm",
    "clip_by_value": "Gradient clipping by value",
    "colout": "ColOut: drop rows and columns",
    "cosine": "Cosine schedule",
    "constant": "Constant schedule",
    "cosine_restarts": "Cosine schedule with warm restarts",
    "cutmix": "CutMix",
    "diloco": "DiLoCo: rare communication with an outer optimizer",
    "ema": "Exponential moving average",
    "exponential": "Exponential schedule",
    "factorize": "Low-rank factorization of layers",
    "freeze": "Freeze parameters",
    "freeze_layers": "Freeze layers one after another",
    "ghost_batch_norm": "Ghost batch normalization",
    "inverse_sqrt": "Inverse square root schedule",
    "linear": "Linear schedule",
    "local_sgd": "Local SGD",
    "loss_scale": "Loss scaling for fp16",
    "low_precision_group_norm": "Low-precision group normalization",
    "low_precision_layer_norm": "Low-precision layer normalization",
    "fused_layer_norm": "Fused layer normalization",
    "multi_step": "Multi-step schedule",
    "noise_scale": "Gradient noise scale",
    "nonfinite": "Skip updates with NaN or infinite gradients",
    "one_cycle": "One-cycle schedule",
    "param_groups": "Parameter groups",
    "polynomial": "Polynomial schedule",
    "rand_augment": "RandAugment",
    "sam": "Sharpness-aware minimization (SAM)",
    "scale_lr": "Learning rate from a schedule",
    "scale_option": "Scale an option of the optimizer",
    "selective_backprop": "Selective backpropagation",
    "set_option": "Set an option of the optimizer",
    "squeeze_excite": "Squeeze and excitation",
    "step_decay": "Step decay schedule",
    "swa": "Stochastic weight averaging (SWA)",
    "warmup": "Learning rate warmup",
    "warmup_stable_decay": "Warmup, stable, decay schedule",
}
"""Titles of cards whose name is no title when its underscores are spaces."""

METHODS = {
    ("train_resnet", "blur_pool"): "blur_pool",
    ("train_resnet", "channels_last"): "channels_last",
    ("train_resnet", "progressive_resizing"): "progressive_resizing",
    ("train_resnet", "mixup"): "mixup",
    ("train_resnet", "label_smoothing"): "label_smoothing",
    ("train_resnet", "ema"): "ema",
    ("finetune_bert", "warmup"): "warmup",
    ("finetune_bert", "clip"): "clip_by_norm",
    ("train_dpo", "warmup"): "warmup",
    ("train_dpo", "clip"): "clip_by_norm",
    ("pretrain_bert", "alibi"): "alibi",
    ("pretrain_bert", "glu"): "gated_linear_units",
    ("pretrain_bert", "low_precision_norm"): "low_precision_layer_norm",
    ("pretrain_bert", "length_warmup"): "sequence_length_warmup",
    ("train_diffusion", "low_precision_norm"): "low_precision_group_norm",
    ("train_diffusion", "ema"): "ema",
}
"""By example and its option ``--without``, the card that the measurement belongs to."""
QUALITY = {"train_resnet": "accuracy", "finetune_bert": "accuracy", "train_dpo": "accuracy", "pretrain_bert": "held-out loss",
           "train_diffusion": "held-out loss"}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One page: its function, and the functions that stand on the page, too."""

    name: str
    room: str
    value: Any
    parts: Mapping[str, Any]

    @property
    def kind(self) -> str:
        """The sub-package."""
        return self.room.split(".")[0]


@cache
def cards() -> dict[str, Card]:
    """Return all cards by name, in the order of the rooms."""
    values = {name: (room, value) for room, members in exported().items() for name, value in members}
    values["dt.clip_grad_norm_"] = ("", dt.clip_grad_norm_)
    inside = {name for names in PARTS.values() for name in names}
    mains = [name for name in values if name not in inside]
    by_name = {}
    for name in [*mains, "combine_schedules"]:
        room, value = values.get(name, ("schedules", None))
        parts = {name_of_part: values[name_of_part][1] for name_of_part in PARTS.get(name, ())}
        by_name[name] = Card(name=name, room=room, value=value, parts=parts)
    return by_name


# The parts of a card.


def prose(text: str) -> str:
    """Text of a docstring as a paragraph of Markdown."""
    return " ".join(text.split()).replace("``", "`")


def title(card: Card) -> str:
    """Return the heading of a card."""
    return "Combine schedules" if card.value is None else TITLES.get(card.name, card.name.replace("_", " ").capitalize())


def summary(card: Card) -> str:
    """The first sentence of the card."""
    return COMBINED if card.value is None else prose((inspect.getdoc(card.value) or "").split("\n\n")[0])


def suggested(value: Any) -> list[tuple[str, str, str]]:
    """Return setting, value and source of each line of ``Suggested values:``."""
    lines: list[str] = []
    for line in section(value, "Suggested values").splitlines():
        if line.startswith(" ") and lines:
            lines[-1] += " " + line.strip()
        else:
            lines.append(line.strip())
    suggestions = []
    for line in lines:
        match = re.fullmatch(r"(.*?): (.*) \(((?:[^()]|\([^()]*\))*)\)", line)
        if match is None:
            raise ValueError(f"{value.__name__}: {line!r} is not 'setting: value (source)'")
        suggestions.append((prose(match[1]), prose(match[2]), prose(match[3])))
    return suggestions


def picture(card: Card) -> Iterator[str]:
    """Yield the picture of a card with the sentence below it."""
    if card.name in pictures.BATCHES:
        yield f"![Images before and after {card.name}](../images/recipes/{card.name}.png)\n"
        yield f"*Above: images. Below: after {pictures.BATCHES[card.name][0]}*\n"
    elif card.name == "blur_pool":
        yield "![Stripes and checks, subsampled with and without a blur](../images/recipes/blur_pool.png)\n"
        yield "*Left: two images. Middle: every fourth pixel, with false patterns. Right: every fourth pixel after a blur.*\n"
    elif card.name in curves.plots():
        plot = curves.plots()[card.name]
        yield f"![{plot.y} over {plot.x}](../images/recipes/{card.name}.svg)\n"
        if plot.about:
            yield f"*{plot.about}*\n"


def located(name: str, value: Any) -> str:
    """Return a link to the source of a name; the site makes it a link to the reference."""
    last = name.rpartition(".")[2]
    module = inspect.unwrap(value).__module__
    full = public_name(last, module)
    return f"[`{full}`](../../src/{module.replace('.', '/')}.py)"


def public_name(last: str, module: str) -> str:
    """Return the name as a loop writes it."""
    if last == "clip_grad_norm_":
        return "dt.clip_grad_norm_"
    composer = ".composer" if module.startswith("dtrain.schedules.composer") else ""
    return f"dt.{module.split('.')[1]}{composer}.{last}"


def example(value: Any) -> str:
    """Return the example of a docstring, with the imports that an empty interpreter needs."""
    text = section(value, "Example")
    needs = {"warnings": r"(?<![\w.])warnings\.", "torch": r"(?<![\w.])torch\.", "nn": r"(?<![\w.])nn\."}
    imports = {name: f">>> import {name}" for name in needs} | {"nn": ">>> from torch import nn"}
    lines = [imports[name] for name, used in needs.items() if re.search(used, text) and imports[name] not in text]
    return "\n".join(["```pycon", *lines, text, "```", ""])


def usage(card: Card) -> Iterator[str]:
    """Yield how the function of the card is used."""
    if card.value is None:
        return
    heading = {"transforms": "In a step", "surgery": "On a model", "optim": "In a loop", "schedules": "Usage"}[card.kind]
    yield f"## {heading}\n"
    if card.kind == "schedules":
        step, code = (
            "dt.compose_step(loss_fn, [dt.transforms.scale_lr(schedule)])",
            curves.written(curves.SCHEDULES[card.name][1][0]),
        )
        yield f"`schedule = {code}` is a function of the step. In a step: `{step}`. By hand:\n"
    elif card.kind == "surgery" and card.name != "replace_modules":
        yield "Before `shard_model`, and before the optimizer is built:\n"
    yield example(card.value)
    yield f"```text\n{signature(card.name, card.value)}\n```\n"
    yield f"Arguments and errors: {located(card.name, card.value)}.\n"


def by_hand(card: Card) -> Iterator[str]:
    """Yield the functions and modules that stand on the card, too."""
    ours = {name: value for name, value in card.parts.items() if not name.startswith("composer.")}
    theirs = {name: value for name, value in card.parts.items() if name.startswith("composer.")}
    for heading, parts in (("By hand", ours), ("In Composer's form", theirs)):
        if not parts:
            continue
        if card.value is not None:
            yield f"## {heading}\n"
        if heading == "In Composer's form":
            yield "Times are written as in Composer, and the result is a factor of the rate.\n"
        for name, value in parts.items():
            said = prose((inspect.getdoc(value) or "").split("\n\n")[0])
            if card.value is None:
                yield f"## {name}\n"
            yield f"{located(name, value)}: {said}\n"
            yield example(value)
    if card.name == "diloco":
        yield "The replicas are split, averaged and joined as in [local_sgd](local_sgd.md).\n"


def values(card: Card) -> Iterator[str]:
    """Yield the suggested values and the cases in which another recipe is better."""
    rows = suggested(card.value) if card.value is not None else []
    if rows:
        yield "## Suggested values\n"
        lines = ["| setting | value | source |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows)]
        yield "\n".join(lines) + "\n"
    if card.value is not None and (text := prose(section(card.value, "When not to use"))):
        yield "## When not to use it\n"
        yield f"Avoid `{card.name}` if {text}\n"


@cache
def alone() -> dict[str, tuple[str, str]]:
    """Return accuracy and time of each method alone, of the table of ``benchmarks/ablation.py`` in docs/figures.md."""
    table = FIGURES.read_text().split("| recipe | accuracy | held-out loss | time |\n")[1].split("\n\n")[0]
    return {
        name: (accuracy, time)
        for name, accuracy, time in re.findall(r"^\| (\w+) \| ([\d.]+) \| [\d.]+ \| ([\d.]+)x", table, re.M)
    }


def effects(name: str) -> Iterator[str]:
    """Yield the measured effect of a method in the examples."""
    runs = json.loads(EFFECTS.read_text())["recipes"]
    for (script, method), card in METHODS.items():
        if card != name:
            continue
        length = runs[script][1]["length"]
        results = {run["without"]: run["value"] for run in runs[script] if run["length"] == length}
        yield (
            f"- `examples/{script}.py`, {length}: {QUALITY[script]} {results['']:g} with all methods, "
            f"{results[method]:g} without this one."
        )


def cost(card: Card) -> str:
    """Return the measured time of a step as a cell of a table; empty if no run measured the card."""
    row = costs()["costs"].get(card.name)
    return f"{row['ratio']:.2f}x" if row else ""


def cost_and_effect(card: Card) -> Iterator[str]:
    """Yield the measured cost of a step, and the effect on the quality of a run."""
    lines = []
    if row := costs()["costs"].get(card.name):
        against = "the step of the plain model" if card.kind == "surgery" else "the same method in a loop written by hand"
        nothing = costs()["costs"]["nothing"]["ratio"]
        more = "" if card.kind == "surgery" else f" A composed step without transforms costs {nothing:.2f}x."
        lines.append(f"- A step costs {row['ratio']:.2f}x ({row['low']:.2f} to {row['high']:.2f}) of {against}, "
                     f"in processor time.{more}")  # fmt: skip
    if card.kind == "schedules" and card.value is not None:
        lines.append(
            f"- [scale_lr](scale_lr.md) applies a schedule: a step costs {cost(cards()['scale_lr'])} of a step by hand."
        )
    if card.kind == "optim":
        table = re.findall(rf"^\| ([^|]*`(?:optim\.)?{card.name}`[^|]*) \| ([^|]*) \|", FIGURES.read_text(), re.M)
        lines += [f"- Time of {what}: {ratio}." for what, ratio in table]
    if card.name in alone():
        (accuracy, time), (base, _) = alone()[card.name], alone()["off"]
        lines.append(f"- Digits, ResNet-8, 6 epochs: accuracy {accuracy} with it alone, {base} without; {time}x of the time.")
    lines += effects(card.name)
    if lines:
        yield "## Cost and effect\n"
        yield "\n".join(lines) + "\n"
        if card.name in {*alone(), *METHODS.values()}:
            yield "One seed each, so small differences of quality mean nothing. See [figures](../figures.md).\n"


def held(card: Card) -> Iterator[str]:
    """Yield the facts that tests compare."""
    rows = rows_of(card.name) if card.value is not None else []
    if not rows:
        return
    points = sum(len(row.points()) for row in rows if row.points is not None)
    ranks = "each rank draws its own numbers" if all(row.per_rank for row in rows) else "two ranks with FSDP2 equal one rank"
    yield f"*Tested:* {points} values known by hand; {ranks}; a resumed run is equal bit for bit.\n"


def sources(card: Card) -> Iterator[str]:
    if card.value is not None:
        yield f"*Formula:* {prose(section(card.value, 'Formula'))}\n"
        yield f"*Source:* {prose(section(card.value, 'Source'))}\n"


def page(card: Card) -> str:
    """Return a whole card."""
    parts = [f"# {title(card)}\n", f"{summary(card)}\n", *picture(card), *usage(card), *by_hand(card), *values(card)]
    parts += [*cost_and_effect(card)]
    if card.value is not None:
        parts += [
            "## Formula, tests, source\n" if rows_of(card.name) else "## Formula and source\n",
            *sources(card),
            *held(card),
        ]
    return "\n".join(parts)


# The index.

INTRO = """# Recipes

A recipe is a method that changes a training run: a `Transform` of the step, an edit of the model, an optimizer or a schedule.

```python
import torch

import dtrain as dt

loss_fn = dt.mean_loss(lambda model, x: model(x).square().mean(), weight=len)
transforms = [dt.transforms.clip_by_norm(1.0), dt.transforms.ema(half_life="100ba")]
step = dt.compose_step(loss_fn, transforms)
model = torch.nn.Linear(4, 1)
state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1))
state, metrics = step(state, torch.randn(8, 4))
```

Each recipe has one page: usage, suggested values with their source, when not to use the recipe, cost and effect. For example,
[mixup](mixup.md) shows mixed images and names `alpha` for ImageNet and for CIFAR-10. Each example runs in an empty
interpreter. Composer's names are in [a table](../composer.md).

*Tests* compare each method with values worked out by hand, a run on two ranks with FSDP2 with a run on one rank (relative
{tolerance:.0e} in float64), and a resumed run with an uninterrupted run.

*Cost* is the processor time with a recipe against the time without. For a surgery, the cost is that of a step
(`python benchmarks/algorithms.py`). For a transform, the cost is that of a run on digits (`python benchmarks/ablation.py`;
empty: not measured), and the card also has the time of a step against the same method in a loop written by hand. For example,
`sam` takes {run} times the time of a run, and {more:.0f} % more time than a loop with SAM written by hand.
"""


def index() -> str:
    """Return the page that lists all cards."""
    steps, run = costs()["costs"]["sam"]["ratio"], alone()["sam"][1]
    parts = [INTRO.format(tolerance=1e-12, run=run, more=100 * (steps - 1))]
    for room, heading in ROOMS.items():
        members = [card for card in cards().values() if card.room == room]
        if not members:
            continue
        heads = ["recipe", "effect", *(["cost"] if any(price(card) for card in members) else [])]
        head = f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|"
        rows = []
        for card in members:
            cells = [f"[{title(card)}]({card.name}.md)", short(summary(card)), price(card)]
            rows.append(f"| {' | '.join(cells[: len(heads)])} |")
        parts.append("\n".join([f"## {heading}\n", head, *rows, ""]))
    return "\n".join(parts)


def price(card: Card) -> str:
    """Return the time with a method against the time without, as a cell of a table; empty if no run measured the method."""
    if card.kind == "transforms":
        return f"{alone()[card.name][1]}x" if card.name in alone() else ""
    return cost(card)


def short(text: str) -> str:
    """Return the first clause of a summary, without ``Return`` before a schedule."""
    first = re.split(r"(?<=[a-z0-9`)])(?:[.;:] |\.$)", text)[0]
    first = re.sub(r"^Return (?=[a-z`])", "", first)
    return first[0].upper() + first[1:]


def files() -> Iterator[tuple[Path, str]]:
    """Yield each page and its text."""
    yield FOLDER / "index.md", index()
    for card in cards().values():
        yield FOLDER / f"{card.name}.md", page(card)
