"""Write the config and the tokenizer of a model beside its steps, so that they travel with the checkpoint.

The files are in ``<root>/pretrained``, once for all steps. ``convert`` reads them from there.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dtrain import storage
from dtrain.checkpoint import layout
from dtrain.dist.collectives import raise_on_all_ranks
from dtrain.dist.init import get_dist_info
from dtrain.errors import ConfigError
from dtrain.storage import AnyPath

_CALLER = "save_pretrained_files"
_FOLDER = "pretrained"


def save_pretrained_files(root: AnyPath | str, *configs: Any) -> AnyPath:
    """Write configs and tokenizers into ``<root>/pretrained``, where ``dt.checkpoint.convert`` finds them.

    Args:
        root: folder or URL of the checkpoints, as for ``save_sharded``; created if missing.
        configs: objects with ``save_pretrained(folder)`` that write no weights: ``model.config``, ``model.generation_config``,
            a tokenizer, ``model.peft_config["default"]``.

    Returns:
        The folder, which ``AutoTokenizer.from_pretrained`` and ``AutoConfig.from_pretrained`` read if it is on this machine.

    Mutates: files. Rank 0 writes, and replaces files of the same names.
    Collective: one exchange of JSON on the control group; every rank must call it.

    Example:
        dt.checkpoint.save_pretrained_files("ckpt", model.config, tokenizer)
        # at the end of the run
        dt.checkpoint.convert("ckpt", "bert-hf", to="hf")

    Raises:
        ConfigError: an object without ``save_pretrained``, or a model, whose weights are in shards. All ranks raise.
        CheckpointError: a failed file operation.
        PeerError: another rank failed.
    """
    folder = storage.resolve_path(root) / _FOLDER
    with raise_on_all_ranks(_CALLER):
        savers = [_saver(config) for config in configs]
        if get_dist_info().rank == 0:
            with tempfile.TemporaryDirectory() as scratch:
                for save in savers:
                    save(scratch)
                files = {
                    path.relative_to(scratch).as_posix(): path.read_bytes()
                    for path in Path(scratch).rglob("*")
                    if path.is_file()
                }
            for name, content in files.items():
                storage.make_folders((folder / name).parent)
                storage.replace_file(folder / name, content)
    return folder


def _saver(config: Any) -> Callable[[str], object]:
    save: Callable[[str], object] | None = getattr(config, "save_pretrained", None)
    if save is None or hasattr(config, "parameters"):
        raise ConfigError(
            f"{_CALLER}: configs must be configs or tokenizers with save_pretrained, got {type(config).__name__}. "
            "Pass model.config and the tokenizer."
        )
    return save


def find_pretrained_files(source: AnyPath) -> AnyPath | None:
    """Return the folder of the files of a root, or of the root of a step; None if there is none."""
    folder = (source.parent if layout.step_of(source.name) is not None else source) / _FOLDER
    return folder if storage.is_folder(folder) else None
