"""Copies of a model that train apart for a while, and become one again.

How it works, and why so:

1. A copy is what one place of the mesh's ``dp_replicate`` holds (``hybrid_shard``: cut over ``dp_shard``), or one data-parallel
   rank (``replicate``). ``split_replicas`` writes them into ``state.spec.apart``; nothing else is switched on or off.
2. While it is there, a step sums gradients within a copy only (FSDP2's reduce-scatter, without the all-reduce behind it; for
   whole parameters an all-reduce over the copy's ranks) and divides by the weight of that copy's samples. So a copy's gradient
   is that of the mean over its own samples; ``clip_by_norm`` and ``sam`` see norms of that gradient, since a parameter is cut
   over ``dp_shard`` alone.
3. The clock, metrics, buffers, and every decision (out of memory, not finite, no weight anywhere) stay those of all ranks: the
   records of a step are exchanged as ever, so nobody waits for a copy that went another way. What is saved is the gradient's
   way between copies, not the lockstep.
4. ``join_replicas`` averages whatever may differ: parameters, the optimizer's state, slices of other transforms. After it all
   copies are equal in every bit, so a checkpoint means something, and fits any number of copies.
5. In between they differ, and a checkpoint holds one copy of everything: ``save_sharded`` refuses (in one line), also for an
   end of a round at which the optimizer's state is kept apart. ``join_replicas`` may be called at any step, which is what a run
   does that is told to stop; going on from there, and resuming from what was saved there, are the same, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dtrain.dist.mesh import ReplicaInfo, axis_size, get_mesh
from dtrain.dist.timeout_report import report_missing_ranks
from dtrain.dtensor import to_local
from dtrain.errors import ConfigError
from dtrain.fqn import parameters_by_fqn
from dtrain.shard.grad_sync import grad_sync_of
from dtrain.state import ShardSpec, TrainState

_BUCKET_BYTES = 64 << 20  # of one all-reduce: what it takes besides the tensors


def split_replicas(state: TrainState) -> TrainState:
    """The state with its copies of the model apart: from now on each sums gradients over its own ranks, and goes its own way.

    It is ``state`` itself where there is one copy only, or where they are apart already. Nothing is changed or sent.

    Formula: ``grad_k = sum(losses of copy k) / sum(weights of copy k)`` for each copy ``k``, in place of the sums over all

    Raises:
        ConfigError: ``full_shard`` or ``shard_grad_op`` on a mesh with ``dp_replicate`` above 1, which cut over that axis, too;
            or ``replicate`` with context parallelism, where a rank alone has no whole samples.

    Source: Stich 2019, arXiv:1805.09767, algorithm 1.

    Example:
        >>> from dtrain.losses import mean_loss
        >>> from dtrain.step.compose import compose_step
        >>> model = torch.nn.Linear(1, 1)
        >>> step = compose_step(mean_loss(lambda model, x: model(x).mean(), weight=len))
        >>> state = step.init(model, torch.optim.SGD(model.parameters()))
        >>> split_replicas(state) is state  # one process has one copy
        True
    """
    if state.spec.replica_info is not None:
        return state
    copies = _find_replicas(state.spec)
    return state if copies is None else state._replace(spec=replace(state.spec, replica_info=copies))


def join_replicas(state: TrainState) -> TrainState:
    """The state with its copies of the model made one: the mean of all that may differ between them.

    That is the parameters which the optimizer holds, its own state (floating-point tensors; a single number of a larger
    parameter is a count, and alike), and floating-point tensors in the slices of transforms, such as averages of the
    parameters. It is ``state`` itself where the copies are not apart. In a loop with ``local_sgd`` or ``diloco``, call it
    before a checkpoint in the middle of a round, and at the end. By hand, ``split_replicas`` before each step and this after
    some are local SGD.

    Formula: ``x = (x_1 + ... + x_K) / K`` for each such tensor of ``K`` copies

    Mutates: parameters, optimizer state, slices; spends ``state``.
    Collective: one all-reduce between copies per dtype and 64 MiB of this rank's shards, in float32 at least.
    Host sync: none.

    Raises:
        StaleStateError: ``state`` was stepped already.
        DistError: a copy does not come.

    Source: Stich 2019, arXiv:1805.09767, algorithm 1; of momentum, Yu et al. 2019, arXiv:1905.03817, algorithm 1.

    Example:
        >>> from dtrain.losses import mean_loss
        >>> from dtrain.step.compose import compose_step
        >>> model = torch.nn.Linear(1, 1)
        >>> step = compose_step(mean_loss(lambda model, x: model(x).mean(), weight=len))
        >>> state = step.init(model, torch.optim.SGD(model.parameters()))
        >>> join_replicas(split_replicas(state)) is state  # one process has one copy
        True
    """
    state._check_not_stale("join_replicas")
    if state.spec.replica_info is None:
        return state
    average_params_(state, "join_replicas")
    return join_remaining_state(state, caller="join_replicas")


def average_replicas_(tensors: Sequence[Tensor], replicas: ReplicaInfo | None, *, device: torch.device | None = None) -> None:
    """Replace every tensor by its mean over the copies of the model, on the local shards.

    Formula: ``tensor = (tensor_1 + ... + tensor_K) / K`` for ``K`` copies

    Args:
        tensors: floating-point ones, plain or DTensors; of one shape and dtype on all copies, in one order.
        replicas: ``state.spec.apart``; None stands for one copy, of which the mean is itself.
        device: where the sum is made, for tensors that are kept on another one; None: where they are.

    Mutates: ``tensors``.
    Collective: one all-reduce between copies per dtype and 64 MiB, in float32 at least; none for one copy.
    Host sync: none; with ``device`` those of the copies to and fro.

    Source: Stich 2019, arXiv:1805.09767, algorithm 1.

    Example:
        >>> weight = torch.tensor([1.5])
        >>> average_replicas_([weight], None)
        >>> weight.tolist()
        [1.5]
    """
    if replicas is None:
        return
    with torch.no_grad():
        for bucket in _buckets([to_local(tensor) for tensor in tensors]):
            flat = torch.cat([shard.reshape(-1) for shard in bucket])
            flat = flat.to(device or flat.device, torch.promote_types(flat.dtype, torch.float32))
            dist.all_reduce(flat, group=replicas.across_group)
            flat.div_(replicas.count)
            pieces = flat.split([shard.numel() for shard in bucket])
            torch._foreach_copy_(bucket, [piece.view(shard.shape) for piece, shard in zip(pieces, bucket, strict=True)])


def optimizer_params(state: TrainState) -> dict[str, Tensor]:
    """The parameters that the optimizer may change, by name: those in which copies that train apart differ."""
    known = {id(param) for group in state.optimizer.param_groups for param in group["params"]}
    return {name: param for name, param in state.params.items() if id(param) in known and param.is_floating_point()}


def average_params_(state: TrainState, caller: str) -> None:
    """Give all copies the mean of the parameters. Mutates: parameters. Collective: as ``average_replicas_``."""
    grad_sync_of(state.model).reshard()  # a forward may have left gathered copies of them
    with report_missing_ranks(caller):
        average_replicas_(list(optimizer_params(state).values()), state.spec.replica_info, device=state.device)


def join_remaining_state(state: TrainState, *, caller: str, except_for: str = "") -> TrainState:
    """The state of copies whose parameters are equal, with the rest made equal, too, except for the slice of ``except_for``.

    Mutates: optimizer state, slices; spends ``state``. Collective: as ``average_replicas_``.
    """
    others = {name: content for name, content in state.transform_states.items() if name != except_for}
    with report_missing_ranks(caller):
        average_replicas_(
            [*_optimizer_tensors(state), *_transform_state_tensors(others)], state.spec.replica_info, device=state.device
        )
    return state._next(spec=replace(state.spec, replica_info=None))


def check_not_masked(state: TrainState, caller: str) -> None:
    """Refuse to train a part of the parameters apart: the others would never be made one again.

    Raises:
        ConfigError: ``state`` was narrowed by ``masked``.
    """
    if len(state.params) < len(parameters_by_fqn(state.model)[0]):
        raise ConfigError(
            f"{caller}: copies train apart in all parameters or in none, got a part of them; list it without masked"
        )


def _find_replicas(spec: ShardSpec) -> ReplicaInfo | None:
    """The copies of a model that is laid out so; None for one."""
    mesh = spec.mesh
    if mesh is None or spec.strategy == "none":
        return None
    if spec.strategy == "hybrid_shard":
        within = tuple(mesh.get_group(axis) for axis in range(1, mesh.ndim) if mesh.size(axis) > 1)
        return ReplicaInfo(
            index=mesh.get_local_rank(0), count=mesh.size(0), across_group=mesh.get_group(0), within_groups=within
        )
    if spec.strategy != "replicate":
        if axis_size(mesh, "dp_replicate") > 1:
            raise ConfigError(
                f"split_replicas: strategy={spec.strategy!r} cuts over dp_replicate={axis_size(mesh, 'dp_replicate')} as well, so "
                "there is one copy of the model; use strategy='hybrid_shard'"
            )
        return None
    if axis_size(mesh, "cp") > 1:
        raise ConfigError(
            f"split_replicas: with cp={axis_size(mesh, 'cp')} a copy on one rank has no whole samples; use strategy='hybrid_shard'"
        )
    if spec.data_ranks == 1:
        return None
    tensor = {"tp": axis_size(mesh, "tp")} if axis_size(mesh, "tp") > 1 else {}
    lines = get_mesh({"dp_all": spec.data_ranks, "dp_one": 1, **tensor})  # the one that shard_model has made
    within = (lines.get_group("tp"),) if tensor else ()
    return ReplicaInfo(
        index=spec.data_rank, count=spec.data_ranks, across_group=lines.get_group("dp_all"), within_groups=within
    )


def _optimizer_tensors(state: TrainState) -> Iterator[Tensor]:
    for param, content in state.optimizer.state.items():
        for key, value in content.items():
            if not isinstance(value, Tensor) or not value.is_floating_point() or key == "step":
                continue
            if value.ndim or not param.ndim:  # else it follows from the count of steps, and may be on the host
                yield value


def _transform_state_tensors(tree: Mapping[str, Any]) -> Iterator[Tensor]:
    for value in tree.values():
        if isinstance(value, Mapping):
            yield from _transform_state_tensors(value)
        elif isinstance(value, Tensor) and value.is_floating_point():
            yield value


def _buckets(shards: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Those of one dtype and device together, as many as an all-reduce takes; those without elements are left out."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for shard in shards:
        if shard.numel():
            kinds.setdefault((shard.dtype, shard.device), []).append(shard)
    for same in kinds.values():
        bucket: list[Tensor] = []
        size = 0
        for shard in same:
            if bucket and size + shard.numel() * shard.element_size() > _BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
            bucket.append(shard)
            size += shard.numel() * shard.element_size()
        yield bucket
