"""Which stored tensor goes where in a model: by name, renamed where asked for, nothing left over in silence."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from dtrain.checkpoint import differences, layout, plain
from dtrain.checkpoint.differences import Difference
from dtrain.checkpoint.plain import TensorRef
from dtrain.errors import CheckpointMismatchError, ConfigError
from dtrain.names import clean_buffers, clean_modules, clean_parameters, matcher

Rename = Callable[[str], str | None] | Mapping[str, str | None]

_ADVICE = "rename= gives stored tensors their names in the model, or leaves them out; missing= allows what need not be stored"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Match:
    """Which stored tensors go where.

    Args:
        targets: the model's tensor, by stored name.
        names: its name in the model, by stored name.
        twins: pairs of stored names that go to one place, of which the first is in ``targets``.
        kept: names in the model of what is not stored, and need not be.
        left_out: stored names that ``rename`` left out.
    """

    targets: Mapping[str, Tensor]
    names: Mapping[str, str]
    twins: Sequence[tuple[str, str]]
    kept: Sequence[str]
    left_out: Sequence[str]


def match_by_name(
    refs: Mapping[str, TensorRef], model: nn.Module, rename: Rename | None, missing: Sequence[str], *, where: str
) -> Match:
    """Find the place of each stored tensor.

    Args:
        refs: what is stored, by name.
        model: with real storage.
        rename: the name in the model of each stored name, or None; a function or a mapping.
        missing: patterns of names in the model that need not be stored.
        where: begins every message.

    Raises:
        ConfigError: tensors on the meta device, a pattern or a name in ``rename`` that nothing has, or another kind of value.
        CheckpointMismatchError: what has no place, does not fit there, or is not stored; the first ten in a table.
    """
    here, aliases = _tensors(model, where)
    allowed = _allowed(missing, {*here, *aliases}, where)
    names = _renamed(refs, rename, where)
    rows: list[Difference] = []
    stored_as: dict[str, str] = {}
    twins = []
    for name, wanted in names.items():
        first = aliases.get(wanted, wanted)
        if first in stored_as:
            twins.append((stored_as[first], name))
            continue
        stored_as[first] = name
        tensor = here.get(first)
        label = name if name == wanted else f"{wanted} (stored as {name})"
        if tensor is None:
            rows.append(differences.unexpected(wanted, str(refs[name]), label=label))
        elif not _fits(refs[name], tensor):
            rows.append(differences.unequal(wanted, refs[name], plain.ref_of(tensor), label=label))
    every_name = defaultdict(set, {first: {first} for first in here})
    for alias, first in aliases.items():
        every_name[first].add(alias)
    absent = [first for first in here if first not in stored_as]
    kept = [first for first in absent if any(map(allowed, every_name[first]))]
    rows.extend(differences.missing(first, _described(here[first])) for first in absent if first not in kept)
    if rows:
        raise differences.mismatch(where, rows, source="file", advice=_ADVICE)
    if not stored_as:
        raise CheckpointMismatchError(
            f"{where}: none of the {len(refs)} tensors goes into the model; see rename=, which can leave them out"
        )
    return Match(
        targets={name: here[first] for first, name in stored_as.items()},
        names={name: names[name] for name in stored_as.values()},
        twins=twins,
        kept=kept,
        left_out=[name for name in refs if name not in names],
    )


def _tensors(model: nn.Module, where: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """What is to be loaded, by clean name, and the further names of what sits in several places."""
    params, aliases = clean_parameters(model)
    buffers = clean_buffers(model, persistent_only=True)
    found, aliases = {**params, **buffers}, {**aliases, **_further_names(buffers, model)}
    meta = [name for name, tensor in found.items() if tensor.is_meta]
    if meta:
        raise ConfigError(
            f"{where}: {len(meta)} of {len(found)} tensors are on the meta device (first: {meta[0]}); call dt.materialize"
        )
    return found, aliases


def _further_names(buffers: Mapping[str, Tensor], model: nn.Module) -> dict[str, str]:
    """The names in a state dict that ``buffers`` lacks -> the name there: a module in two places has its buffers twice."""
    first = {id(buffer): name for name, buffer in buffers.items()}
    every = {
        f"{prefix}.{key}" if prefix else key: id(buffer)
        for prefix, module in clean_modules(model, every_name=True)
        for key, buffer in module._buffers.items()
    }
    return {name: first[buffer] for name, buffer in every.items() if name not in buffers and buffer in first}


def _allowed(missing: Sequence[str], names: Iterable[str], where: str) -> Callable[[str], bool]:
    if isinstance(missing, str):
        raise ConfigError(f"{where}: missing takes a list of patterns, got the text {missing!r}; write [{missing!r}]")
    if not isinstance(missing, Iterable):
        raise ConfigError(f"{where}: missing takes a list of patterns, got {missing!r}; as in missing=['head.*']")
    names = list(names)
    for pattern in missing:
        if not any(map(matcher([pattern], where=f"{where}: missing"), names)):
            raise ConfigError(
                f"{where}: missing: no name of the model fits {pattern!r}; * stands for text without a dot, ** for any"
            )
    return matcher(missing, where=f"{where}: missing")


def _renamed(refs: Mapping[str, TensorRef], rename: Rename | None, where: str) -> dict[str, str]:
    """The name in the model of each stored tensor that is not left out."""
    given = {} if rename is None else rename
    if isinstance(given, Mapping):
        stray = [name for name in given if name not in refs]
        if stray:
            raise ConfigError(f"{where}: rename has {stray[0]!r}, which is not stored ({len(stray)} such names)")
        results = {name: given.get(name, name) for name in refs}
    elif not callable(given):
        raise ConfigError(f"{where}: rename takes a function of the stored name, or a mapping, got {given!r}")
    else:
        results = {name: given(name) for name in refs}
    bad = next((name for name, result in results.items() if not isinstance(result, str | None)), None)
    if bad is not None:
        raise ConfigError(f"{where}: rename gives {results[bad]!r} for {bad!r}; needs the name in the model, or None")
    return {name: result for name, result in results.items() if result is not None}


def _fits(ref: TensorRef, tensor: Tensor) -> bool:
    dtype = layout.DTYPES[ref.dtype]
    castable = dtype.is_floating_point and tensor.is_floating_point()
    return ref.shape == tuple(tensor.shape) and (castable or dtype == tensor.dtype)


def _described(tensor: Tensor) -> str:
    return f"{layout.DTYPE_NAMES.get(tensor.dtype, tensor.dtype)} {list(tensor.shape)}"
