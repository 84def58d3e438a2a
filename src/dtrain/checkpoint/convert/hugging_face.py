"""Writes the folder that ``from_pretrained`` of Hugging Face's transformers reads.

::

    model.safetensors                      or, where that would be larger than asked for,
    model-00001-of-00002.safetensors ...   and
    model.safetensors.index.json           {"metadata": {"total_size": ...}, "weight_map": {"<tensor>": "<file>", ...}}
    config.json                            a copy of what was given

A tied weight is there once, as ``save_pretrained`` leaves it; transformers ties by its configuration.
"""

from __future__ import annotations

import json
from pathlib import Path

from dtrain import storage
from dtrain.checkpoint.convert.pieces import groups
from dtrain.checkpoint.convert.weights import Weights, write_safetensors
from dtrain.checkpoint.foreign import INDEX, MODEL

CONFIG = "config.json"


def write_hugging_face(folder: Path, given: Weights, *, max_shard_bytes: int, config: bytes | None) -> None:
    """Write the folder's files, on the disk when this returns.

    Args:
        folder: there, and empty.
        given: what is written.
        max_shard_bytes: of one file's tensors; a larger tensor has a file of its own.
        config: the content of ``config.json``, None for none.
    """
    files = list(groups(given.sizes, limit=max_shard_bytes))
    if len(files) == 1:
        write_safetensors(folder / MODEL, given, files[0])
    else:
        names = [f"model-{at:05d}-of-{len(files):05d}.safetensors" for at in range(1, len(files) + 1)]
        for name, of_file in zip(names, files, strict=True):
            write_safetensors(folder / name, given, of_file)
        weight_map = {key: name for name, of_file in zip(names, files, strict=True) for key in of_file}
        index = {"metadata": {"total_size": given.bytes}, "weight_map": weight_map}
        storage.write_file(folder / INDEX, json.dumps(index, indent=2).encode() + b"\n")
    if config is not None:
        storage.write_file(folder / CONFIG, config)
    storage.sync_folder(folder)
