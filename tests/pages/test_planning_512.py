"""docs/planning.md, 512 GPUs: the figures that it shows are those that its commands print."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

import dtrain as dt
from dtrain.planning.workload import load_workload
from pages.fences import DOCS, ROOT, Fence, commands, fences

PAGE = DOCS / "planning.md"
SECTION = PAGE.read_text().split("## 512 GPUs\n")[1].split("\n## ")[0]
PATIENCE_S = 1200
TABLE, DETAIL = (fence for fence in fences(PAGE) if fence.language == "console" and "dim=5120" in fence.text)
GIB = 2**30


def printed(block: Fence) -> str:
    """Return the output of a block's command."""
    (words,) = commands(block)
    done = subprocess.run(
        [sys.executable, "-m", *words], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def shown(block: Fence) -> list[str]:
    return [line for line in block.text.splitlines()[1:] if line]


def planned(layers: int) -> dict[str, float]:
    """Return the details of the plan of a model of fewer layers: sizes, counts and peaks by line and column."""
    sizes = {"layers": layers, "heads": 40, "dim": 5120, "seq": 4096}
    with load_workload(str(ROOT / "examples" / "plan_gpt.py:workload"), sizes) as workload:
        plan = dt.planning.estimate_memory(
            workload, world_size=512, dp_replicate=64, strategy="hybrid_shard", checkpoint="nothing",
            precision=dt.Precision.preset("DEFAULT", "bf16"),
        )  # fmt: skip
    figures = {f"most {kind}": getattr(plan.max_by_part, kind) / GIB for kind in ("parameters", "gradients", "optimizer")}
    figures["update"] = plan.peaks["update"] / GIB
    for call in plan.traffic:
        name = f"{call.op} of {call.group_size}"
        figures |= {f"{name}, count": call.count, f"{name}, bytes": call.bytes / GIB, f"{name}, sent": call.bytes_sent / GIB}
    return figures


def test_one_layout_figures_match_the_sum_over_layers():
    """A layer adds the same each time, so two small plans give the large one; that it is printed so is a slow test."""
    one, two = planned(1), planned(2)
    layers = {name: one[name] + 39 * (two[name] - one[name]) for name in one}
    shown = {"update": numbers(DETAIL.text, r"update ([\d.]+) GiB")[0]}
    for kind, most in re.findall(r"(?m)^(parameters|gradients|optimizer) .* ([\d.]+) GiB$", DETAIL.text):
        shown[f"most {kind}"] = float(most)
    rows = re.findall(r"(?m)^(\w+) +(\d+) +(\d+) +([\d.]+) GiB +([\d.]+) GiB$", DETAIL.text)
    for op, ranks, *columns in rows:
        shown |= {f"{op} of {ranks}, {name}": float(x) for name, x in zip(("count", "bytes", "sent"), columns, strict=True)}
    assert len(shown) == 4 + 3 * 3
    assert {name: layers[name] for name in shown} == pytest.approx(shown, rel=1e-3)


@pytest.mark.slow
def test_one_layout_output_matches_the_plan_command():
    lines = [line.rstrip() for line in printed(DETAIL).splitlines() if line.strip()]
    assert lines == shown(DETAIL)


@pytest.mark.slow
def test_all_layouts_output_matches_the_plan_command():
    lines = [line.rstrip() for line in printed(TABLE).splitlines() if line.strip()]
    assert lines[: len(shown(TABLE))] == shown(TABLE)


def numbers(text: str, pattern: str) -> list[float]:
    return [float(number) for number in re.findall(pattern, text)]


def test_page_text_matches_the_tables():
    rows = {tuple(line.split()[:2]): line for line in shown(TABLE)[2:]}
    assert "244.1 GiB" in rows["replicate", "-"]
    assert "no" in rows["replicate", "nothing"].split()
    fits = {key: line.split()[2] for key, line in rows.items()}
    assert (fits["full_shard", "nothing"], fits["full_shard", "-"]) == ("18", "2")
    assert "26.43 GiB" in rows["full_shard", "-"]
    assert "2.657 GiB" in rows["full_shard", "nothing"]
    within = numbers(DETAIL.text, r"(?m)^(?:reduce_scatter|all_gather) .* ([\d.]+) GiB$")
    (between,) = numbers(DETAIL.text, r"(?m)^all_reduce .* ([\d.]+) GiB$")
    (all_of_it,) = numbers(rows["full_shard", "nothing"], r"([\d.]+) GiB$")
    assert f"{sum(within):.1f} GiB of it stay" in SECTION
    assert f"{between:.0f} GiB cross" in SECTION
    assert f"has {all_of_it:.1f} GiB" in SECTION
    (parameters,) = numbers(TABLE.text, r"workload: ([\d.]+) G parameters")
    whole = parameters * 1e9 * 12 / GIB  # parameters and two moments, in float32
    assert f"{whole:.0f} GiB, of which each rank writes {whole * 1024 / 512:.0f} MiB" in SECTION
