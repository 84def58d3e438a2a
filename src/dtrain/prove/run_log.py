"""Write the facts of one rank to files: one JSON object per fact, and float64 numbers beside them (``RunLog``).

A tensor is recorded as a digest, which shows equality bit for bit, and as a *sketch* of at most 2,048 numbers. A small tensor
is its own sketch. The elements of a large tensor get random signs, which depend on the position alone, and are summed in 2,048
buckets. The sketch is linear, and the norm of the difference of two sketches estimates the norm of the difference of the
tensors, so a comparison needs no full tensors.

``script_variables`` finds what a script keeps besides model, optimizer and loader: averages, counters, generators. A checkpoint
that lacks such a value is found, because the value differs after a resume.

Source of the sketch: Charikar, Chen and Farach-Colton 2002, Finding frequent items in data streams.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from dtrain.data.batch import iter_named_tensors, list_tensors
from dtrain.dist.dtensor import full_tensor, to_local
from dtrain.prove.run_config import SKETCH_SIZE

DIGEST_BYTES = 8
# Elements of a part of a tensor, above which a run has only its sketch.
_MAX_PART_ELEMENTS = 1 << 20
# Padding of the usual collate functions. A sample has other numbers of them in another layout.
_PADDING = (0, -100, -1)


class RunLog:
    """Files of one rank: ``rank-0.jsonl`` with the facts in program order, ``rank-0.f64`` with the numbers of sketches.

    Args:
        folder: folder of the run.
        rank: rank whose facts are written.

    Attributes:
        whole: shapes of the tensors on one rank, by name, if the run has several ranks; None if it has one.
        step: number of the step in progress, from 0, which facts get.
        optimizer_index: number of the optimizer in progress, which facts get.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._facts: IO[str] = open(folder / f"rank-{rank}.jsonl", "w", buffering=1, encoding="utf-8")  # noqa: SIM115 - closed by the process
        self._numbers: IO[bytes] = open(folder / f"rank-{rank}.f64", "wb")  # noqa: SIM115
        self._offset = 0
        self.rank = rank
        self.whole: Mapping[str, Sequence[int]] | None = None
        self.step = self.optimizer_index = 0

    def close(self) -> None:
        """Close the files."""
        self._facts.close()
        self._numbers.close()

    def write(self, kind: str, **content: Any) -> None:
        """Write a fact of the step in progress."""
        self._facts.write(
            json.dumps({"kind": kind, "step": self.step, "optimizer_index": self.optimizer_index, **content}, default=str)
            + "\n"
        )

    def write_tensor(self, kind: str, name: str, tensor: Tensor, **content: Any) -> str:
        """Write a tensor: shape, dtype, norm, digest and sketch. Returns the digest; "" if another rank writes it.

        Only rank 0 writes a DTensor. A plain tensor that may be a part of one has all its numbers instead of a sketch.

        Collective: for a DTensor, the gather of the full tensor.
        """
        detached = tensor.detach()
        full = full_tensor(detached)
        if self.rank and full is not detached:
            return ""
        flat, place = flatten(full), None
        if not self.rank or self.whole is not None:
            whole = list((self.whole or {}).get(name, full.shape))
            is_part = whole != list(full.shape) and len(flat) <= _MAX_PART_ELEMENTS
            numbers = flat.numpy() if is_part else sketch(flat)
            self._numbers.write(numbers.tobytes())
            self._numbers.flush()
            place, self._offset = [self._offset, len(numbers)], self._offset + len(numbers)
        norm = float(torch.linalg.vector_norm(flat))
        if kind == "gradient" and full.ndim == 2:
            content["last_row"] = int(flat.view(full.shape).any(1).nonzero().max()) if norm else -1
        self.write(
            kind,
            name=name,
            shape=list(full.shape),
            dtype=str(tensor.dtype).removeprefix("torch."),
            norm=repr(norm),
            digest=(word := digest(flat)),
            sketch=place,
            **content,
        )
        return word

    def write_optimizer_state(self, optimizer: Any) -> None:
        """Write the number of tensors in the optimizer's state on this rank, and their norm."""
        # An optimizer that runs another one, as ``ZeroRedundancyOptimizer`` does, keeps no state of its own.
        inner = [value for value in vars(optimizer).values() if isinstance(value, torch.optim.Optimizer)]
        tensors = [
            value
            for owner in inner or [optimizer]
            for state in owner.state.values()
            if isinstance(state, Mapping)
            for value in state.values()
            if isinstance(value, Tensor) and value.numel() > 1
        ]
        flat = [flatten(to_local(value)) for value in tensors]
        norm = sum(float(values.square().sum()) for values in flat) ** 0.5
        self.write("optimizer_state", tensors=len(flat), norm=repr(norm))


def flatten(tensor: Tensor) -> Tensor:
    """Return the elements of a plain tensor as float64 ``[n]`` on the CPU.

    A copy, because FSDP2 frees the storage of parameters, and a storage that NumPy shares cannot be freed.
    """
    values = tensor.detach().cpu()
    if values.layout is not torch.strided:
        # The gradient of ``nn.Embedding(sparse=True)``.
        values = values.to_dense()
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    return values.reshape(-1).to(torch.float64, copy=True)


def digest(flat: Tensor) -> str:
    """Return a digest of all bits of float64 elements."""
    return hashlib.blake2b(flat.numpy().tobytes(), digest_size=DIGEST_BYTES).hexdigest()


def sketch(flat: Tensor) -> Any:
    """Return at most ``SKETCH_SIZE`` numbers that represent float64 elements ``[n]``."""
    values = flat.numpy()
    if len(values) <= SKETCH_SIZE:
        return values.copy()
    signs = _signs(-(-len(values) // SKETCH_SIZE))
    padded = np.zeros(signs.size)
    padded[: len(values)] = values
    return (padded.reshape(signs.shape) * signs).sum(0)


@lru_cache(maxsize=64)
def _signs(rows: int) -> Any:
    return np.random.Generator(np.random.PCG64(rows)).integers(0, 2, (rows, SKETCH_SIZE)).astype(np.float64) * 2 - 1


def sample_hashes(batch: Any) -> list[str]:
    """Hash each sample of a batch: ``"<integers>/<floats>"`` by the first axis of all its tensors. Padding does not count.

    The two parts are separate, because an augmentation changes pixels and not labels. A batch without a common first axis is
    one sample.
    """
    tensors = [tensor.detach() for tensor in list_tensors(batch) if tensor.numel() or tensor.ndim]
    sizes = {tensor.shape[0] for tensor in tensors if tensor.ndim}
    if not tensors:
        return []
    if len(sizes) != 1:
        return ["/".join(_hash_rows(tensors, 1, whole=True)[0])]
    count = sizes.pop()
    return ["/".join(pair) for pair in _hash_rows([tensor for tensor in tensors if tensor.ndim], count, whole=False)]


# Limits of the columns that are hashed: their number, and the elements of the batch.
_MAX_COLUMNS, _MAX_COLUMN_ELEMENTS = 512, 1 << 20


def column_hashes(batch: Any) -> list[str]:
    """Hash each sample of a batch whose samples may be along the second axis of a tensor, as in a recurrent network.

    That is the axis of all tensors, or of those whose first axis has another size than that of the first tensor. The list is
    empty if there is no such axis.
    """
    tensors = [tensor.detach() for tensor in list_tensors(batch) if tensor.ndim and tensor.numel()]
    if not tensors or sum(tensor.numel() for tensor in tensors) > _MAX_COLUMN_ELEMENTS:
        return []
    is_mixed = len({tensor.shape[0] for tensor in tensors}) > 1
    for count in tensors[0].shape[0 if is_mixed else 1 : 2]:
        rows = [
            tensor if tensor.ndim < 2 or (is_mixed and tensor.shape[0] == count) else full_tensor(tensor).transpose(0, 1)
            for tensor in tensors
            if tensor.ndim > 1 or is_mixed
        ]
        if count <= _MAX_COLUMNS and all(row.shape[0] == count for row in rows):
            return ["/".join(pair) for pair in _hash_rows(rows, count, whole=False)]
    return []


def field_digests(batch: Any) -> dict[str, int]:
    """Return a digest of each tensor of a batch, by its name as in ``"batch[1]"``. The order of the rows does not count.

    The digest of a batch is the sum of those of its parts, modulo 2**64.
    """
    fields = {name: tensor.detach() for name, tensor in iter_named_tensors(batch, "batch") if tensor.ndim}
    rows = {name: _hash_rows([tensor], len(tensor), whole=False) for name, tensor in fields.items()}
    return {name: sum(int(word, 16) for pair in pairs for word in pair) % 2**64 for name, pairs in rows.items()}


def field_statistics(batch: Any) -> dict[str, list[float]]:
    """Return the mean, the deviation, the largest size and the sum of each tensor of floating-point numbers of a batch."""
    fields = {name: tensor.detach() for name, tensor in iter_named_tensors(batch, "batch") if tensor.numel() > 1}
    return {
        name: [float(number) for number in (flat.mean(), flat.std(correction=0), flat.abs().max(), flat.sum())]
        for name, tensor in fields.items()
        if tensor.is_floating_point() and len(flat := flatten(full_tensor(tensor)))
    }


def _hash_rows(tensors: Sequence[Tensor], count: int, *, whole: bool) -> list[tuple[str, str]]:
    hashes = [(hashlib.blake2b(digest_size=DIGEST_BYTES), hashlib.blake2b(digest_size=DIGEST_BYTES)) for _ in range(count)]
    for tensor in tensors:
        plain = full_tensor(tensor).cpu()
        floating = plain.is_floating_point() or plain.is_complex()
        # A forward on several ranks may compute inputs of a later model with another rounding.
        array = plain.to(
            torch.complex64 if plain.is_complex() else torch.float32 if floating else torch.int64, copy=True
        ).numpy()
        rows = [array.reshape(-1)] if whole else [array[index] for index in range(count)]
        for row, pair in zip(rows, hashes, strict=True):
            pair[floating].update(_without_padding(row).tobytes())
            pair[floating].update(b"|")
    return [(integers.hexdigest(), floats.hexdigest()) for integers, floats in hashes]


def _without_padding(row: Any) -> Any:
    """Return a sequence without the elements at its end and begin that a collate function may have added."""
    if row.ndim == 0 or row.size == 0:
        return row
    others = np.flatnonzero(~np.isin(row.reshape(len(row), -1), _PADDING).all(axis=1))
    return row[others[0] : others[-1] + 1] if len(others) else row[:0]


def count_samples(batch: Any) -> int:
    """Return the length of the first axis of the first tensor that has one; 0 without such a tensor."""
    return next((tensor.shape[0] for tensor in list_tensors(batch) if tensor.ndim), 0)


def count_items(batch: Any) -> dict[str, int]:
    """Count the items of a microbatch that its loss may be a mean of, each count with its name in a sentence.

    The items are samples, and elements of tensors: all of them, those that are not 0, and those that are not -100. A language
    model may not count the first element of each sequence.
    """
    counts = {"the number of samples": count_samples(batch)}
    for name, tensor in iter_named_tensors(batch, "batch"):
        if not tensor.ndim or not tensor.numel():
            continue
        plain, of = full_tensor(tensor.detach()), f"the number of elements of {name}"
        parts = {of: plain} if plain.ndim < 2 else {of: plain, f"{of} after the first": plain[:, 1:]}
        for label, part in parts.items():
            counts[label] = part.numel()
            if not part.is_floating_point() and not part.is_complex():
                counts[f"{label} that are not 0"] = int((part != 0).sum())
                counts[f"{label} that are not -100"] = int((part != -100).sum())
    return counts


def named_tensors(tree: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors and numbers of nested mappings by path, numbers as float64 tensors ``[]``."""
    if isinstance(tree, Tensor):
        yield path, tree
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from named_tensors(value, f"{path}.{key}" if path else str(key))
    elif isinstance(tree, int | float):
        yield path, torch.tensor(float(tree), dtype=torch.float64, device="cpu")


def is_number(value: Any) -> bool:
    """Return True for a number, or a tensor of one element."""
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)


def to_number(value: Any) -> float:
    """Return a number, or the element of a tensor. Collective: for a DTensor, as in ``full_tensor``."""
    return float(full_tensor(value.detach())) if isinstance(value, Tensor) else float(value)


@dataclass(slots=True)
class StepFacts:
    """Observations of the step in progress, which are written when its update begins."""

    samples: list[str] = field(default_factory=list)
    columns: list[str] = field(default_factory=list)
    losses: list[tuple[float, float | None]] = field(default_factory=list)
    forwards: int = 0
    backwards: int = 0
    modules: list[str] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    rng: str | None = None
    draws: int = 0
    drops: int = 0
    epochs: list[int] = field(default_factory=list)
    shapes: list[list[int]] = field(default_factory=list)
    counts: list[dict[str, int]] = field(default_factory=list)
    fields: dict[str, int] = field(default_factory=dict)
    lines: dict[str, str] = field(default_factory=dict)
    loaders: list[int] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    collectives: int = 0
    parts: list[str] = field(default_factory=list)
    targets: int = 0
    statistics: list[dict[str, list[float]]] = field(default_factory=list)

    def add_batch(self, batch: Any) -> None:
        """Add the samples of a batch, and the digests and statistics of its tensors."""
        self.statistics.append(field_statistics(batch))
        self.samples += sample_hashes(batch)
        for name, number in field_digests(batch).items():
            self.fields[name] = (self.fields.get(name, 0) + number) % 2**64
