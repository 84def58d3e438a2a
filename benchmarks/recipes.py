"""Measure the value of each method of each example: whole runs with and without it, their quality and time, as tables.

    python benchmarks/recipes.py                                  # everything: about an hour on two free cores
    python benchmarks/recipes.py --only pretrain_bert --until 1ep # one recipe, shorter runs, one each
    python benchmarks/recipes.py --out benchmarks/results/recipes.json

Each row is an example as a user runs it (``dtrain launch -n 2``, its own data, one seed), with all of its methods or without
one. Runs of a shorter length are whole, too, with a schedule of that length: their results show how long a run has to
be for the quality that the shorter run with all methods reaches. Times are processor seconds of all processes, which hardly
move on a busy machine, with the start of Python in them; wall seconds stand beside them.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from measure import child_cpu, machine

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from example_runs import ended, launched


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """An example, its methods, and two lengths: the length that sets the quality to reach, and the example's own default.

    Args:
        what: begin of the line with the quality; "" takes the last line.
    """

    script: str
    methods: tuple[str, ...]
    lengths: tuple[str, str]
    higher_is_better: bool = False
    what: str = ""


RECIPES = {
    "finetune_bert": Recipe(
        script="finetune_bert.py", methods=("recompute", "warmup", "clip"), lengths=("2ep", "3ep"), higher_is_better=True
    ),
    "pretrain_bert": Recipe(
        script="pretrain_bert.py",
        methods=("alibi", "glu", "low_precision_norm", "length_warmup", "packing"),
        lengths=("2ep", "3ep"),
    ),
    "train_resnet": Recipe(
        script="train_resnet.py",
        methods=("blur_pool", "channels_last", "progressive_resizing", "mixup", "label_smoothing", "ema"),
        lengths=("6ep", "12ep"),
        higher_is_better=True,
    ),
    "train_diffusion": Recipe(
        script="train_diffusion.py",
        methods=("latents", "low_precision_norm", "guidance", "ema"),
        lengths=("25ep", "50ep"),
        what="held-out loss",
    ),
    "train_embeddings": Recipe(
        script="train_embeddings.py", methods=("gather", "cache"), lengths=("4ep", "10ep"), higher_is_better=True
    ),
    "train_dpo": Recipe(
        script="train_dpo.py", methods=("reference", "warmup", "clip"), lengths=("50ba", "100ba"), higher_is_better=True
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run: the method left out ("" for none), its length, and its result."""

    without: str
    length: str
    value: float
    baseline: float
    cpu_s: float
    wall_s: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=RECIPES, default=list(RECIPES), help="recipes (all)")
    parser.add_argument("--until", metavar="LENGTH", help="runs of this length alone, as 1ep: no time to a quality")
    parser.add_argument("--out", type=Path, help="also as JSON; recipes that are there and are not run again are kept")
    args = parser.parse_args()
    print(machine())
    kept = json.loads(args.out.read_text())["recipes"] if args.out and args.out.exists() else {}
    for name in args.only:
        recipe = RECIPES[name]
        runs = measured(recipe, (args.until,) if args.until else recipe.lengths)
        print(table(name, recipe, runs), flush=True)
        kept[name] = [asdict(run) for run in runs]
        if args.out:
            args.out.write_text(json.dumps({"machine": machine(), "recipes": kept}, indent=1) + "\n")


def measured(recipe: Recipe, lengths: Sequence[str]) -> list[Run]:
    """Run all runs of a recipe in turn."""
    return [one(recipe, without, length) for without in ("", *recipe.methods) for length in lengths]


def one(recipe: Recipe, without: str, length: str) -> Run:
    with tempfile.TemporaryDirectory() as folder:
        cpu, wall = child_cpu(), time.perf_counter()
        options = ["--until", length, *(["--without", without] if without else [])]
        end = ended(launched(recipe.script, *options, out=Path(folder) / "out"), recipe.what)
        cpu, wall = child_cpu() - cpu, time.perf_counter() - wall
    return Run(without=without, length=length, value=end.value, baseline=end.baseline, cpu_s=cpu, wall_s=wall)


def table(name: str, recipe: Recipe, runs: Sequence[Run]) -> str:
    """The runs of the default length, and how long each variant takes for the quality of the shorter run with everything."""
    goal = next(run.value for run in runs if not run.without) if len({run.length for run in runs}) > 1 else None
    head = f"### {name}, {runs[-1].length}, baseline {runs[0].baseline:g}"
    reach = "" if goal is None else f" processor s to {goal:g} |"
    lines = [head, "", f"| | quality | processor s | wall s |{reach}", "|---|---|---|---|" + ("" if goal is None else "---|")]
    for without in ("", *recipe.methods):
        mine = [run for run in runs if run.without == without]
        cells = [f"without {without}" if without else "all methods", f"{mine[-1].value:g}"]
        cells += [f"{mine[-1].cpu_s:.0f}", f"{mine[-1].wall_s:.0f}"]
        cells += [] if goal is None else [time_to(goal, mine, higher_is_better=recipe.higher_is_better)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def time_to(goal: float, runs: Sequence[Run], *, higher_is_better: bool) -> str:
    """Processor seconds of the shortest run that reaches the goal; between two lengths, by the straight line between them."""
    sign = 1 if higher_is_better else -1
    short, long = runs[0], runs[-1]
    if sign * (short.value - goal) >= 0:
        return f"{short.cpu_s:.0f}" if short.value == goal else f"< {short.cpu_s:.0f}"
    if sign * (long.value - goal) < 0:
        return "not reached"
    share = (goal - short.value) / (long.value - short.value)
    return f"{short.cpu_s + share * (long.cpu_s - short.cpu_s):.0f}"


if __name__ == "__main__":
    main()
