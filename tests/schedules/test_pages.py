"""The pages on schedules: their code runs, and every name that they give for one of Composer's is there."""

import importlib
import re
from pathlib import Path

import pytest

import dtrain as dt
import public

DOCS = Path(dt.__file__).parents[2] / "docs"
BLOCKS = re.findall(r"```python\n(.*?)```", (DOCS / "schedules.md").read_text(), re.S)
TABLES = re.findall(r"^\| `(\w+)`(.*)\|$", (DOCS / "composer.md").read_text(), re.M)

SCHEDULERS = """
ConstantScheduler ConstantWithWarmupScheduler LinearScheduler LinearWithWarmupScheduler PolynomialScheduler
PolynomialWithWarmupScheduler CosineAnnealingScheduler CosineAnnealingWithWarmupScheduler CosineAnnealingWarmRestartsScheduler
ExponentialScheduler StepScheduler MultiStepScheduler MultiStepWithWarmupScheduler ComposerScheduler compile_composer_scheduler
"""
OPTIMIZERS = "DecoupledSGDW DecoupledAdamW"
ALGORITHMS = """
Alibi AugMix BlurPool ChannelsLast ColOut CutMix CutOut EMA Factorize FusedLayerNorm GatedLinearUnits GhostBatchNorm
GradientClipping GyroDropout LabelSmoothing LayerFreezing LowPrecisionGroupNorm LowPrecisionLayerNorm MixUp NoOpModel
ProgressiveResizing RandAugment SAM SelectiveBackprop SeqLengthWarmup SqueezeExcite StochasticDepth SWA WeightStandardization
"""
DOES_NOT_APPLY = {"NoOpModel"}


def here(name: str) -> bool:
    """Return True for a public name, and for a dotted path that can be imported."""
    module, _, last = name.rpartition(".")
    return public.is_public(name) or (module.startswith("dtrain.") and hasattr(importlib.import_module(module), last))


def test_page_code_runs():
    scope = {"dt": dt}
    for block in BLOCKS:
        exec(block.replace("import dtrain as dt\n", ""), scope)
    assert len(BLOCKS) >= 8
    assert [round(scope["transformer"](t), 3) for t in (1_000, 4_000, 16_000)] == [0.25, 1.0, 0.5]


def test_page_shows_correct_values():
    shown = re.search(r"^(\[.*\])\s+# (\[.*\])$", BLOCKS[0], re.M)
    scope = {}
    exec(BLOCKS[0], scope)
    assert str(eval(shown[1], scope)) == shown[2]


def test_every_composer_name_is_in_a_table():
    assert set(f"{SCHEDULERS} {OPTIMIZERS} {ALGORITHMS}".split()) <= {name for name, _ in TABLES}


@pytest.mark.parametrize(("name", "cells"), TABLES, ids=[f"{name}{cells.split('|')[0]}" for name, cells in TABLES])
def test_table_maps_each_composer_name_to_existing_functions(name, cells):
    ours, rest = cells.split("|")[1:3]
    names = re.findall(r"`([\w.]+)`", f"{ours} {rest}")
    assert [function for function in names if not here(function)] == []
    assert ours.strip() == "-" if name in DOES_NOT_APPLY else names
    assert ours.strip() != "-" or rest.strip()


def test_every_composer_schedule_of_dtrain_is_in_the_table():
    given = " ".join(cells for _, cells in TABLES)
    names = public.names("dtrain.schedules.composer")
    assert [name for name in names if f"`schedules.composer.{name}`" not in given] == []
