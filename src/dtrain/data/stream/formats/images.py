"""Encode and decode images in shards with pillow, which is imported on first use."""

from __future__ import annotations

import sys
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from dtrain.packages import missing_extra_error
from dtrain.storage import exists, read_file, resolve_path

# Limit of an image file. Offsets in a shard have 4 bytes.
_MAX_FILE_BYTES = 2**32 - 1


def _import_pillow() -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise missing_extra_error("images need the package pillow", "images") from None
    return Image


def check_pillow() -> None:
    """Check that pillow is installed.

    Raises:
        ConfigError: pillow is not installed.
    """
    _import_pillow()


def decode_image(view: memoryview) -> Any:
    """Decode an image file completely, so that damage raises here and not on first use."""
    image = _import_pillow().open(BytesIO(view))
    image.load()
    return image


def decoded_bytes(view: memoryview) -> int:
    """Return the bytes that an image takes in memory, from the header of its file."""
    image = _import_pillow().open(BytesIO(view))
    return _pixel_bytes(image.width, image.height, image.mode)


def decoded_raw_bytes(view: memoryview) -> int:
    """Return the bytes that an image in the form of ``encode_raw`` takes in memory."""
    width, height, length = np.frombuffer(view, "<u4", 3).tolist()
    return _pixel_bytes(width, height, str(view[12 : 12 + length], "ascii"))


def _pixel_bytes(width: int, height: int, mode: str) -> int:
    # Pillow uses 1 or 4 bytes per pixel.
    return width * height * (1 if mode in ("1", "L", "P") else 4)


def decode_raw(view: memoryview) -> Any:
    """Decode an image in the form of ``encode_raw``."""
    width, height, length = np.frombuffer(view, "<u4", 3).tolist()
    return _import_pillow().frombytes(str(view[12 : 12 + length], "ascii"), (width, height), bytes(view[12 + length :]))


def encode_raw(image: Any) -> bytes:
    """Encode an image as width, height and length of the mode (4 bytes each), the mode, and the pixels."""
    mode = _require_image(image).mode.encode()
    head: bytes = np.array([*image.size, len(mode)], "<u4").tobytes() + mode
    return head + bytes(image.tobytes())


def encode_image(kind: str, image: Any) -> bytes:
    """Encode an image as a file of this kind. Bytes are returned unchanged, and a JPEG from a file is copied."""
    if isinstance(image, bytes):
        return image
    name = getattr(_require_image(image), "filename", "")
    if kind == "JPEG" and image.format == "JPEG" and name and exists(path := resolve_path(Path(name))):
        return read_file(path, limit=_MAX_FILE_BYTES)
    out = BytesIO()
    image.save(out, format=kind)
    return out.getvalue()


def infer_image_encoding(value: Any) -> str:
    """Return the MDS encoding that stores an image without loss; empty if the value is not an image."""
    if "PIL.Image" not in sys.modules or not isinstance(value, _import_pillow().Image):
        return ""
    return "jpeg" if value.format == "JPEG" else "png" if value.mode in ("1", "L", "LA", "I;16", "P", "RGB", "RGBA") else "pil"


def _require_image(value: Any) -> Any:
    if not isinstance(value, _import_pillow().Image):
        raise TypeError(f"must be an image or the bytes of an image, got {type(value).__name__}")
    return value
