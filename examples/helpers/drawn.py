"""Write generated pictures to a file, and count those of the class that was asked for."""

import struct
import zlib
from pathlib import Path

import torch
from tensordict import TensorDict
from torch import Tensor


def write_grid(file: Path, pictures: Tensor, *, columns: int, like: Tensor, zoom: int = 2) -> None:
    """A PNG of pictures [n, 1 or 3, side, side], ``columns`` in a row; black and white: the ends of the range of ``like``."""
    low, high = like.amin((0, 2, 3)), like.amax((0, 2, 3))
    shown = (pictures - low.view(-1, 1, 1)) / (high - low).view(-1, 1, 1)
    shown = torch.nn.functional.pad((shown.clamp(0, 1) * 255).round().byte(), (1, 1, 1, 1))  # a black frame
    count, channels, side, _ = shown.shape
    shown = shown[: count - count % columns].view(-1, columns, channels, side, side).permute(0, 3, 1, 4, 2)
    rows = shown.reshape(-1, columns * side, channels).repeat_interleave(zoom, 0).repeat_interleave(zoom, 1).contiguous()
    lines = b"".join(b"\0" + bytes(row.flatten().tolist()) for row in rows)  # 0: the line is as it is, not a difference

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", rows.shape[1], rows.shape[0], 8, 2 if channels == 3 else 0, 0, 0, 0)
    made = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(lines, 9)) + chunk(b"IEND", b"")
    file.write_bytes(made)


def likeness(pictures: Tensor, label: Tensor, known: TensorDict) -> tuple[float, float]:
    """The share of pictures whose nearest in ``known`` has their class, and how far it is: a root mean square, over all pixels.

    A model that has only learnt by heart comes out with a distance far below that of real pictures that it has not seen.
    """
    exact = "donot_use_mm_for_euclid_dist"
    found = torch.cdist(pictures.flatten(1), known["x"].flatten(1), compute_mode=exact).min(1)
    right = (known["y"][found.indices] == label).float().mean()
    return float(right), float(found.values.mean() / pictures[0].numel() ** 0.5)
