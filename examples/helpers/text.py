"""Bytes to train on: files, cut into windows, with some of the windows held out.

Without a pattern the text is the source code of the running Python's standard library: it is on every machine that can
run the examples, so they need no download.
"""

import glob
import os
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from einops import rearrange
from torch import Tensor
from torch.utils.data import Dataset

Sample = dict[str, Tensor]

# Third-party packages may be installed below the standard library; they differ from machine to machine.
NOT_STDLIB = {"site-packages", "dist-packages", "__pycache__"}

# Held-out windows come in up to this many runs. More follow the text's mixture better; fewer, longer runs have fewer
# neighbours in the training part, which often continue the same function.
RUNS = 64


def stdlib_files() -> list[Path]:
    """Return every ``*.py`` of the running interpreter's standard library, sorted by its path below the library's root."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = []
    for folder, below, names in os.walk(root):
        below[:] = [name for name in below if name not in NOT_STDLIB]  # os.walk descends into the folders of this list
        paths += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted((path for path in paths if path.is_file()), key=lambda path: path.relative_to(root).as_posix())


def read_text(pattern: str | None = None) -> Tensor:
    """Return the bytes of all files that match ``pattern``, joined in sorted order: uint8 ``[bytes]``.

    Args:
        pattern: a glob in which ``**`` crosses folders; its files are taken in sorted order. None: ``stdlib_files()``.

    Raises:
        ValueError: no file matches, or all matching files are empty.
    """
    if pattern is None:
        paths = stdlib_files()
        source = f"*.py under {sysconfig.get_path('stdlib')}"
    else:
        paths = sorted(path for path in map(Path, glob.glob(pattern, recursive=True)) if path.is_file())
        source = repr(pattern)
    if not paths:
        raise ValueError(f"no file matches {source}; quote the pattern so that the shell leaves it alone")
    text = bytearray().join(path.read_bytes() for path in paths)
    if not text:
        raise ValueError(f"all {len(paths)} files that match {source} are empty")
    return torch.frombuffer(text, dtype=torch.uint8)


class ByteWindows(Dataset[Sample]):
    """Map-style dataset of windows: the first ``seq`` bytes of each are the input, the last ``seq`` are the labels.

    A sample is ``{"input_ids": int64 [seq], "labels": int64 [seq]}``, where ``labels[t]`` is the byte that follows
    ``input_ids[t]``.

    Args:
        windows: uint8 ``[count, seq + 1]``, kept and not copied; 8 times smaller than the int64 that the model takes.
    """

    def __init__(self, windows: Tensor) -> None:
        if windows.ndim != 2 or windows.shape[1] < 2 or windows.dtype != torch.uint8:
            raise ValueError(
                f"ByteWindows needs uint8 [count, seq + 1] with seq >= 1, got {windows.dtype} {list(windows.shape)}"
            )
        self.windows = windows

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> Sample:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Sample]:
        """Return the samples at ``indices``: views of one gathered tensor."""
        gathered = self.windows[torch.as_tensor(indices, dtype=torch.int64)].long()
        return [
            {"input_ids": inputs, "labels": labels} for inputs, labels in zip(gathered[:, :-1], gathered[:, 1:], strict=True)
        ]


def cut_windows(text: Tensor, seq: int) -> Tensor:
    """Cut the text (uint8 ``[bytes]``), in order, into rows of ``seq + 1`` bytes: uint8 ``[count, seq + 1]``, a view.

    No byte is in two rows: no row has a label of another row as input. The price is that a row's
    first byte is never predicted, one in ``seq + 1``. A remainder that does not fill a row is left out.
    """
    count = len(text) // (seq + 1)
    return rearrange(text[: count * (seq + 1)], "(window byte) -> window byte", byte=seq + 1)


def train_and_held_out(text: Tensor, seq: int, held_out_windows: int) -> tuple[ByteWindows, ByteWindows]:
    """Return windows to train on, and ``held_out_windows`` windows that share no byte with them, labels included.

    The held-out windows are runs of neighbours, spread evenly over the text, so that both parts are the same mixture.
    Depends on nothing but the arguments.

    Args:
        text: uint8 ``[bytes]``.
        seq: bytes in a sample's input.
        held_out_windows: at most half of all windows.

    Raises:
        ValueError: the text is too short, or a size is below 1.
    """
    if seq < 1 or held_out_windows < 1:
        raise ValueError(f"seq and held_out_windows must be at least 1, got {seq=}, {held_out_windows=}")
    windows = cut_windows(text, seq)
    total, runs = len(windows), min(RUNS, held_out_windows)
    if total < 2 * held_out_windows:
        raise ValueError(
            f"holding out {held_out_windows} windows of {seq} + 1 bytes needs a text of at least "
            f"{2 * held_out_windows * (seq + 1)} bytes, got {len(text)}; give more files or hold out fewer windows"
        )
    held_out = torch.zeros(total, dtype=torch.bool)
    for run in range(runs):
        # Stretch `run` of the text holds out its share of the windows, in its middle. The stretch is long enough: at
        # most half is held out and each run has a window, so the share rounded up fits in the stretch rounded down.
        first, last = run * total // runs, (run + 1) * total // runs
        size = (run + 1) * held_out_windows // runs - run * held_out_windows // runs
        start = (first + last - size) // 2
        held_out[start : start + size] = True
    return ByteWindows(windows[~held_out]), ByteWindows(windows[held_out])


def next_byte_batch(samples: Sequence[Mapping[str, Any]]) -> Sample:
    """Return windows that were read from shards as a batch like those of ``ByteWindows``: int64 ``[batch, seq]`` each.

    Args:
        samples: mappings with ``tokens``, numpy ``[seq + 1]``, as ``dtrain data write --tokenizer bytes --concat`` makes them.
    """
    windows = torch.from_numpy(np.stack([sample["tokens"] for sample in samples])).long()
    return {"input_ids": windows[:, :-1], "labels": windows[:, 1:]}


def unigram_entropy(data: Any) -> float:
    """Return the entropy of bytes in nats, ``-sum_b p_b ln p_b``: the lowest mean loss of a guess that ignores the context.

    Args:
        data: ``ByteWindows``, or a dataset of samples for ``next_byte_batch``, whose labels are counted; or uint8 of any shape,
            not empty.
    """
    if isinstance(data, ByteWindows):
        counted = data.windows[:, 1:]
    else:
        counted = data if isinstance(data, Tensor) else next_byte_batch([data[i] for i in range(len(data))])["labels"]
    share = torch.bincount(counted.flatten(), minlength=256).double() / counted.numel()
    return torch.special.entr(share).sum().item()  # entr(0) is 0
