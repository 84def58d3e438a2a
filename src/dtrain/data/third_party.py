"""Datasets of other libraries that keep a state of their own: MosaicML's ``StreamingDataset``, and torchdata's nodes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from dtrain.data.position import Position
from dtrain.errors import ConfigError
from dtrain.typing import Plain


def is_mosaic(dataset: Any) -> bool:
    """Whether ``dataset`` is a ``StreamingDataset`` of mosaicml-streaming, without importing that."""
    return _is_instance_by_name(dataset, "streaming.", "StreamingDataset")


@dataclass(frozen=True, slots=True)
class StatefulAdapter:
    """The state of a ``StreamingDataset``, which it keeps in memory that its loader workers share.

    It splits its samples over ranks and workers itself, from the environment, and resumes on another number of them.
    """

    dataset: Any

    def state_at(self, after: Position) -> Plain:
        """What it needs to go on from ``after``, in the epoch that it is in or at the start of the next one."""
        state = self.dataset.state_dict(after.samples, True)
        return cast("Plain", state if after.samples else {**state, "epoch": state["epoch"] + 1, "sample_in_epoch": 0})

    def load(self, state: Plain) -> None:
        """Mutates: the dataset's shared memory, which the next iteration looks at."""
        self.dataset.load_state_dict(state)
        self.dataset.next_epoch = cast("dict[str, Any]", state)["epoch"]  # it takes a state of an epoch it has begun for stale


def adapt_mosaic(dataset: Any, *, global_batch_size: int, ranks: int) -> StatefulAdapter:
    """The state of ``dataset``, after a look at its batch size, by which it deals samples to ranks.

    Raises:
        ConfigError: it is not this rank's part of the global batch.
    """
    if dataset.batch_size is None or dataset.batch_size * ranks != global_batch_size:
        raise ConfigError(
            f"build_loader: the StreamingDataset has batch_size={dataset.batch_size} per rank, which is not "
            f"global_batch_size={global_batch_size} over {ranks} ranks; give it batch_size={global_batch_size // ranks}"
        )
    return StatefulAdapter(dataset)


def as_iterable(dataset: Any) -> Any:
    """``dataset``, or what torchdata makes of one of its nodes: something to iterate more than once, with a state."""
    if not _is_instance_by_name(dataset, "torchdata.nodes.", "BaseNode"):
        return dataset
    from torchdata.nodes import Loader  # only where somebody uses it

    return cast("Callable[[Any], Any]", Loader)(dataset)


def drops_samples_on_resume(dataset: Any) -> bool:
    """Whether the state of ``dataset`` lacks samples: Hugging Face's streams leave out what lies in a shuffle buffer.

    There is no public way to ask. Where it is not found out, a resume loses a buffer of samples, and ``datasets`` says so.
    """
    if not type(dataset).__module__.startswith("datasets."):
        return False
    parts, found = [getattr(dataset, "_ex_iterable", None)], False
    while parts and not found:
        part = parts.pop()
        found = type(part).__name__ == "BufferShuffledExamplesIterable" and getattr(part, "buffer_size", 2) > 1
        parts += [getattr(part, "ex_iterable", None)] if hasattr(part, "ex_iterable") else getattr(part, "ex_iterables", [])
    return found


def restarts_each_iteration(dataset: Any) -> bool:
    """Whether every iteration of ``dataset`` begins at its start or at a state that was just loaded, as torchdata's do."""
    return _is_instance_by_name(dataset, "torchdata.nodes.", "Loader")


def _is_instance_by_name(dataset: Any, package: str, name: str) -> bool:
    return any(kind.__module__.startswith(package) and kind.__name__ == name for kind in type(dataset).__mro__)
