"""Draw the pictures of docs/concepts.md: ``python website/concept_pictures.py``."""

from __future__ import annotations

from pathlib import Path

IMAGES = Path(__file__).parents[1] / "docs" / "images"
STYLE = """
  .ground { fill: #ffffff; } text { font: 13px system-ui, sans-serif; fill: #1f2328; } .small { font-size: 12px; }
  rect { stroke-width: 1.2; } .held { fill: #ddf0ff; stroke: #0969da; }
  .absent { fill: none; stroke: #8c959f; stroke-dasharray: 3 3; }
  .rank { fill: #f6f8fa; stroke: #8c959f; } line { stroke: #57606a; stroke-width: 1.4; }
  @media (prefers-color-scheme: dark) {
    .ground { fill: #0d1117; } text { fill: #e6edf3; } .held { fill: #0f2d4d; stroke: #58a6ff; } .absent { stroke: #8b949e; }
    .rank { fill: #161b22; stroke: #8b949e; } line { stroke: #9ea7b3; }
  }
"""
SHARDS = {"full_shard": (4, 4), "shard_grad_op": (4, 1), "hybrid_shard, 2 x 2": (2, 2), "replicate": (1, 1)}
"""By strategy, into how many shards four ranks cut a tensor: at rest, and between forward and backward."""


def box(x: float, y: float, width: float, height: float, kind: str) -> str:
    return f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3"/>'


def text(x: float, y: float, words: str, kind: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{words}</text>'


def svg(title: str, width: int, height: int, parts: list[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">'
    ground = f'<rect class="ground" width="{width}" height="{height}" rx="8"/>'
    return "\n".join([head, f"<title>{title}</title>", f"<style>{STYLE}</style>", ground, *parts, "</svg>", ""])


def strategies() -> str:
    """For each strategy and rank, the part of a block's parameters that the rank holds at rest and between passes."""
    parts = [text(190, 26, "at rest"), text(470, 26, "between forward and backward")]
    for row, (name, moments) in enumerate(SHARDS.items()):
        y = 42 + 44 * row
        parts.append(text(16, y + 20, name))
        for column, shards in enumerate(moments):
            for rank in range(4):
                x = 190 + 280 * column + 66 * rank
                held = rank % shards
                parts += [
                    box(x + 14 * part, y, 13, 28, "held" if shards == 1 or part // (4 // shards) == held else "absent")
                    for part in range(4)
                ]
    parts += [text(198 + 280 * column + 66 * rank, 232, f"rank {rank}", "small") for column in range(2) for rank in range(4)]
    return svg("The part of a block's parameters on each of four ranks, by strategy", 750, 246, parts)


def mesh() -> str:
    """Four ranks as two groups that shard a model, with a copy of the model in each group."""
    parts = []
    for row in range(2):
        for column in range(2):
            parts += [
                box(136 + 150 * column, 40 + 66 * row, 120, 44, "rank"),
                text(174 + 150 * column, 67 + 66 * row, f"rank {2 * row + column}"),
            ]
    parts += [text(216, 26, "dp_shard = 2"), text(14, 100, "dp_replicate = 2")]
    return svg("A mesh of two by two ranks", 436, 170, parts)


def resume() -> str:
    """The rows of a tensor that two ranks saved and three ranks load."""
    rows, left, cell = 12, 120, 36
    parts = [text(14, 48, "saved by 2"), text(14, 138, "loaded by 3")]
    for y, ranks, verb in ((28, 2, "wrote"), (118, 3, "reads")):
        for rank in range(ranks):
            width = rows // ranks * cell
            x = left + rank * width
            parts += [box(x, y, width - 4, 32, "held"), text(x + 10, y + 21, f"rank {rank} {verb}", "small")]
    for reader in range(3):
        for writer in range(2):
            low, high = max(4 * reader, 6 * writer), min(4 * reader + 4, 6 * writer + 6)
            if low < high:
                middle = left + (low + high) / 2 * cell
                parts += [f'<line x1="{middle:g}" y1="62" x2="{middle:g}" y2="116"/>']
                parts += [text(middle + 5, 93, f"{high - low} rows", "small")]
    return svg("Three ranks read the shards that two ranks wrote", left + rows * cell + 20, 170, parts)


PICTURES = {"concept_strategies": strategies, "concept_mesh": mesh, "concept_resume": resume}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (IMAGES / f"{name}.svg").write_text(draw())
