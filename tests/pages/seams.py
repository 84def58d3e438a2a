"""The pictures of docs/seams.md, drawn of steps that are run by ``python tests/written.py``.

Each seam of each transform notes its entry and its exit while one step is made. So a picture shows the order and the
number of calls; nothing in it is drawn by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

import torch
from torch import nn

import dtrain as dt

IMAGES = Path(__file__).parents[2] / "docs" / "images"
SEAMS = ("loss", "grad_step", "grad", "update")


@dataclass(kw_only=True)
class Call:
    """One call and its inner calls in order. ``kind`` is a seam, ``step``, or ``core`` for the wrapped function."""

    label: str
    kind: str
    inside: list[Call] = field(default_factory=list)


class Recorder:
    """The calls of a step, nested as they happened."""

    def __init__(self) -> None:
        self.root = Call(label="step(state, batch)", kind="step")
        self._open = [self.root]

    @contextmanager
    def inside(self, label: str, kind: str) -> Iterator[None]:
        call = Call(label=label, kind=kind)
        self._open[-1].inside.append(call)
        self._open.append(call)
        yield
        self._open.pop()

    def noted(self, function: Callable[..., Any], label: str, kind: str) -> Callable[..., Any]:
        """``function``, which is noted when it is called."""

        def call(*given: Any, **options: Any) -> Any:
            with self.inside(label, kind):
                return function(*given, **options)

        return call

    def watched(self, transform: dt.Transform) -> dt.Transform:
        """``transform``, of which every seam is noted."""
        seams = {name: wrap for name in SEAMS if (wrap := getattr(transform, name)) is not None}
        return replace(transform, **{name: self._watched(wrap, f"{transform.name}", name) for name, wrap in seams.items()})

    def _watched(self, wrap: Callable[..., Any], name: str, seam: str) -> Callable[..., Any]:
        return lambda inner, *context: self.noted(wrap(inner, *context), name, seam)


def calls(transforms: Sequence[dt.Transform], *, microbatch_size: int | None = None, broken: bool = False) -> Call:
    """Record the calls of a step of a small model with ``transforms``, over 8 samples; ``broken`` samples are infinite."""
    recorder = Recorder()
    mean = nn.functional.cross_entropy
    loss = dt.mean_loss(lambda model, batch: mean(model(batch["x"]), batch["y"]), weight=lambda batch: len(batch["x"]))
    step = dt.compose_step(
        recorder.noted(loss, "loss_fn", "core"),
        [recorder.watched(transform) for transform in transforms],
        grad=recorder.noted(partial(dt.microbatch_step, microbatch_size=microbatch_size), "microbatch_step", "core"),
        update=recorder.noted(dt.apply_gradients, "apply_gradients", "core"),
    )
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1))
    before = state.step
    x = torch.full((8, 4), torch.inf) if broken else torch.randn(8, 4)
    state, _ = step(state, {"x": x, "y": torch.randint(3, (8,))})
    assert state.step == before + 1
    recorder.root.inside.append(Call(label="tick", kind="core"))
    return recorder.root


PICTURES: dict[str, Callable[[], Call]] = {
    "seams": lambda: calls(
        [
            dt.transforms.scale_lr(dt.schedules.cosine(1.0, 0.1, 100)),
            dt.transforms.clip_by_norm(1.0),
            dt.transforms.ema(0.999),
            dt.auto_microbatch(),
        ]
    ),
    "seams_all": lambda: calls(
        [
            dt.transforms.sam(0.05),
            dt.transforms.autocast("bf16"),
            dt.transforms.clip_by_norm(1.0),
            dt.transforms.loss_scale(initial_scale=8.0),
        ],
        microbatch_size=4,
    ),
    "seams_skip_outside": lambda: calls([dt.transforms.nonfinite("skip"), dt.transforms.ema(0.999)], broken=True),
    "seams_skip_inside": lambda: calls([dt.transforms.ema(0.999), dt.transforms.nonfinite("skip")], broken=True),
}

# The drawing.

PAD, HEAD, GAP, CHAR = 8, 22, 6, 7.3
STYLE = """
  .ground { fill: #ffffff; } text { font: 12px ui-monospace, Menlo, Consolas, monospace; fill: #1f2328; }
  rect { stroke-width: 1.2; } .step { fill: #f6f8fa; stroke: #8c959f; } .core { fill: #ffffff; stroke: #57606a; }
  .loss { fill: #fff3d6; stroke: #b7791f; } .grad_step { fill: #f3e8fd; stroke: #8250df; }
  .grad { fill: #ddf0ff; stroke: #0969da; } .update { fill: #ddf6e3; stroke: #1a7f37; }
  @media (prefers-color-scheme: dark) {
    .ground { fill: #0d1117; } text { fill: #e6edf3; } .step { fill: #161b22; stroke: #8b949e; }
    .core { fill: #0d1117; stroke: #9ea7b3; } .loss { fill: #3a2d10; stroke: #d4a72c; }
    .grad_step { fill: #2b1f45; stroke: #a371f7; }
    .grad { fill: #0f2d4d; stroke: #58a6ff; } .update { fill: #12351f; stroke: #3fb950; }
  }
"""


def size(call: Call) -> tuple[float, float]:
    """Width and height of the box of a call, with all that is in it."""
    inner = [size(inner_call) for inner_call in call.inside]
    label = len(title(call)) * CHAR + 2 * PAD
    width = max(label, sum(w for w, _ in inner) + GAP * (len(inner) - 1) + 2 * PAD if inner else 0)
    return width, HEAD + (max(h for _, h in inner) + PAD if inner else 4)


def title(call: Call) -> str:
    return f"{call.label}: {call.kind}" if call.kind in SEAMS else call.label


def boxes(call: Call, x: float, y: float) -> Iterator[str]:
    """The box of a call at a place, and those in it from left to right, in the order of time."""
    width, height = size(call)
    yield f'<rect class="{call.kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="5"/>'
    yield f'<text x="{x + PAD:.1f}" y="{y + 15:.1f}">{escape(title(call))}</text>'
    left = x + PAD
    for inner_call in call.inside:
        yield from boxes(inner_call, left, y + HEAD)
        left += size(inner_call)[0] + GAP


def svg(call: Call) -> str:
    """A picture of a step, for a light and for a dark screen."""
    width, height = (side + 2 * PAD for side in size(call))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" role="img">'
    ground = f'<rect class="ground" width="{width:.0f}" height="{height:.0f}" rx="8"/>'
    return "\n".join([head, f"<style>{STYLE}</style>", ground, *boxes(call, PAD, PAD), "</svg>", ""])
