"""Adapters for datasets with a state from other libraries: MosaicML's ``StreamingDataset`` and torchdata's nodes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from dtrain.data.position import Position
from dtrain.errors import ConfigError
from dtrain.typing import Plain


def is_mosaic(dataset: Any) -> bool:
    """Return True if ``dataset`` is a ``StreamingDataset`` of mosaicml-streaming. The check does not import ``streaming``."""
    return _is_instance_by_name(dataset, "streaming.", "StreamingDataset")


@dataclass(frozen=True, slots=True)
class StatefulAdapter:
    """State of a ``StreamingDataset``, which the dataset keeps in memory that its loader workers share.

    The dataset splits its samples over ranks and workers from environment variables. It resumes on any number of them.
    """

    dataset: Any

    def state_at(self, after: Position) -> Plain:
        """Return the dataset's state at ``after``, in the current epoch or at the start of the next epoch."""
        state = self.dataset.state_dict(after.samples, True)
        return cast("Plain", state if after.samples else {**state, "epoch": state["epoch"] + 1, "sample_in_epoch": 0})

    def load(self, state: Plain) -> None:
        """Load a state. Mutates: the dataset's shared memory, which the next iteration reads."""
        self.dataset.load_state_dict(state)
        # The dataset ignores the state of an epoch that it has begun already.
        self.dataset.next_epoch = cast("dict[str, Any]", state)["epoch"]


def adapt_mosaic(dataset: Any, *, global_batch_size: int, ranks: int) -> StatefulAdapter:
    """Return the adapter of ``dataset``, after a check of the dataset's batch size per rank.

    Raises:
        ConfigError: the batch size is not this rank's part of the global batch.
    """
    if dataset.batch_size is None or dataset.batch_size * ranks != global_batch_size:
        raise ConfigError(
            f"build_loader: the StreamingDataset must have batch_size={global_batch_size // ranks}, so that {ranks} ranks make "
            f"global_batch_size={global_batch_size}, got batch_size={dataset.batch_size}"
        )
    return StatefulAdapter(dataset)


def as_iterable(dataset: Any) -> Any:
    """Return ``dataset``, or a torchdata ``Loader`` of a torchdata node: an iterable with a state."""
    if not _is_instance_by_name(dataset, "torchdata.nodes.", "BaseNode"):
        return dataset
    # torchdata is imported only if the user has a torchdata node.
    from torchdata.nodes import Loader

    return cast("Callable[[Any], Any]", Loader)(dataset)


def drops_samples_on_resume(dataset: Any) -> bool:
    """Return True if a resume of ``dataset`` loses samples: Hugging Face's streams do not save their shuffle buffer.

    The check reads private attributes, since there is no public one. If it fails, ``datasets`` warns about the lost samples.
    """
    if not type(dataset).__module__.startswith("datasets."):
        return False
    parts, is_lossy = [getattr(dataset, "_ex_iterable", None)], False
    while parts and not is_lossy:
        part = parts.pop()
        is_lossy = type(part).__name__ == "BufferShuffledExamplesIterable" and getattr(part, "buffer_size", 2) > 1
        parts += [getattr(part, "ex_iterable", None)] if hasattr(part, "ex_iterable") else getattr(part, "ex_iterables", [])
    return is_lossy


def restarts_each_iteration(dataset: Any) -> bool:
    """Return True if each iteration of ``dataset`` begins at its start or at a state just loaded, as torchdata's loaders do."""
    return _is_instance_by_name(dataset, "torchdata.nodes.", "Loader")


def _is_instance_by_name(dataset: Any, package: str, name: str) -> bool:
    return any(kind.__module__.startswith(package) and kind.__name__ == name for kind in type(dataset).__mro__)
