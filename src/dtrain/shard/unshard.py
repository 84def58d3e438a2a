"""Run, read or describe a sharded model outside of a step: ``eval_mode``, ``unshard_params``, ``full_params``, ``describe``.

- ``eval_mode`` runs the model on all ranks. Parameters stay sharded.
- ``unshard_params`` holds the whole model on every rank, in the compute dtype, so that one rank may run the model alone.
- ``full_params`` reads stored values, one full tensor at a time. The values may be those of an average.
- ``describe`` prints the units, bytes, dtypes and placements, and reads no values.

The first needs the memory of a step, the second of the whole model, the third of one tensor.
``use_average`` exchanges the values, and may surround each of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dtrain import spans
from dtrain.arguments import format_bytes, format_count
from dtrain.dist.dtensor import describe_placement, full_tensor, tensor_mesh, to_local
from dtrain.dist.mesh import MODEL_AXES
from dtrain.errors import ConfigError, StepError
from dtrain.fqn import is_transformers_model, modules_by_fqn, parameters_by_fqn, unwrap_module
from dtrain.shard.fsdp2_private import (
    UnitForward,
    compute_dtypes,
    fsdp_param_groups,
    groups_in_state,
    is_in_forward,
    is_unit,
    reshard_groups,
    sharded_and_unsharded_params,
    sharded_params,
    unit_forwards,
    units_of,
    unsharded_params,
)
from dtrain.shard.skipped_units import ModelUnits
from dtrain.shard.spec import ShardSpec, get_spec
from dtrain.state import TrainState

# The model attribute that stores its ``GradSync``.
GRAD_SYNC_ATTRIBUTE = "_dtrain_grad_sync"
# A model has this attribute during ``unshard_params``.
_UNSHARDED_ATTRIBUTE = "_dtrain_unsharded"
_HEAD = ("unit", "class", "tensors", "parameters", "bytes", "bytes here", "stored", "computed", "reduced", "placement")


def reshard(model: nn.Module, groups: Sequence[Any] | None = None) -> None:
    """Reshard all units, whose parameter groups may be given. A forward without a backward leaves units unsharded.

    Mutates: the model's parameters (the sharded parameters are registered again).
    """
    reshard_groups(fsdp_param_groups(model) if groups is None else groups)
    grad_sync = unwrap_module(model).__dict__.get(GRAD_SYNC_ATTRIBUTE)
    # Ranks without a microbatch follow a loss that reshards a model.
    if grad_sync is not None:
        grad_sync.units.on_reshard()
        grad_sync.copies.check()


class GatheredCopies:
    """Gathered parameters of one model after its forwards.

    A forward outside of a step, of ``eval_mode`` and of ``unshard_params`` leaves shards: code after it that writes
    ``model.parameters()`` would write copies. Other forwards leave copies for the next forward, or for backward. A write of
    these copies by other code than a forward raises.

    Attributes:
        holders: number of contexts in which forwards keep the copies.
    """

    # A loss may run other models than that of its step.
    _in_steps: ClassVar[weakref.WeakSet[GatheredCopies]] = weakref.WeakSet()

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.holders = 0
        self._depths: dict[int, int] = {}
        # By unit: the copies that a forward has left, and their version counters.
        self._left: dict[int, tuple[list[nn.Parameter], list[int]]] = {}
        for index, unit in enumerate(unit_forwards(model)):
            unit.wrap(gathered=partial(self._on_gathered, index), left=partial(self._on_left, index, unit.group))

    def begin_step(self) -> None:
        """Keep the copies of all models until ``end_step``. Mutates: class variable.

        Raises:
            StepError: as ``check``.
        """
        self.check()
        self._in_steps.add(self)

    def end_step(self) -> None:
        """End a step, if one runs. Mutates: class variable."""
        self._in_steps.discard(self)

    @property
    def step_runs(self) -> bool:
        """True while a step of any model runs, whose loss may run this model."""
        return bool(self._in_steps)

    def _on_gathered(self, index: int, begins: bool) -> None:
        self._depths[index] = 1 if begins else self._depths.get(index, 0) + 1
        if begins and self._left:
            self._check_unit(index)

    def _on_left(self, index: int, group: Any) -> None:
        self._depths[index] -= 1
        # Within an outer forward of the unit, or in a forward that backward repeats, the parameters are still needed.
        if self._depths[index] > 0 or group.is_sharded or torch._C._current_graph_task_id() != -1 or is_unsharded(self._model):
            return
        if not self.holders and not self.step_runs:
            group.reshard()
        # The step compares the copies of its own model on all ranks.
        elif self not in self._in_steps:
            copies = [copy for copy in unsharded_params(group) if not copy.is_inference()]
            self._left[index] = copies, [copy._version for copy in copies]

    def check(self) -> None:
        """Raise if a copy was written since the forward that has left it.

        Raises:
            StepError: a parameter was written, by name.
        """
        for index in list(self._left):
            self._check_unit(index)

    def _check_unit(self, index: int) -> None:
        copies, versions = self._left.pop(index, ((), ()))
        written = [copy for copy, version in zip(copies, versions, strict=True) if copy._version != version]
        if not written:
            return
        self._left.clear()
        names = {id(param): name for name, param in parameters_by_fqn(self._model)[0].items()}
        pairs = (pair for group in fsdp_param_groups(self._model) for pair in sharded_and_unsharded_params(group))
        # The model holds one of the two.
        name = next(names.get(id(shard)) or names.get(id(copy)) for shard, copy in pairs if copy is written[0])
        raise StepError(
            f"write: the parameter {name!r} was written where the model had a gathered copy of it, left "
            "by a forward, so the write is lost. Run the forward under dt.eval_mode(model), and write after the context."
        )


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Set evaluation mode and disable gradients in a context; restore each module's mode and reshard at exit.

    The context computes with the current parameters, also if an earlier forward left stale unsharded copies.

    Raises:
        StepError: at exit, a parameter was written after a forward of the context, which computes with a copy; by name.

    Example:
        with dt.eval_mode(model):
            logits = model(batch["input_ids"])
    """
    modes = [(module, module.training) for module in model.modules()]
    with current_params(model), torch.no_grad():
        model.eval()
        try:
            yield
        finally:
            for module, training in modes:
                module.training = training


@contextmanager
def current_params(model: nn.Module) -> Iterator[None]:
    """Compute with the current parameters in a context: reshard at both ends, unless ``unshard_params`` is active.

    Mutates: the model's parameters (the sharded parameters are registered again).
    """
    if is_unsharded(model):
        yield
        return
    groups = fsdp_param_groups(model)
    reshard(model, groups)
    grad_sync = unwrap_module(model).__dict__.get(GRAD_SYNC_ATTRIBUTE)
    copies = None if grad_sync is None else grad_sync.copies
    if copies is not None:
        copies.holders += 1
    try:
        yield
    except BaseException:
        # A rank that failed announces its error alone.
        reshard_groups(groups)
        raise
    finally:
        if copies is not None:
            copies.holders -= 1
    reshard(model, groups)


@contextmanager
def unshard_params(model: nn.Module) -> Iterator[None]:
    """Unshard the whole model on every rank during a context, for evaluation or inspection.

    Parameters are plain tensors in the compute dtype of ``precision``, without gradients, and stay unsharded through forwards.
    A rank may run the model alone, also ``generate`` of transformers. But with ``tp_plan`` all ranks along ``tp`` must run the
    model. Changes to parameters are lost. Read parameters from ``named_parameters()``; ``state_dict()`` and loading return to
    shards. A model with plain parameters (``replicate``, or without ``shard_model``) is unchanged, so changes to its parameters
    stay.

    Mutates: the model's parameters (unsharded parameters are registered). The full model must fit in memory.
    Collective: one all-gather per unit, on entering; every rank must enter.

    Example:
        with dt.shard.unshard_params(model):
            norms = {name: param.norm() for name, param in model.named_parameters()}
    """
    with torch.no_grad():
        if is_unsharded(model):
            yield
            return
        try:
            # Parameters that an earlier forward left unsharded may be stale.
            reshard(model)
            unwrap_module(model).__dict__[_UNSHARDED_ATTRIBUTE] = True
            generate_in_lockstep(model, False)
            for unit in units_of(model):
                unit.set_reshard_after_forward(False, recurse=False)
                unit.unshard()
            yield
        finally:
            unwrap_module(model).__dict__.pop(_UNSHARDED_ATTRIBUTE, None)
            generate_in_lockstep(model, bool(units_of(model)))
            reshards = get_spec(model).strategy in ("full_shard", "hybrid_shard")
            # The first unit is the root, which stays unsharded after its forward.
            for index, unit in enumerate(units_of(model)):
                unit.set_reshard_after_forward(reshards and index > 0, recurse=False)
            reshard(model)


def generate_in_lockstep(model: nn.Module, needs_all_ranks: bool) -> None:
    """Tell models of transformers inside ``model`` if each forward needs all ranks.

    ``generate`` then runs forwards until the last rank is ready (``synced_gpus``), and models skip no layers at random.

    Mutates: an attribute of these models.
    """
    for module in model.modules():
        if is_transformers_model(module):
            module.__dict__["_is_fsdp_managed_module"] = needs_all_ranks


def is_unsharded(model: nn.Module) -> bool:
    """Return True while ``unshard_params`` is active for ``model``."""
    return _UNSHARDED_ATTRIBUTE in unwrap_module(model).__dict__


def full_params(source: TrainState | Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, full tensor) of every parameter, one tensor at a time, on every rank, for export and debugging.

    Args:
        source: a ``TrainState``, or tensors by name with parameter shardings, such as
            ``state.transform_states["ema"]["params"]``.

    Yields:
        Clean name and detached tensor of global shape on the device. Only the last yielded tensor is alive. Tied parameters are
        yielded once, as in ``state.params``.

    Collective: one all-gather per sharded tensor; every rank must iterate to the end.

    Example:
        for name, tensor in dt.full_params(state):
            print(name, tuple(tensor.shape), float(tensor.norm()))
    """
    tensors = source.params if isinstance(source, TrainState) else source
    for name, tensor in tensors.items():
        with spans.outermost_span("collective"):
            full = full_tensor(tensor.detach())
        yield name, full


def register_forward_methods(forward_methods: Iterable[tuple[nn.Module, str]]) -> None:
    """Unshard parameters around these methods of units. Mutates: the owning modules (one attribute each)."""
    # An evaluation without sharding imports this module, and an import of FSDP2 takes more than half of that of torch.
    from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

    for owner, name in forward_methods:
        assert isinstance(owner, FSDPModule)
        method = getattr(owner, name)
        register_fsdp_forward_method(owner, name)
        setattr(owner, name, MethodType(_use_plain_inside_forward(method, getattr(owner, name)), owner))


def _use_plain_inside_forward(plain_method: Any, unsharding_method: Any) -> Any:
    """Return ``unsharding_method``, or ``plain_method`` within a forward of the module.

    A nested unsharding call would reshard the parameters in the middle of the forward.
    """

    def method(owner: Any, *args: Any, **kwargs: Any) -> Any:
        return (plain_method if is_in_forward(owner) else unsharding_method)(*args, **kwargs)

    return method


def call_in_unit(layer: nn.Module, param: Tensor, fn: Callable[[Tensor], Tensor], value: Tensor, *, caller: str) -> Tensor:
    """Return ``fn(value)``, computed inside of the unit of ``layer``, as if ``fn`` were the forward of the unit.

    The unit gathers its parameters, casts ``value``, and reduces its gradients in backward. ``fn`` runs alone if the parameters
    are gathered already (inside of a forward of the unit, or after the forward of a root), or whole on each rank.

    Args:
        layer: module of a sharded or plain model, such as a linear layer that a forward of the model has not called.
        param: a parameter of ``layer``.
        fn: function that computes with the parameters of ``layer``. Its result is no view.
        value: input of ``fn``.
        caller: function for the error.

    Collective: as a forward of the unit.

    Raises:
        ConfigError: the parameters are sharded, and belong to no unit of a model of ``shard_model``.
    """
    unit: UnitForward | None = None
    if is_unit(layer) and groups_in_state(layer._get_fsdp_state()):
        unit = None if is_in_forward(layer) else UnitForward(layer)
    else:
        mesh = tensor_mesh(param)
        # Along ``tp`` a gathered parameter is sharded, too.
        if mesh is not None and not set(mesh.mesh_dim_names or MODEL_AXES) <= set(MODEL_AXES):
            unit = ModelUnits.unit_with_shards(param)
            if unit is None:
                raise ConfigError(
                    f"{caller}: the parameters must be gathered, or sharded by shard_model, got shards of "
                    f"{tuple(param.shape)} on axes {list(mesh.mesh_dim_names or ())}. Call it in the forward of the model."
                )
    return fn(value) if unit is None else unit.post_forward(fn(unit.pre_forward(value)))


def describe(model: nn.Module) -> str:
    """Return a table of the model's units, with parameters, bytes, dtypes, placements and totals.

    The table has one row per unit, a row for ignored parameters and a row for buffers. ``bytes`` counts full tensors. ``bytes
    here`` counts the storage of this rank between steps. ``computed`` and ``reduced`` are the dtypes of forward and of gradient
    reduction. A plain or replicated model without units is one row.

    >>> import dtrain as dt
    >>> print(dt.describe(torch.nn.Linear(2, 3)))
    plain model
    unit   class   tensors  parameters  bytes  bytes here  stored   computed  reduced  placement
    model  Linear        2           9   36 B        36 B  float32  float32   -        whole
    total                2           9   36 B        36 B

    Collective: none. Host sync: none.
    """
    spec = get_spec(model)
    names, rows = {id(module): name for name, module in modules_by_fqn(model)}, []
    for group in fsdp_param_groups(model):
        units = " + ".join(names.get(id(module)) or "model" for module in group.modules)
        kinds = " + ".join(type(module).__name__.removeprefix("FSDP") for module in group.modules)
        compute, reduce = map(_short, compute_dtypes(group))
        rows.append(_row(units, kinds, sharded_params(group), computed=compute, reduced=reduce))
    is_sharded = spec.mesh is not None
    reducer = getattr(unwrap_module(model).__dict__.get(GRAD_SYNC_ATTRIBUTE), "reducer", None)
    has_units = is_sharded and reducer is None
    whole = {name: p for name, p in parameters_by_fqn(model)[0].items() if not has_units or name in spec.ignored_params}
    unsharded = list(whole.values())
    if unsharded:
        label = ("ignored", "") if has_units else ("model", type(model).__name__)
        reduced = _dtypes(unsharded) if is_sharded else "-"
        if reducer is not None:
            reduced = ", ".join({_short(reducer.reduce_dtype(name, param)): None for name, param in whole.items()})
        rows.append(_row(*label, unsharded, computed=_dtypes(unsharded), reduced=reduced))
    params = [*(p for group in fsdp_param_groups(model) for p in sharded_params(group)), *unsharded]
    buffers = list(model.buffers())
    if buffers:
        rows.append(_row("buffers", "", buffers, computed="", reduced=_format_choices(spec) if is_sharded else "-"))
    total = _row("total", "", [*params, *buffers], computed="", reduced="")
    rows.append((*total[:6], "", "", "", ""))
    if spec.mesh is None:
        title = "plain model"
    else:
        shape = ", ".join(f"{name}={size}" for name, size in zip(spec.mesh.mesh_dim_names or (), spec.mesh.shape, strict=False))
        title = f"{spec.strategy} over {format_count(spec.data_ranks, 'rank')} ({shape}), accumulate={spec.accumulate}"
        title += f", buffers={_format_choices(spec)}"
        title += ", offload=params" if spec.compute_device else ""
    return "\n".join([title, *_table([_HEAD, *rows])])


def _format_choices(spec: ShardSpec) -> str:
    return ", ".join(dict.fromkeys(spec.buffers.values())) if isinstance(spec.buffers, Mapping) else spec.buffers or "broadcast"


def _row(name: str, kind: str, tensors: Sequence[Tensor], *, computed: str, reduced: str) -> tuple[str, ...]:
    count = sum(tensor.numel() for tensor in tensors)
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    local = sum(to_local(tensor).numel() * tensor.element_size() for tensor in tensors)
    places = ", ".join(dict.fromkeys(describe_placement(tensor) for tensor in tensors))
    sizes = str(len(tensors)), f"{count:,}", format_bytes(total), format_bytes(local)
    return name, kind, *sizes, _dtypes(tensors), computed, reduced, places


def _dtypes(tensors: Sequence[Tensor]) -> str:
    return ", ".join(dict.fromkeys(_short(tensor.dtype) for tensor in tensors))


def _short(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    # Numbers are in the columns 2 to 5.
    aligned = [f"{{:{'>' if 2 <= column <= 5 else '<'}{width}}}" for column, width in enumerate(widths)]
    return ["  ".join(aligned).format(*row).rstrip() for row in rows]
