"""Trees of plain values whose tensors have not been read yet, and their completion."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

from dtrain.checkpoint import plain
from dtrain.checkpoint.plain import TensorRef


class Leaf(NamedTuple):
    """Stands for the tensor ``key`` in a tree."""

    key: str
    ref: TensorRef


def outlined(values: Any, path: str) -> Any:
    """The tree that these encoded values stand for, with a ``Leaf`` in place of each tensor.

    Raises:
        DamagedCheckpointError: values that ``plain.encode`` does not write.
    """
    return plain.decode(values, path, Leaf)


def completed(tree: Any, tensor_of: Callable[[str, TensorRef], Any]) -> Any:
    """The tree with ``tensor_of(key, ref)`` in place of each ``Leaf``."""
    kind = type(tree)
    if kind is Leaf:
        return tensor_of(*tree)
    if kind is dict:
        return {key: completed(item, tensor_of) for key, item in tree.items()}
    if kind in (list, tuple):
        return kind(completed(item, tensor_of) for item in tree)
    return tree


def moved(tree: Any, prefix: str) -> Any:
    """The tree with ``prefix`` taken from the beginning of each key that has it."""
    return completed(tree, lambda key, ref: Leaf(key.removeprefix(prefix), ref))


def leaves(tree: Any) -> Iterator[Leaf]:
    """The leaves of a tree."""
    kind = type(tree)
    if kind is Leaf:
        yield tree
    elif kind is dict:
        for item in tree.values():
            yield from leaves(item)
    elif kind in (list, tuple):
        for item in tree:
            yield from leaves(item)


def merged(tree: Any, here: Any, left: Collection[str]) -> Any:
    """``tree`` where what belongs to the names ``left`` is as it is ``here``: neither taken over nor removed.

    A name is looked for among the keys of dicts, at any depth.
    """
    if type(tree) is not dict or not isinstance(here, Mapping):
        return tree
    kept = {key: merged(item, here.get(key), left) for key, item in tree.items() if key not in left}
    return {**kept, **{key: item for key, item in here.items() if key in left}}
