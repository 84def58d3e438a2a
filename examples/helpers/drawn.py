"""Write generated pictures to a file, and measure their similarity to training pictures."""

import struct
import zlib
from pathlib import Path

import torch
from tensordict import TensorDict
from torch import Tensor


def write_grid(file: Path, pictures: Tensor, *, columns: int, like: Tensor, zoom: int = 2) -> None:
    """Write a PNG of pictures [n, 1 or 3, side, side], ``columns`` per row. The range of ``like`` becomes black to white."""
    low, high = like.amin((0, 2, 3)), like.amax((0, 2, 3))
    shown = (pictures - low.view(-1, 1, 1)) / (high - low).view(-1, 1, 1)
    shown = torch.nn.functional.pad((shown.clamp(0, 1) * 255).round().byte(), (1, 1, 1, 1))  # a black frame
    count, channels, side, _ = shown.shape
    shown = shown[: count - count % columns].view(-1, columns, channels, side, side).permute(0, 3, 1, 4, 2)
    rows = shown.reshape(-1, columns * side, channels).repeat_interleave(zoom, 0).repeat_interleave(zoom, 1).contiguous()
    lines = b"".join(b"\0" + bytes(row.flatten().tolist()) for row in rows)  # 0: filter type None

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", rows.shape[1], rows.shape[0], 8, 2 if channels == 3 else 0, 0, 0, 0)
    png = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(lines, 9)) + chunk(b"IEND", b"")
    file.write_bytes(png)


def likeness(pictures: Tensor, label: Tensor, train: TensorDict) -> tuple[float, float]:
    """Return the share of pictures whose nearest neighbour in ``train`` has their class, and the distance: RMS over all pixels.

    The pictures of a model that only memorized have a distance far below that of held-out pictures.
    """
    exact = "donot_use_mm_for_euclid_dist"
    nearest = torch.cdist(pictures.flatten(1), train["x"].flatten(1), compute_mode=exact).min(1)
    right = (train["y"][nearest.indices] == label).float().mean()
    return float(right), float(nearest.values.mean() / pictures[0].numel() ** 0.5)
