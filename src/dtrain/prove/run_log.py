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

import ast
import hashlib
import json
import os
import random
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import IO, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from dtrain.data.batch import iter_named_tensors, list_tensors
from dtrain.dist.dtensor import full_tensor, to_local
from dtrain.prove.run_config import SKETCH_SIZE

_DIGEST_BYTES = 8
_PACKAGE = Path(__file__).resolve().parents[1]
# Padding of the usual collate functions. A sample has other numbers of them in another layout.
_PADDING = (0, -100, -1)
# Limits of the search for variables: depth of containers, number of values, elements of a tensor.
_DEPTH = 3
_MAX_VALUES = 400
_MAX_ELEMENTS = 1 << 16
_LIBRARIES = (
    "torch",
    "dtrain",
    "numpy",
    "builtins",
    "tensordict",
    "pathlib",
    "argparse",
    "transformers",
    "accelerate",
    "torchdata",
    "collections",
    "functools",
)


class RunLog:
    """Files of one rank: ``rank-0.jsonl`` with the facts in program order, ``rank-0.f64`` with the numbers of sketches.

    Args:
        folder: folder of the run.
        rank: rank whose facts are written.

    Attributes:
        step: number of the step in progress, from 0, which facts get.
        optimizer_index: number of the optimizer in progress, which facts get.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._facts: IO[str] = open(folder / f"rank-{rank}.jsonl", "w", buffering=1, encoding="utf-8")  # noqa: SIM115 - closed by the process
        self._numbers: IO[bytes] = open(folder / f"rank-{rank}.f64", "wb")  # noqa: SIM115
        self._offset = 0
        self.rank = rank
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

    def write_tensor(self, kind: str, name: str, tensor: Tensor, **content: Any) -> None:
        """Write a tensor: shape, dtype, norm, digest and sketch. Only rank 0 writes sketches.

        Collective: for a DTensor, the gather of the full tensor.
        """
        detached = tensor.detach()
        full = full_tensor(detached)
        if self.rank and full is not detached:
            return
        flat = flatten(full)
        place = None
        if not self.rank:
            numbers = sketch(flat)
            self._numbers.write(numbers.tobytes())
            self._numbers.flush()
            place, self._offset = [self._offset, len(numbers)], self._offset + len(numbers)
        norm = float(torch.linalg.vector_norm(flat))
        self.write(
            kind,
            name=name,
            shape=list(full.shape),
            dtype=str(tensor.dtype).removeprefix("torch."),
            norm=repr(norm),
            digest=digest(flat),
            sketch=place,
            **content,
        )

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
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    return values.reshape(-1).to(torch.float64, copy=True)


def digest(flat: Tensor) -> str:
    """Return a digest of all bits of float64 elements."""
    return hashlib.blake2b(flat.numpy().tobytes(), digest_size=_DIGEST_BYTES).hexdigest()


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


def field_digests(batch: Any) -> dict[str, int]:
    """Return a digest of each tensor of a batch, by its name as in ``"batch[1]"``. The order of the rows does not count.

    The digest of a batch is the sum of those of its parts, modulo 2**64.
    """
    fields = {name: tensor.detach() for name, tensor in iter_named_tensors(batch, "batch") if tensor.ndim}
    rows = {name: _hash_rows([tensor], len(tensor), whole=False) for name, tensor in fields.items()}
    return {name: sum(int(word, 16) for pair in pairs for word in pair) % 2**64 for name, pairs in rows.items()}


def _hash_rows(tensors: Sequence[Tensor], count: int, *, whole: bool) -> list[tuple[str, str]]:
    hashes = [(hashlib.blake2b(digest_size=_DIGEST_BYTES), hashlib.blake2b(digest_size=_DIGEST_BYTES)) for _ in range(count)]
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


@lru_cache(maxsize=4096)
def is_of_script(file: str, script: str) -> bool:
    """Return True for the script and modules in its folder, but not for packages that are installed there."""
    path, folder = Path(os.path.realpath(file)), Path(os.path.realpath(script)).parent
    is_installed = {"site-packages", "dist-packages"} & set(path.parts) or path.is_relative_to(_PACKAGE)
    return path.is_relative_to(folder) and not is_installed


def script_frames(frame: FrameType | None, script: str) -> list[FrameType]:
    """Return the frames of the script, and of modules in its folder, that called the current function."""
    return [caller for caller, _ in traceback.walk_stack(frame) if is_of_script(caller.f_code.co_filename, script)]


def script_line(script: str) -> str:
    """Return the line of the script that called the current function, as in ``"loop.py:31"``; "" if no line did."""
    frame = next(iter(script_frames(sys._getframe(1), script)), None)
    return "" if frame is None else f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def script_variables(frames: Sequence[FrameType], models: Sequence[nn.Module]) -> Iterator[dict[str, Any]]:
    """Yield the values of the frames' variables: name, type, digest, the number if it is one, and if it has a weight's shape.

    Variables that only ``for`` assigns are left out: after a resume a loop may count from another number.
    """
    owned = _owned_by(models)
    for file, name, path, value in _script_leaves(frames, owned):
        yield _row(path, value, owned) | {"line": _assignments(file).lines.get(name, "")}


def copies_of_weights(frames: Sequence[FrameType], models: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Return the tensors of the frames' variables that have the shape of a parameter and are none, such as averages."""
    owned = _owned_by(models)
    tensors = {path: value for _, _, path, value in _script_leaves(frames, owned) if isinstance(value, Tensor)}
    return {path: tensor for path, tensor in tensors.items() if tuple(tensor.shape) in owned.shapes}


def _script_leaves(frames: Sequence[FrameType], owned: _Owned) -> Iterator[tuple[str, str, str, Any]]:
    """Yield the file, the variable, the path and the value of the numbers, tensors and generators of the frames."""
    seen = set[int]()
    leaves = (
        (frame.f_code.co_filename, name, path, leaf)
        for frame in frames
        for name, value in list(frame.f_locals.items())
        if not name.startswith("__") and name not in _assignments(frame.f_code.co_filename).counters
        for path, leaf in _leaves(name, value, 0, seen, owned)
    )
    return islice(leaves, _MAX_VALUES)


class _Assignments(NamedTuple):
    """Names that only ``for`` loops of a file assign, and the line that assigns each name last, as in ``"loop.py:31"``."""

    counters: frozenset[str] = frozenset()
    lines: Mapping[str, str] = MappingProxyType({})


@lru_cache(maxsize=64)
def _assignments(file: str) -> _Assignments:
    try:
        tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return _Assignments()
    loops = [node.target for node in ast.walk(tree) if isinstance(node, ast.For | ast.AsyncFor)]
    of_loops = [name for target in loops for name in ast.walk(target) if isinstance(name, ast.Name)]
    assigned = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    others = {node.id for node in assigned if not any(node is name for name in of_loops)}
    lines = {node.id: f"{os.path.basename(file)}:{node.lineno}" for node in sorted(assigned, key=lambda node: node.lineno)}
    return _Assignments(frozenset(name.id for name in of_loops) - others, lines)


def model_values(models: Sequence[nn.Module]) -> Iterator[dict[str, Any]]:
    """Yield numbers that modules of the script keep as plain attributes, such as the layers to drop in a step."""
    owned = _owned_by(models)
    for number, model in enumerate(models):
        for name, module in model.named_modules():
            if type(module).__module__.split(".")[0] in _LIBRARIES:
                continue
            for key, value in vars(module).items():
                if key.startswith("_") or key == "training":
                    continue
                path = f"model{number or ''}.{name + '.' if name else ''}{key}"
                if type(value) in (list, tuple) or isinstance(value, bool | int | float):
                    for place, leaf in _leaves(path, value, _DEPTH, set(), owned):
                        yield _row(place, leaf, owned) | {"of_model": True}


def global_generators() -> Iterator[dict[str, Any]]:
    """Yield the states of the global generators of Python and NumPy, as rows of variables."""
    yield {"name": "of Python", "type": "generator", "digest": _digest_text(random.getstate()), "is_global": True}
    state = np.random.get_state(legacy=False)["state"]
    words = hashlib.blake2b(state["key"].tobytes(), digest_size=_DIGEST_BYTES).hexdigest()
    yield {"name": "of NumPy", "type": "generator", "digest": f"{words}/{state['pos']}", "is_global": True}


def scaler_values(scalers: Iterable[torch.amp.GradScaler]) -> Iterator[dict[str, Any]]:
    """Yield the loss scale of each scaler, and the number of steps since the scale changed, as rows of variables."""
    for number, scaler in enumerate(scalers):
        state, name = scaler.state_dict(), f"loss scaler {number + 1}" if number else "the loss scaler"
        for key, label in (("scale", "the scale"), ("_growth_tracker", "the steps without an overflow")):
            # A scaler that is off has no state.
            if key in state:
                row = {"name": f"{label} of {name}", "type": "number", "digest": repr(state[key]), "value": float(state[key])}
                yield {**row, "weights": False, "scaler": True}


def _digest_text(value: object) -> str:
    """Return a digest that is equal in all processes. That of ``hash`` depends on the process."""
    return hashlib.blake2b(repr(value).encode(), digest_size=_DIGEST_BYTES).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Owned:
    """Objects of the models of a script by ``id``, with the shapes of parameters and the addresses of tensors."""

    modules: frozenset[int]
    parameters: frozenset[int]
    shapes: frozenset[tuple[int, ...]]
    addresses: frozenset[int]


def _owned_by(models: Sequence[nn.Module]) -> _Owned:
    parameters = [param for model in models for param in model.parameters()]
    buffers = [buffer for model in models for buffer in model.buffers()]
    return _Owned(
        modules=frozenset(id(module) for model in models for module in model.modules()),
        parameters=frozenset(map(id, parameters)),
        shapes=frozenset(tuple(param.shape) for param in parameters),
        addresses=frozenset(map(_address, (*parameters, *buffers))),
    )


def _address(tensor: Tensor) -> int:
    return to_local(tensor.detach()).data_ptr()


def _row(path: str, value: Any, owned: _Owned) -> dict[str, Any]:
    """Return the row of a number, a tensor or a generator."""
    number, weights = None, False
    if isinstance(value, bool | int | float):
        kind, content, number = "number", repr(value), float(value)
    elif isinstance(value, Tensor):
        kind, content, weights = "tensor", digest(flatten(to_local(value))), tuple(value.shape) in owned.shapes
    elif isinstance(value, torch.Generator):
        kind, content = "generator", digest(flatten(value.get_state()))
    else:
        kind = "generator"
        content = _digest_text(value.getstate()) if isinstance(value, random.Random) else str(value.bit_generator.state)
    return {"name": path, "type": kind, "digest": content, "value": number, "weights": weights}


def _leaves(path: str, value: Any, depth: int, seen: set[int], owned: _Owned) -> Iterator[tuple[str, Any]]:
    """Yield the numbers, tensors and generators in a value by path, without those of the models."""
    if isinstance(value, bool | int | float):
        yield path, value
        return
    if id(value) in seen or depth > _DEPTH:
        return
    seen.add(id(value))
    items: list[tuple[str, Any]] = []
    if isinstance(value, Tensor):
        # A larger tensor that is not a parameter is data of the script.
        small = value.numel() <= _MAX_ELEMENTS or tuple(value.shape) in owned.shapes
        # A tensor of a state dict is the memory of a parameter or buffer.
        if small and not value.is_meta and not isinstance(value, nn.Parameter) and _address(value) not in owned.addresses:
            yield path, value
    elif isinstance(value, torch.Generator | random.Random | np.random.Generator):
        yield path, value
    elif isinstance(value, nn.Module):
        if id(value) not in owned.modules:
            for name, tensor in (*value.named_parameters(), *value.named_buffers()):
                if not tensor.is_meta and id(tensor) not in owned.parameters:
                    yield f"{path}.{name}", tensor
    elif isinstance(value, Mapping):
        # The optimizer has the numbers of its groups of parameters.
        params = value.get("params")
        if isinstance(params, list) and any(isinstance(item, nn.Parameter) for item in params):
            return
        items = [(f"[{key!r}]", item) for key, item in list(value.items())[:_MAX_VALUES] if isinstance(key, str | int)]
    elif type(value) in (list, tuple):
        items = [(f"[{index}]", item) for index, item in enumerate(value)] if len(value) <= _MAX_VALUES else []
    elif _is_of_script(value):
        items = [(f".{key}", item) for key, item in vars(value).items()]
    # An ``early_stop``.
    elif type(value).__module__.startswith("dtrain.monitors") and hasattr(value, "state_dict"):
        items = [(f".{key}", item) for key, item in value.state_dict().items()]
    for suffix, item in items:
        yield from _leaves(path + suffix, item, depth + 1, seen, owned)


def _is_of_script(value: Any) -> bool:
    """Return True for an instance of a class that the script, or a module of its folder, defines."""
    library = type(value).__module__.split(".")[0] in _LIBRARIES
    return not library and hasattr(value, "__dict__") and not isinstance(value, type) and type(value).__name__ != "module"
