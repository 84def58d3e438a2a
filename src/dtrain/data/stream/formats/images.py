"""Images in shards, by pillow, which is imported where it is used."""

from __future__ import annotations

import sys
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from dtrain.extras import missing
from dtrain.storage import exists, place, read_file

_MOST_BYTES = 2**32 - 1  # of a file; where samples lie in a shard is counted in four bytes


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise missing("images need the package pillow", "images") from None
    return Image


def check_pillow() -> None:
    """
    Raises:
        ConfigError: pillow is not installed.
    """
    _pillow()


def opened(view: memoryview) -> Any:
    """The image of a file's bytes, decoded: damage shows here, and not where the image is first used."""
    image = _pillow().open(BytesIO(view))
    image.load()
    return image


def announced(view: memoryview) -> int:
    """The bytes that the image of a file's bytes has in memory, by its header."""
    image = _pillow().open(BytesIO(view))
    return _bytes_of(image.width, image.height, image.mode)


def announced_raw(view: memoryview) -> int:
    """The same of what ``from_raw`` takes."""
    width, height, length = np.frombuffer(view, "<u4", 3).tolist()
    return _bytes_of(width, height, str(view[12 : 12 + length], "ascii"))


def _bytes_of(width: int, height: int, mode: str) -> int:
    return width * height * (1 if mode in ("1", "L", "P") else 4)  # as Pillow keeps them


def from_raw(view: memoryview) -> Any:
    """The image of width, height and length of the mode, in four bytes each, the mode, and the pixels."""
    width, height, length = np.frombuffer(view, "<u4", 3).tolist()
    return _pillow().frombytes(str(view[12 : 12 + length], "ascii"), (width, height), bytes(view[12 + length :]))


def raw_bytes(image: Any) -> bytes:
    """What ``from_raw`` takes."""
    mode = _image(image).mode.encode()
    head: bytes = np.array([*image.size, len(mode)], "<u4").tobytes() + mode
    return head + bytes(image.tobytes())


def file_bytes(kind: str, image: Any) -> bytes:
    """The image as a file of this kind. Bytes are taken as such a file, and a JPEG out of a file stays what it is."""
    if isinstance(image, bytes):
        return image
    name = getattr(_image(image), "filename", "")
    if kind == "JPEG" and image.format == "JPEG" and name and exists(path := place(Path(name))):
        return read_file(path, limit=_MOST_BYTES)
    out = BytesIO()
    image.save(out, format=kind)
    return out.getvalue()


def encoding_for(value: Any) -> str:
    """The MDS encoding that keeps an image as it is; empty for what is none."""
    if "PIL.Image" not in sys.modules or not isinstance(value, _pillow().Image):
        return ""
    return "jpeg" if value.format == "JPEG" else "png" if value.mode in ("1", "L", "LA", "I;16", "P", "RGB", "RGBA") else "pil"


def _image(value: Any) -> Any:
    if not isinstance(value, _pillow().Image):
        raise TypeError(f"image or bytes of one wanted, got {type(value).__name__}")
    return value
