"""docs/seams.md: its pictures are those of the code, and every composition that it shows is drawn."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

import dtrain as dt
from pages import seams
from pages.fences import DOCS

PAGE = (DOCS / "seams.md").read_text()


@pytest.fixture(scope="module")
def drawn() -> dict[str, seams.Call]:
    return {name: make() for name, make in seams.PICTURES.items()}


@pytest.mark.parametrize("name", seams.PICTURES)
def test_generated_diagram_is_up_to_date(name, drawn):
    kept = (seams.IMAGES / f"{name}.svg").read_text()
    assert kept == seams.svg(drawn[name]), "run python tests/written.py"
    ElementTree.fromstring(kept)
    assert f"(images/{name}.svg)" in PAGE


def names(call: seams.Call) -> list:
    return [seams.title(call), [names(inner) for inner in call.inside]] if call.inside else seams.title(call)


def test_first_listed_transform_is_outermost(drawn):
    update = drawn["seams"].inside[1]
    assert names(update) == ["scale_lr: update", [["clip_by_norm: update", [["ema: update", ["apply_gradients"]]]]]]


def test_sam_computes_two_gradients_with_one_loss_per_microbatch(drawn):
    half = ["loss_scale: grad_step", [["microbatch_step", [["autocast: loss", ["loss_fn"]]] * 2]]]
    assert names(drawn["seams_all"].inside[0]) == ["sam: grad", [half, half]]


def test_skipping_transform_hides_inner_transforms(drawn):
    assert [names(drawn[name].inside[1]) for name in ("seams_skip_outside", "seams_skip_inside")] == [
        "nonfinite: update",
        ["ema: update", ["nonfinite: update"]],
    ]


def test_seam_table_matches_the_transform_fields():
    table = PAGE.split("## The seams")[1].split("\n\n")[1]
    named = set(re.findall(r"^\| `(\w+)` ", table, re.M))
    assert named == set(seams.SEAMS)
    assert named < set(dt.Transform.__dataclass_fields__)


def test_diagram_boxes_fit_inside_their_parent():
    inner = seams.Call(label="a label that is long", kind="core")
    outer = seams.Call(label="x", kind="grad", inside=[inner, inner])
    width, height = seams.size(inner)
    assert seams.size(outer) == (2 * width + seams.GAP + 2 * seams.PAD, height + seams.HEAD + seams.PAD)
