"""How causes of time look: the same colour and pattern everywhere, told apart without seeing colours."""

from __future__ import annotations

from collections.abc import Mapping

from dtrain.report.page.charts import Cause

# Colours of Okabe and Ito (2008), made lighter or darker where a theme asks for contrast, and greys for what is neither
# training nor a reason to worry.
CAUSES: tuple[Cause, ...] = (
    Cause(name="compute", label="compute", light="#0072b2", dark="#3d9fdc"),
    Cause(name="communication", label="communication", light="#56b4e9", dark="#8fd0f5", pattern="M2 2h2v2h-2z", hatch="..."),
    Cause(name="data", label="waiting for data", light="#e69f00", dark="#e69f00",
          pattern="M-2 10L10 -2M-2 2L2 -2M6 10L10 6", hatch="///"),
    Cause(name="stall", label="stall", light="#4d5560", dark="#aab2bd",
          pattern="M-2 -2L10 10M6 -2L10 2M-2 6L2 10", hatch="\\\\\\"),
    Cause(name="checkpoint", label="checkpoint", light="#009e73", dark="#2bc69a", pattern="M2 0V8M6 0V8", hatch="|||"),
    Cause(name="evaluation", label="evaluation", light="#cc79a7", dark="#d98fba", pattern="M0 2H8M0 6H8", hatch="---"),
    Cause(name="compile", label="compile", light="#f0e442", dark="#f0e442", pattern="M0 4H8M4 0V8", hatch="+++"),
    Cause(name="restart", label="restart and lost work", light="#d55e00", dark="#f0793a",
          pattern="M-2 10L10 -2M-2 -2L10 10", hatch="xxx"),
    Cause(name="setup", label="set-up", light="#a7b4c2", dark="#74818f", pattern="M1 1h1v1h-1zM5 5h1v1h-1z", hatch=".."),
    Cause(name="other", label="other", light="#d9dde2", dark="#4a5159"),
)  # fmt: skip
"""In the order in which they are stacked, ``compute`` at the bottom."""

_NAMES = {cause.name for cause in CAUSES}


def known(seconds: Mapping[str, float]) -> dict[str, float]:
    """Seconds of the causes above, in their order and without zeros; what a newer version may call otherwise is ``other``."""
    found = {cause.name: max(0.0, seconds.get(cause.name, 0.0)) for cause in CAUSES}
    found["other"] += sum(max(0.0, number) for name, number in seconds.items() if name not in _NAMES)
    return {name: number for name, number in found.items() if number > 0}


def patterns() -> str:
    """The fills of all causes, once for the page; colours come from its style sheet."""
    fills = []
    for cause in CAUSES:
        strokes = f'<path class="hatch" d="{cause.pattern}"/>' if cause.pattern else ""
        fills.append(
            f'<pattern id="fill-{cause.name}" width="8" height="8" patternUnits="userSpaceOnUse">'
            f'<rect width="8" height="8" class="fill-{cause.name}"/>{strokes}</pattern>'
        )
    return f'<svg class="patterns" aria-hidden="true" focusable="false"><defs>{"".join(fills)}</defs></svg>'


def colours() -> str:
    """Style rules that give each cause its colour, light and dark."""
    light = "".join(f".fill-{cause.name}{{fill:{cause.light}}}" for cause in CAUSES)
    dark = "".join(f".fill-{cause.name}{{fill:{cause.dark}}}" for cause in CAUSES)
    return f"{light}@media (prefers-color-scheme:dark){{{dark}}}@media print{{{light}}}"
