"""docs/scale.md: its plots are drawn of its own tables."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from pages import scale_plots
from pages.fences import DOCS

PAGE = (DOCS / "scale.md").read_text()
PLOTS = dict(scale_plots.files())


@pytest.mark.parametrize("path", PLOTS, ids=lambda path: path.stem)
def test_plot_is_up_to_date_and_on_the_page(path):
    assert path.read_text() == PLOTS[path], "run python tests/written.py"
    ElementTree.fromstring(PLOTS[path])
    assert f"(images/scale/{path.name})" in PAGE


def test_a_changed_figure_changes_the_plot():
    changed = PAGE.replace("| 4,096 | 0.78 ms |", "| 4,096 | 7.80 ms |")
    assert changed != PAGE
    drawn, drawn_again = (dict(scale_plots.plots(text))["record"] for text in (PAGE, changed))
    assert drawn.lines["simulated, 25 us between nodes"][-1] == (4096.0, 0.78)
    assert drawn_again.lines["simulated, 25 us between nodes"][-1] == (4096.0, 7.8)
