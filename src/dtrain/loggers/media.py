"""Log pictures, texts and tables: ``log_images``, ``log_text``, ``log_table``, and ``media_files``, which writes them as files.

TensorBoard, W&B and MLflow have pictures and texts. Loggers of numbers (``jsonl``, ``console``) leave them out.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dtrain import storage
from dtrain.errors import ConfigError
from dtrain.loggers.logger import (
    FaultTolerantLogger,
    Logger,
    Ranks,
    encode_nonfinite,
    null_logger,
    rank_path,
    takes_media,
    to_plain_value,
)
from dtrain.run.run_files import MEDIA_SUFFIXES, media_name

_MAX_IMAGES = 64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Picture:
    """Pictures in one frame, uint8 ``[height, width, 3]``."""

    pixels: NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of a table as plain data, one list per row, in the order of ``columns``."""

    columns: list[str]
    rows: list[list[Any]]


def log_images(logger: Logger, step: int, images: Mapping[str, Any]) -> None:
    """Log pictures: one frame for each name, with at most 64 pictures side by side.

    Args:
        logger: logger or ``multi`` of loggers. Those of numbers leave the pictures out.
        step: step of the loop.
        images: by name, ``[n, channels, height, width]`` or ``[channels, height, width]`` with 1 or 3 channels: a tensor on any
            device, or an array. Floats are in ``[0, 1]`` and are clamped, whole numbers in ``[0, 255]``.

    Host sync: one for each tensor on a device.

    Example:
        log = dt.loggers.multi(dt.loggers.jsonl(run / "metrics.jsonl"), dt.loggers.media_files(run / "media"))
        dt.loggers.log_images(log, state.step, {"samples": sample(state.model, seed=0)})

    Raises:
        ConfigError: another shape, or a logger without a part that takes pictures.
    """
    _log("log_images", logger, step, images, _to_picture)


def log_text(logger: Logger, step: int, texts: Mapping[str, str]) -> None:
    """Log texts, such as samples of a language model.

    Args:
        logger: as in ``log_images``.
        step: step of the loop.
        texts: texts by name.

    Example:
        log = dt.loggers.multi(dt.loggers.console(), dt.loggers.media_files(run / "media"))
        dt.loggers.log_text(log, state.step, {"answer": tokenizer.decode(tokens)})

    Raises:
        ConfigError: a value that is not a text, or a logger without a part that takes texts.
    """
    _log("log_text", logger, step, texts, _to_text)


def log_table(logger: Logger, step: int, tables: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Log tables: one dict per row, such as prompt, answer and reward of a rollout.

    Args:
        logger: as in ``log_images``.
        step: step of the loop.
        tables: rows by name. The columns are the keys of all rows, in the order of their first use; a missing value is None.
            Values are as in ``jsonl``.

    Example:
        rows = [{"prompt": "2+3=", "answer": "5", "reward": 1.0}]
        dt.loggers.log_table(dt.loggers.media_files(run / "media"), state.step, {"rollouts": rows})

    Raises:
        ConfigError: rows that are not dicts, or a logger without a part that takes tables.
    """
    _log("log_table", logger, step, tables, _to_table)


def _log(caller: str, logger: Logger, step: int, values: Mapping[str, Any], convert: Callable[[str, str, Any], object]) -> None:
    if not isinstance(values, Mapping):
        raise ConfigError(f"{caller}: values must be in a dict by name, got {type(values).__name__}. Write {{'samples': ...}}.")
    media = {str(name): convert(caller, str(name), value) for name, value in values.items()}
    # The ranks that write nothing have the null logger.
    if logger is null_logger:
        return
    if not takes_media(logger):
        raise ConfigError(
            f"{caller}: logger must have a part that takes more than numbers, got {logger!r}. Add "
            "dt.loggers.media_files(run / 'media') by dt.loggers.multi."
        )
    logger.log_media(int(step), media)  # type: ignore[attr-defined]


def _to_text(caller: str, name: str, value: object) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{caller}: {name!r} must be a text, got {type(value).__name__}. Convert it with str().")
    return value


def _to_table(caller: str, name: str, value: Any) -> Table:
    if isinstance(value, str | Mapping) or not all(isinstance(row, Mapping) for row in value):
        raise ConfigError(f"{caller}: {name!r} must be a list of dicts, got {type(value).__name__}. Write [{{'answer': ...}}].")
    columns = list(dict.fromkeys(str(key) for row in value for key in row))
    rows = [{str(key): to_plain_value(cell) for key, cell in row.items()} for row in value]
    return Table(columns=columns, rows=[[row.get(column) for column in columns] for row in rows])


def _to_picture(caller: str, name: str, value: Any) -> Picture:
    array = value.detach().float().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
    is_float = value.is_floating_point() if isinstance(value, torch.Tensor) else array.dtype.kind == "f"
    if array.ndim == 3:
        array = array[None]
    if array.ndim != 4 or array.shape[1] not in (1, 3) or array.size == 0:
        raise ConfigError(
            f"{caller}: {name!r} must have the shape [n, channels, height, width] with 1 or 3 channels, got "
            f"{list(np.shape(array))}. Permute the axes."
        )
    scaled = np.nan_to_num(array) * 255.0 if is_float else array
    pixels = np.clip(np.rint(scaled), 0, 255).astype(np.uint8)[:_MAX_IMAGES]
    return Picture(pixels=_arrange(np.repeat(pixels, 3 // pixels.shape[1], axis=1).transpose(0, 2, 3, 1)))


def _arrange(pictures: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Arrange pictures ``[n, height, width, 3]`` in one frame that is about as wide as high."""
    count, height, width, channels = pictures.shape
    across = math.ceil(math.sqrt(count))
    down = -(-count // across)
    frame = np.zeros((down * across, height, width, channels), np.uint8)
    frame[:count] = pictures
    return frame.reshape(down, across, height, width, channels).swapaxes(1, 2).reshape(down * height, across * width, channels)


def encode_png(pixels: NDArray[np.uint8]) -> bytes:
    """Encode uint8 ``[height, width, 3]`` as a PNG file.

    Source: PNG specification, third edition, W3C 2025: color type 2, filter 0.
    """
    height, width, _ = pixels.shape

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    # Each line begins with the number of its filter.
    lines = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, width * 3)], axis=1)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = zlib.compress(lines.tobytes())
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def encode_table(table: Table) -> str:
    """Return a table as JSON, ``{"columns": [...], "data": [[...], ...]}``, for files and MLflow."""
    return json.dumps(encode_nonfinite({"columns": table.columns, "data": table.rows}), ensure_ascii=False)


def media_files(path: str | Path, *, ranks: Ranks = 0) -> Logger:
    """Write pictures, texts and tables as files below ``path``: ``samples/step-00000120.png``, ``.txt`` or ``.json``.

    Numbers are left out. In the folder of a run, ``run / "media"``, ``dtrain report`` shows the newest of each name. A resumed
    run overwrites the files of repeated steps. Other characters of a name than letters, digits and ``-_~`` are written as in
    an address (``val/samples`` as ``val%2Fsamples``).

    Args:
        path: folder, created if missing; ``{rank}`` and ``{time}`` as in ``jsonl``.
        ranks: 0, or "all" with ``{rank}`` in the path.

    Example:
        log = dt.loggers.multi(dt.loggers.jsonl(run / "metrics.jsonl"), dt.loggers.media_files(run / "media"))
        dt.loggers.log_text(log, state.step, {"answer": "4"})

    Raises:
        ConfigError: ``path`` is invalid (see ``jsonl``).
    """
    folder = rank_path(path, ranks, "media_files")
    return null_logger if folder is None else FaultTolerantLogger(_MediaFiles(folder), f"media_files {folder}")


class _MediaFiles:
    __slots__ = ("_folder",)
    takes_media = True

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, step: int, numbers: Mapping[str, Any], /) -> None:
        pass

    def log_media(self, step: int, media: Mapping[str, Any], /) -> None:
        for name, value in media.items():
            kind, data = "text", b""
            if isinstance(value, Picture):
                kind, data = "image", encode_png(value.pixels)
            elif isinstance(value, Table):
                kind, data = "table", encode_table(value).encode()
            else:
                data = value.encode(errors="replace")
            file = self._folder / media_name(name, step, MEDIA_SUFFIXES[kind])
            storage.make_folders(file.parent)
            storage.replace_file(file, data)
