"""Verifying all of a checkpoint, and choosing the step that a path stands for."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from dtrain import pulse, storage
from dtrain.checkpoint import layout
from dtrain.checkpoint.digest import chunks_of
from dtrain.checkpoint.find import Committed, Damaged, describe, step_itself, survey
from dtrain.checkpoint.opened import Opened, open_checkpoint
from dtrain.checkpoint.plan import plan_reads, whole
from dtrain.errors import CheckpointError, DamagedCheckpointError
from dtrain.storage import Place


def verify_deeply(folder: Place) -> Opened:
    """Verify every byte of a step, and that each tensor is stored once and whole.

    Raises:
        DamagedCheckpointError: with the file and the reason.
    """
    opened = open_checkpoint(folder)
    verify_data(opened)
    return opened


def verify_data(opened: Opened, on_bytes: Callable[[int], object] = lambda _: None) -> None:
    """Verify the tensor data of a checkpoint that is open: every byte, and that each tensor is stored once and whole.

    Args:
        opened: the checkpoint.
        on_bytes: told how many bytes were read, chunk by chunk.

    Raises:
        DamagedCheckpointError: with the file and the reason.
    """
    for number, file in enumerate(opened.files):
        with opened.data(number) as reader:
            for chunk in chunks_of(0, file.bytes):
                reader.verify([chunk])
                pulse.beat("verify")  # one rank may verify older steps while the others wait for it
                on_bytes(min(layout.CHUNK_BYTES, file.bytes - chunk * layout.CHUNK_BYTES))
    plan_reads(opened.boxes, {key: whole(ref.shape) for key, ref in opened.refs.items()})


def verify_checkpoint(path: Place | str) -> Committed:
    """Read all of a checkpoint and return its description if every byte is as it was written.

    Args:
        path: the folder of a step, or a root, of which the newest step is verified.

    Raises:
        DamagedCheckpointError: with the file and the reason.
        CheckpointError: there is no checkpoint, or it cannot be read.
    """
    try:
        folder = choose(storage.place(path), "verify_checkpoint")
        if folder is None:
            raise CheckpointError(f"verify_checkpoint: there is no checkpoint in {path}")
        return _described_if_sound(folder)
    except OSError as error:
        raise CheckpointError(f"verify_checkpoint: {error}") from error


def _described_if_sound(folder: Place) -> Committed:
    try:
        verify_deeply(folder)
        return describe(folder)
    except CheckpointError as error:
        raise type(error)(f"verify_checkpoint: {folder}: {error}") from None


def choose(path: Place, where: str) -> Place | None:
    """The step that a path stands for: itself, or the newest of a root, None when the root holds none.

    A damaged manifest does not make its step older: it is chosen, for verification to refuse it.

    Raises:
        CheckpointError: a step's folder without a manifest.
    """
    step = step_itself(path, where)
    if step is not None:
        return step
    committed, damaged = survey(path)
    newest: Committed | Damaged | None = committed[-1] if committed else None
    if damaged and (newest is None or damaged[-1].step > newest.step):
        newest = damaged[-1]
    return newest.path if newest else None


def sound_steps_before(folder: Place) -> Iterable[Committed]:
    """The steps beside ``folder`` that were committed before it and pass deep verification, newest first."""
    committed, _ = survey(folder.parent)
    serials = [c.serial for c in committed if c.path == folder]
    step = layout.step_of(folder.name)
    for candidate in reversed(committed):
        # Of a step with a damaged manifest the serial is unknown: its number has to do.
        older = candidate.serial < serials[0] if serials else step is None or candidate.step < step
        if older and candidate.path != folder:
            try:
                verify_deeply(candidate.path)
            except DamagedCheckpointError:
                continue
            yield candidate
