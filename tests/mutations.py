"""Mutated copies of real files, each chosen by a seed: for tests that read invalid files. ``flip_bits`` changes a file itself.

``mutate_bytes`` knows nothing of the format. ``mutate_json`` changes one value, key or container of a JSON text, so that the
parser accepts the text and the reader has to refuse the content. Both are pure: the same data and seed give the same mutation.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

_RAW = "\ue000raw\ue000"  # stands in a tree for text that json.dumps would not write
_EXTREMES = (0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)
_TOKENS = (
    b"\0", b"\xff\xff\xff\xff", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\x80", b"{", b"}", b"[", b"]", b'"', b",", b":", b"\\ud800",
    b"\\u0000", b"NaN", b"-Infinity", b"1e999", b"9" * 5000, b"-1", b"null", b"[" * 100_000,
)  # fmt: skip
_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 2**31, 2**53 + 1, 2**63, 2**64, 10**400, -(10**400), 0.5, -0.5, 1e308, -0.0, "", " ", "a",
    "0", "-1", "\ud800", "\udfff a", "\0", "a\0b", "..", "../../etc/passwd", "/etc/passwd", "a/b", "\n", "\x1b[31m",
    "x" * 100_000, "nan", "F32", "$", [], {}, [[]], [None], [-1], [2**64], [1.5], ["\ud800"], {"": 0}, {"$": "tensor"},
    {"\ud800": 0}, [{}],
)  # fmt: skip
_RAW_VALUES = (
    "NaN", "Infinity", "-Infinity", "1e999", "-1e999", "9" * 5000, "1" + "0" * 4200, "-0", "1E+2", '"\\ud800"', '{"a":1,"a":2}',
    "[" * 50 + "]" * 50, "[" * 70 + "]" * 70, "[" * 900 + "]" * 900, "[" * 100_000 + "]" * 100_000,
    '{"a":' * 70 + "1" + "}" * 70, '{"a":' * 20_000 + "1" + "}" * 20_000,
)  # fmt: skip


class Mutation(NamedTuple):
    """Changed bytes, and the kind of change for a failure's message."""

    kind: str
    data: bytes


def flip_bits(path: Path, at: int | float, bits: int = 1) -> None:
    """Flip ``bits`` of the byte ``at`` of a file: its index, or its place as a share of the file from 0.0 to 1.0."""
    data = bytearray(path.read_bytes())
    data[int(at * (len(data) - 1)) if isinstance(at, float) else at] ^= bits
    path.write_bytes(data)


def mutate_bytes(data: bytes, seed: int) -> Mutation:
    """Change some bytes of ``data``; the result differs from ``data``."""
    rng = random.Random(seed)
    while True:
        kind = rng.choice(list(_ON_BYTES))
        changed = _ON_BYTES[kind](data, rng)
        if changed != data:
            return Mutation(kind, changed)


def mutate_json(data: bytes, seed: int) -> Mutation:
    """Change one value, key or container of the JSON text ``data``; the result differs from ``data``.

    The text is written without spaces. It may be JSON no longer: keys given twice, NaN, numbers of thousands of digits, and
    nesting that no parser follows are among the changes.
    """
    rng = random.Random(seed)
    plain = json.dumps(json.loads(data), separators=(",", ":")).encode()
    while True:
        kind = rng.choice(list(_ON_TREES))
        tree = json.loads(data)
        raw = _ON_TREES[kind](tree, rng)
        if raw is None:
            continue
        body = tree["root"] if kind == "whole document" else tree
        text = json.dumps(body, separators=(",", ":")).replace(json.dumps(_RAW), raw).encode()
        if text not in (data, plain):
            return Mutation(f"json: {kind}", text)


# --- bytes ---------------------------------------------------------------------------------------------------------


def _span(data: bytes, rng: random.Random) -> tuple[int, int]:
    """Choose a place in ``data``, most often a short range."""
    begin = rng.randrange(len(data) + 1)
    length = min(len(data) - begin, rng.choice((1, 2, 4, 8, 64, 4096, len(data))))
    return begin, begin + length


def _flip_bit(data: bytes, rng: random.Random) -> bytes:
    if not data:
        return data
    changed = bytearray(data)
    changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _flip_bits(data: bytes, rng: random.Random) -> bytes:
    for _ in range(rng.randrange(2, 20)):
        data = _flip_bit(data, rng)
    return data


def _truncate(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data))] if data else data


def _remove(data: bytes, rng: random.Random) -> bytes:
    begin, end = _span(data, rng)
    return data[:begin] + data[end:]


def _repeat(data: bytes, rng: random.Random) -> bytes:
    begin, end = _span(data, rng)
    return data[:end] + data[begin:]


def _zero(data: bytes, rng: random.Random) -> bytes:
    begin, end = _span(data, rng)
    return data[:begin] + bytes(end - begin) + data[end:]


def _randomise(data: bytes, rng: random.Random) -> bytes:
    begin, end = _span(data, rng)
    return data[:begin] + rng.randbytes(end - begin) + data[end:]


def _append(data: bytes, rng: random.Random) -> bytes:
    return data + rng.randbytes(rng.choice((1, 8, 1000)))


def _insert_token(data: bytes, rng: random.Random) -> bytes:
    begin = rng.randrange(len(data) + 1)
    return data[:begin] + rng.choice(_TOKENS) + data[begin:]


def _write_number(data: bytes, rng: random.Random) -> bytes:
    """An extreme number in place of 1 to 8 bytes, often at the beginning, where binary formats hold lengths."""
    size = rng.choice((1, 2, 4, 8))
    begin = rng.choice((0, 8, rng.randrange(len(data) + 1)))
    number = rng.choice(_EXTREMES) % 2 ** (8 * size)
    return data[:begin] + number.to_bytes(size, rng.choice(("little", "big"))) + data[begin + size :]


_ON_BYTES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "a bit flipped": _flip_bit,
    "several bits flipped": _flip_bits,
    "truncated": _truncate,
    "bytes removed": _remove,
    "bytes repeated": _repeat,
    "bytes zeroed": _zero,
    "bytes randomised": _randomise,
    "bytes appended": _append,
    "a token inserted": _insert_token,
    "a number written": _write_number,
}


# --- JSON ----------------------------------------------------------------------------------------------------------


def _slots(tree: Any) -> list[tuple[Any, Any]]:
    """Each container of a tree with each of its keys or indexes."""
    if isinstance(tree, dict):
        below = list(tree.items())
    elif isinstance(tree, list):
        below = list(enumerate(tree))
    else:
        return []
    return [(tree, key) for key, _ in below] + [slot for _, item in below for slot in _slots(item)]


def _slot(tree: Any, rng: random.Random, *, of: type | tuple[type, ...] = (dict, list)) -> tuple[Any, Any] | None:
    slots = [slot for slot in _slots(tree) if isinstance(slot[0], of)]
    return rng.choice(slots) if slots else None


def _replace_value(tree: Any, rng: random.Random) -> str | None:
    if (slot := _slot(tree, rng)) is None:
        return None
    slot[0][slot[1]] = rng.choice(_VALUES)
    return ""


def _replace_raw(tree: Any, rng: random.Random) -> str | None:
    if (slot := _slot(tree, rng)) is None:
        return None
    slot[0][slot[1]] = _RAW
    return rng.choice(_RAW_VALUES)


def _change_value(tree: Any, rng: random.Random) -> str | None:
    """Return another value of the same type, close to the old value."""
    if (slot := _slot(tree, rng)) is None:
        return None
    here = slot[0][slot[1]]
    if isinstance(here, bool) or here is None:
        slot[0][slot[1]] = not here
    elif isinstance(here, (int, float)):
        slot[0][slot[1]] = rng.choice((here + 1, here - 1, -here, here * 2, here * 10**30, float(here)))
    elif isinstance(here, str):
        index = rng.randrange(len(here) + 1)
        slot[0][slot[1]] = (
            here[:index] + rng.choice(("\ud800", "\0", "é", "/", "~", ".", "0")) + here[index + rng.randrange(2) :]
        )
    elif isinstance(here, list):
        slot[0][slot[1]] = rng.choice((here * 2, here[::-1], here[1:], [here]))
    else:
        slot[0][slot[1]] = [here]
    return ""


def _remove_item(tree: Any, rng: random.Random) -> str | None:
    if (slot := _slot(tree, rng)) is None:
        return None
    del slot[0][slot[1]]
    return ""


def _add_field(tree: Any, rng: random.Random) -> str | None:
    if (slot := _slot(tree, rng, of=dict)) is None:
        return None
    slot[0][rng.choice(("unknown", "", "$", "\ud800", "__proto__"))] = rng.choice(_VALUES)
    return ""


def _rename_field(tree: Any, rng: random.Random) -> str | None:
    if (slot := _slot(tree, rng, of=dict)) is None:
        return None
    fields, key = slot
    new = rng.choice(("unknown", "", "$", "\ud800", key + "\ud800", key.upper(), key + "/x", key[:-1], "x" * 10_000))
    renamed = {new if name == key else name: value for name, value in fields.items()}
    fields.clear()
    fields.update(renamed)
    return ""


def _repeat_field(tree: Any, rng: random.Random) -> str | None:
    if (slot := _slot(tree, rng, of=dict)) is None:
        return None
    fields, key = slot
    fields[_RAW] = fields[key]
    return json.dumps(key)


def _swap_values(tree: Any, rng: random.Random) -> str | None:
    first, second = _slot(tree, rng), _slot(tree, rng)
    if first is None or second is None:
        return None
    (one, here), (other, there) = first, second
    inside = [id(container) for value in (one[here], other[there]) for container, _ in _slots(value)]
    if id(one) in inside or id(other) in inside:  # a value would come to lie inside itself
        return None
    one[here], other[there] = other[there], one[here]
    return ""


def _replace_document(tree: Any, rng: random.Random) -> str | None:
    if not isinstance(tree, dict):
        return None
    tree["root"] = _RAW
    return rng.choice((*_RAW_VALUES, "", " ", "null", "0", "[]", "{}", '""', "true"))


_ON_TREES: dict[str, Callable[[Any, random.Random], str | None]] = {
    "value replaced": _replace_value,
    "value replaced by raw text": _replace_raw,
    "value changed": _change_value,
    "item removed": _remove_item,
    "field added": _add_field,
    "field renamed": _rename_field,
    "field given twice": _repeat_field,
    "values swapped": _swap_values,
    "whole document": _replace_document,
}
