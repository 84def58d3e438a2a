"""No recipe is exported without its evidence and its entry in the docs."""

import pytest

from battery import pages
from old_torch import torch_before

NAMES = {name: value for members in pages.exported().values() for name, value in members}
ALGORITHMS = [name for name, value in NAMES.items() if pages.is_algorithm(value)]
SURGERIES = [name for name, value in NAMES.items() if value.__module__.startswith("dtrain.surgery.") and pages.rows_of(name)]


def test_every_listed_package_exports_names():
    assert all(pages.exported().values())
    assert len(ALGORITHMS) >= 25
    assert len(SURGERIES) >= 12


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("section", ["Formula", "Source", "Example"])
def test_every_recipe_docstring_has_the_required_section(section, name):
    assert pages.section(NAMES[name], section), f"{name} has no section {section}: in its docstring"


@pytest.mark.parametrize("name", NAMES)
def test_every_docstring_example_shows_its_output(name):
    lines = pages.section(NAMES[name], "Example").splitlines()
    assert any(line.startswith(">>>") for line in lines)
    assert any(line and not line.startswith((">>>", "...")) for line in lines), f"{name}: its example shows nothing"


@pytest.mark.parametrize("name", [*ALGORITHMS, *SURGERIES])
def test_every_algorithm_has_reference_numbers_a_row_and_a_cost(name):
    rows = pages.rows_of(name)
    assert any(row.points for row in rows), f"{name}: no row with numbers that are known by hand"
    assert rows, f"{name}: no row, so it is run neither on two ranks nor resumed"
    assert name in pages.costs()["costs"], f"{name}: no figure of its cost; run benchmarks/algorithms.py --out"


def test_long_signature_is_wrapped_and_keeps_its_quotes():
    def short(a: int, *rest: str, b: float = 0.5) -> None: ...

    assert pages.signature("short", short) == "short(a: int, *rest: str, b: float = 0.5) -> None"
    assert pages.signature("wsd", NAMES["warmup_stable_decay"]).splitlines() == [
        "wsd(",
        "    peak: float,",
        "    *,",
        "    warmup: float,",
        "    decay_start: float | None = None,",
        "    decay: float = 0,",
        "    end: float = 0.0,",
        "    shape: Literal['linear', 'cosine', '1-sqrt', 'exponential'] = 'linear',",
        ") -> Schedule",
    ]


def test_docstring_section_ends_before_the_next_paragraph():
    def described():
        """What it does.

        Formula: ``a``
        (and so on)

        A paragraph.

        Example:
            >>> 1
            1
        """

    assert pages.section(described, "Formula") == "``a``\n(and so on)"
    assert pages.section(described, "Example") == ">>> 1\n1"


@pytest.mark.skipif(torch_before("2.13"), reason="the page shows signatures of torch's norms: an older GroupNorm has no bias=")
def test_generated_page_is_up_to_date():
    assert pages.PAGE.read_text() == pages.page(), "run python tests/written.py"
