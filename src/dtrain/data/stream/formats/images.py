"""Images in shards, by pillow, which is imported where it is used."""

from __future__ import annotations

import sys
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from dtrain.optional_dependencies import missing_extra_error
from dtrain.storage import exists, read_file, resolve_path

_MAX_FILE_BYTES = 2**32 - 1  # of a file; where samples lie in a shard is counted in four bytes


def _import_pillow() -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise missing_extra_error("images need the package pillow", "images") from None
    return Image


def check_pillow() -> None:
    """
    Raises:
        ConfigError: pillow is not installed.
    """
    _import_pillow()


def decode_image(view: memoryview) -> Any:
    """The image of a file's bytes, decoded: damage shows here, and not where the image is first used."""
    image = _import_pillow().open(BytesIO(view))
    image.load()
    return image


def decoded_bytes(view: memoryview) -> int:
    """The bytes that the image of a file's bytes has in memory, by its header."""
    image = _import_pillow().open(BytesIO(view))
    return _pixel_bytes(image.width, image.height, image.mode)


def decoded_raw_bytes(view: memoryview) -> int:
    """The same of what ``decode_raw`` takes."""
    width, height, length = np.frombuffer(view, "<u4", 3).tolist()
    return _pixel_bytes(width, height, str(view[12 : 12 + length], "ascii"))


def _pixel_bytes(width: int, height: int, mode: str) -> int:
    return width * height * (1 if mode in ("1", "L", "P") else 4)  # as Pillow keeps them


def decode_raw(view: memoryview) -> Any:
    """The image of width, height and length of the mode, in four bytes each, the mode, and the pixels."""
    width, height, length = np.frombuffer(view, "<u4", 3).tolist()
    return _import_pillow().frombytes(str(view[12 : 12 + length], "ascii"), (width, height), bytes(view[12 + length :]))


def encode_raw(image: Any) -> bytes:
    """What ``decode_raw`` takes."""
    mode = _require_image(image).mode.encode()
    head: bytes = np.array([*image.size, len(mode)], "<u4").tobytes() + mode
    return head + bytes(image.tobytes())


def encode_image(kind: str, image: Any) -> bytes:
    """The image as a file of this kind. Bytes are taken as such a file, and a JPEG out of a file stays what it is."""
    if isinstance(image, bytes):
        return image
    name = getattr(_require_image(image), "filename", "")
    if kind == "JPEG" and image.format == "JPEG" and name and exists(path := resolve_path(Path(name))):
        return read_file(path, limit=_MAX_FILE_BYTES)
    out = BytesIO()
    image.save(out, format=kind)
    return out.getvalue()


def infer_image_encoding(value: Any) -> str:
    """The MDS encoding that keeps an image as it is; empty for what is none."""
    if "PIL.Image" not in sys.modules or not isinstance(value, _import_pillow().Image):
        return ""
    return "jpeg" if value.format == "JPEG" else "png" if value.mode in ("1", "L", "LA", "I;16", "P", "RGB", "RGBA") else "pil"


def _require_image(value: Any) -> Any:
    if not isinstance(value, _import_pillow().Image):
        raise TypeError(f"image or bytes of one wanted, got {type(value).__name__}")
    return value
