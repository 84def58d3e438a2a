"""Verify a whole step: every byte, and that each tensor is stored completely and once. Memory does not grow with the step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from dtrain import storage
from dtrain.checkpoint import layout
from dtrain.checkpoint.checkpoint_info import CheckpointInfo, choose_step, notice_removal, read_info, scan_root
from dtrain.checkpoint.data_file import verify_file
from dtrain.checkpoint.index import StoredShard
from dtrain.checkpoint.layout import Manifest
from dtrain.checkpoint.reader import CheckpointReader, RankFilesReader, open_checkpoint, state_values
from dtrain.checkpoint.reshard import check_cover
from dtrain.errors import CheckpointError, CorruptCheckpointError
from dtrain.launch import heartbeats
from dtrain.storage import AnyPath


def verify_step(folder: AnyPath) -> CheckpointReader:
    """Verify every byte of a step, and that each tensor is stored completely and once.

    Raises:
        CorruptCheckpointError: names the file and the reason.
    """
    reader = open_checkpoint(folder)
    verify_data(reader)
    return reader


def verify_indexes(reader: CheckpointReader) -> None:
    """Verify the indexes of all ranks, one after the other, and that each tensor is stored completely and once.

    Raises:
        CorruptCheckpointError: names the file and the reason.
    """
    for _ in _iter_ranks(reader):
        pass


def _iter_ranks(reader: CheckpointReader) -> Iterator[RankFilesReader]:
    """Iterate over readers of one rank each, whose indexes are not kept. Checks first that all tensors are complete."""
    keys = dict(zip(reader.index.tensors, reader.refs, strict=True))
    for number, kind in enumerate(reader.index.kinds, 1):
        parts = kind.parts_in((0,) * len(kind.shape), kind.shape)
        check_cover(keys.get(number, f"kinds[{number - 1}]"), [StoredShard(rank, 0, part) for rank, part in parts], kind.shape)
    for rank in range(reader.world_size):
        ranks = RankFilesReader(reader.folder, reader.index)
        _check_values(ranks.placed(rank).values, reader.manifest, layout.index_name(rank))
        yield ranks


def _check_values(values: object, manifest: Manifest, location: str) -> None:
    """Check the sections of the values of a rank."""
    if not manifest.states:
        layout.read_object(values, f"{location}: values", ("buffers", "modules", "rng", layout.EXTRA, layout.OBJECTS))
    for name in manifest.states:
        state_values(values, name, location)


def verify_data(reader: CheckpointReader, on_bytes: Callable[[int], object] = lambda _: None) -> None:
    """Verify all data and indexes of an open checkpoint. Memory does not grow with the checkpoint.

    Args:
        reader: the checkpoint.
        on_bytes: called with the number of bytes after each part of the tensor data.

    Raises:
        CorruptCheckpointError: names the file and the reason.
    """

    def report(nbytes: int) -> None:
        # One rank may verify older steps while the other ranks wait.
        heartbeats.heartbeat("verify")
        on_bytes(nbytes)

    for rank, ranks in enumerate(_iter_ranks(reader)):
        for frozen in range(len(reader.index.files[rank].data_bytes)):
            with ranks.open_data(1 + 2 * rank + frozen) as opened:
                verify_file(opened, report)


def verify(path: AnyPath | str) -> CheckpointInfo:
    """Read a whole checkpoint, and return its description if every byte matches its digest.

        info = dt.checkpoint.verify("runs/gpt/ckpt")
        print(f"step {info.step}: {info.bytes} bytes verified")

    Args:
        path: folder of a step, or a root, whose newest step is verified.

    Raises:
        CorruptCheckpointError: names the file and the reason.
        CheckpointError: there is no checkpoint, the checkpoint cannot be read, or another process removed it meanwhile.
    """
    try:
        folder = choose_step(storage.resolve_path(path), "verify")
        if folder is None:
            raise CheckpointError(f"verify: no checkpoint found in {path}. Save one with save_sharded, or correct the path.")
        return _verify_and_describe(folder)
    except OSError as error:
        raise CheckpointError(f"verify: {error}") from error


def _verify_and_describe(folder: AnyPath) -> CheckpointInfo:
    try:
        with notice_removal(folder):
            verify_step(folder)
            return read_info(folder)
    except CheckpointError as error:
        raise type(error)(f"verify: {folder}: {error}") from None


def iter_sound_steps_before(folder: AnyPath) -> Iterable[CheckpointInfo]:
    """Iterate over the steps of the root that were committed before ``folder`` and pass verification, newest first."""
    committed = scan_root(folder.parent).committed
    serials = [c.serial for c in committed if c.path == folder]
    step = layout.step_of(folder.name)
    for candidate in reversed(committed):
        # The serial of a step with a corrupt manifest is unknown, so its step number is compared instead.
        older = candidate.serial < serials[0] if serials else step is None or candidate.step < step
        if older and candidate.path != folder:
            try:
                verify_step(candidate.path)
            except CorruptCheckpointError:
                continue
            yield candidate
