"""Named tensors in files, whoever wrote them: what they are, where they lie, and how to read them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dtrain.checkpoint import plain
from dtrain.checkpoint.fill import OpenFile
from dtrain.checkpoint.find import read_manifest_bytes
from dtrain.checkpoint.opened import open_checkpoint, with_buffers_of
from dtrain.checkpoint.plain import TensorRef
from dtrain.checkpoint.plan import StoredBox
from dtrain.storage import Place

_SECTIONS = ("params", "buffers")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Stored:
    """Tensors by name, and the files that hold them.

    Args:
        identity: a digest that is equal for equal files; ranks compare it.
        refs: dtype and shape by name.
        boxes: by name, the parts that each tensor is stored in; none for an empty one.
        open_file: opens a file by its number.
    """

    identity: str
    refs: Mapping[str, TensorRef]
    boxes: Mapping[str, Sequence[StoredBox]]
    open_file: OpenFile


def in_checkpoint(folder: Place, rank: int, *, state: str | None = None) -> Stored:
    """The parameters and buffers of a step of ours, by their names in the model.

    Args:
        folder: of the step.
        rank: whose buffers to take where each rank saved its own: those of ``rank % saved world size``.
        state: which one, of a step that holds several.

    Raises:
        CheckpointMismatchError: it holds no state of this name.
        DamagedCheckpointError: it fails verification.
    """
    opened = open_checkpoint(folder)
    opened = opened if state is None else opened.of_state(state)
    opened = with_buffers_of(opened, rank % opened.world_size)
    keys = {plain.unescaped(key.split("/")[1]): key for key in opened.refs if key.split("/")[0] in _SECTIONS}
    return Stored(
        identity=hashlib.sha256(read_manifest_bytes(folder)).hexdigest(),
        refs={name: opened.refs[key] for name, key in keys.items()},
        boxes={name: [_named(box, name) for box in opened.boxes.get(key, ())] for name, key in keys.items()},
        open_file=opened.data,
    )


def _named(box: StoredBox, name: str) -> StoredBox:
    return box._replace(entry=box.entry._replace(key=name))
