"""Local SGD and DiLoCo: split a model into replicas that train separately, and join the replicas at intervals.

``local_sgd`` joins the replicas by their mean. ``diloco`` makes an outer step with the mean parameter delta.

1. A replica is an index of the mesh's ``dp_replicate`` (``hybrid_shard``: sharded over ``dp_shard``), or one data-parallel rank
   (``replicate``). ``split_replicas`` writes the replicas into ``state.spec.replica_info``, and changes nothing else.
2. While ``replica_info`` is set, a step sums gradients within a replica only: FSDP2's reduce-scatter without the following
   all-reduce, or an all-reduce over the replica's ranks for unsharded parameters. The step divides by the weight of the
   replica's samples. So a replica's gradient is that of the mean over its own samples. ``clip_by_norm`` and ``sam`` see norms
   of that gradient, because a parameter is sharded over ``dp_shard`` alone.
3. The clock, metrics, buffers and every decision (out of memory, not finite, no weight on any rank) remain those of all ranks.
   The records of a step are exchanged as usual, so no rank waits for a replica that decided differently. Local training saves
   the communication of gradients between replicas, not the synchronization of steps.
4. ``join_replicas`` averages all state that may differ: parameters, the optimizer's state, states of other transforms. After
   the join all replicas are equal bit for bit, so a checkpoint is valid for any number of replicas.
5. Before the join the replicas differ, and a checkpoint would store one replica's values. So ``save_sharded`` raises, also at
   the end of a round with ``optimizer_state="keep"``. ``join_replicas`` may be called at any step, for example when a run is
   asked to stop. Continuing after the join and resuming from a checkpoint of the joined state are the same, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from dtrain.arguments import check_choice
from dtrain.dist.dtensor import to_local
from dtrain.dist.incident import report_missing_ranks
from dtrain.dist.mesh import ReplicaInfo, axis_size, get_mesh
from dtrain.errors import ConfigError
from dtrain.fqn import parameters_by_fqn
from dtrain.schedules.durations import Duration
from dtrain.schedules.hyperparameters import hyperparameter
from dtrain.shard.grad_sync import grad_sync_of
from dtrain.shard.spec import ShardSpec
from dtrain.state import TrainState
from dtrain.step.step_clock import ends_interval
from dtrain.step.transform import GradFn, Transform, UpdateFn
from dtrain.typing import Batch, Metrics, Schedule, TransformState

_LOCAL_SGD = "local_sgd"
# Largest size of one all-reduce, the extra memory of an average.
_BUCKET_BYTES = 64 << 20
_DILOCO = "diloco"


def local_sgd(every: Duration | int | str, *, optimizer_state: Literal["average", "keep"] = "average") -> Transform:
    """Train each replica on its own samples, and replace all replicas by their mean at the end of every interval.

    The replicas are those of the mesh's ``dp_replicate`` with ``strategy="hybrid_shard"``, or all data-parallel ranks with
    ``"replicate"``. With one replica this is the plain step. Replicas exchange no gradients. Interval 1, plain SGD and batches
    of equal weight are data-parallel training. The mean weights all replicas equally, whatever number of samples they have
    seen.

    A round ends after the step in which the clock crosses a boundary of ``every``; ``state.crossed(every)`` is True then.
    Between boundaries the replicas differ, and ``save_sharded`` raises. Save at a boundary, or after
    ``state = dt.transforms.join_replicas(state)``, which averages at any step. Also call ``join_replicas`` at the end of a run,
    and after ``between`` has ended. List ``local_sgd`` first, before all transforms that may skip an update. Do not wrap it in
    ``every``, which would skip the last steps of rounds.

    Formula: ``param_k = update_k(param_k, grad_k)`` in each step and replica ``k``; at the end of an interval
    ``param_k = (param_1 + ... + param_K) / K``

    Args:
        every: length of a round: ``8`` steps, or a duration in any unit (``"1ep"``, ``"1e8tok"``).
        optimizer_state: ``"average"`` also averages the optimizer's state and the averages in other transforms' states at the
            end of a round, so a checkpoint there is exact. ``"keep"`` keeps the optimizer's state of each replica and sends the
            parameters only; a checkpoint then needs ``join_replicas`` at every step.

    Mutates: parameters, optimizer state and transform states, at the end of a round.
    Collective: in a step, those of a plain step without the all-reduce of gradients between replicas. At the end of a round one
    all-reduce between replicas per dtype and 64 MiB of this rank's shards.
    Host sync: none.

    Example:
        >>> import dtrain as dt
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> _ = torch.nn.init.constant_(model.weight, 2.0)
        >>> loss_fn = dt.mean_loss(lambda model, x: model(x).mean(), weight=len)
        >>> step = dt.compose_step(loss_fn, [dt.transforms.local_sgd(8)])
        >>> state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.25))
        >>> state, _ = step(state, torch.tensor([[3.0], [1.0]]))  # the gradient is 2
        >>> model.weight.item()
        1.5

    Raises:
        ConfigError: ``every`` is not a duration, or ``optimizer_state`` is unknown. From ``Step.init`` on: only part of the
            parameters is selected (``masked``), or the strategy shards over the mesh's ``dp_replicate``.

    Source: Stich 2019, arXiv:1805.09767, algorithm 1; averaging momentum, Yu et al. 2019, arXiv:1905.03817, algorithm 1.

    Suggested values:
        CIFAR-10, ResNet-20, 16 replicas: ``every=16``, from the first decay of the rate on (Lin et al. 2020,
            arXiv:1808.07217, post-local SGD)
        ImageNet at scale: a short ``every``; longer intervals lose accuracy (Ortiz et al. 2021, arXiv:2110.08133)
    When not to use: the network is fast, or replicas have very different data. For language models prefer ``diloco``, whose
        outer momentum needs fewer averages.
    """
    interval = Duration.parse(every)
    check_choice(_LOCAL_SGD, "optimizer_state", optimizer_state, ("average", "keep"))

    def init(state: TrainState) -> TransformState:
        check_replicas(state, _LOCAL_SGD)
        return {}

    def update(inner: UpdateFn) -> UpdateFn:
        def update_fn(state: TrainState, metrics: Metrics) -> tuple[TrainState, Metrics]:
            state, metrics = inner(state, metrics)
            if state.spec.replica_info is not None and ends_interval(state, interval):
                average_params_(state, _LOCAL_SGD)
                state = join_remaining_state(state, caller=_LOCAL_SGD) if optimizer_state == "average" else state
            return state, metrics

        return update_fn

    return Transform(name=_LOCAL_SGD, init=init, grad=grad_per_replica, update=update, uses_grad=False)


def split_replicas(state: TrainState) -> TrainState:
    """Return the state with split replicas: from now on each replica sums gradients over its own ranks only.

    Returns ``state`` itself if there is one replica only, or if the replicas are split already. Nothing is changed or sent.

    Formula: ``grad_k = sum(losses of replica k) / sum(weights of replica k)`` for each replica ``k``, in place of the sums over
    all

    Example:
        >>> import dtrain as dt
        >>> model = torch.nn.Linear(1, 1)
        >>> step = dt.compose_step(dt.mean_loss(lambda model, x: model(x).mean(), weight=len))
        >>> state = step.init(model, torch.optim.SGD(model.parameters()))
        >>> dt.transforms.split_replicas(state) is state  # one process has one replica
        True

    Raises:
        ConfigError: ``full_shard`` or ``shard_grad_op`` on a mesh with ``dp_replicate`` above 1, which shard over that axis
            too; or ``replicate`` with context parallelism, where a rank has parts of samples only.

    Source: Stich 2019, arXiv:1805.09767, algorithm 1.
    """
    if state.spec.replica_info is not None:
        return state
    replicas = _find_replicas(state.spec)
    return state if replicas is None else state._replace(spec=replace(state.spec, replica_info=replicas))._recorded()


def join_replicas(state: TrainState) -> TrainState:
    """Return the state with all replicas replaced by their mean.

    The mean covers the optimizer's parameters, the optimizer's state, and floating-point tensors in the states of transforms,
    such as averages of the parameters. Of the optimizer's state only floating-point tensors are averaged. A scalar state of a
    larger parameter is a count, which is equal on all replicas. Returns ``state`` itself if the replicas are not split. In a
    loop with ``local_sgd`` or ``diloco``, call ``join_replicas`` before a checkpoint within a round and at the end. Without
    these transforms, call ``split_replicas`` before each step and ``join_replicas`` after several steps for local SGD.

    Formula: ``x = (x_1 + ... + x_K) / K`` for each such tensor of ``K`` replicas

    Mutates: parameters, optimizer state, transform states. ``state`` must not be used again.
    Collective: one all-reduce between replicas per dtype and 64 MiB of this rank's shards, in at least float32.
    Host sync: none.

    Example:
        >>> import dtrain as dt
        >>> model = torch.nn.Linear(1, 1)
        >>> step = dt.compose_step(dt.mean_loss(lambda model, x: model(x).mean(), weight=len))
        >>> state = step.init(model, torch.optim.SGD(model.parameters()))
        >>> state = dt.transforms.split_replicas(state)
        >>> dt.transforms.join_replicas(state) is state  # one process has one replica
        True

    Raises:
        StaleStateError: ``state`` was stepped already.
        DistError: a replica does not call the function.

    Source: Stich 2019, arXiv:1805.09767, algorithm 1; of momentum, Yu et al. 2019, arXiv:1905.03817, algorithm 1.
    """
    state._check_not_stale("join_replicas")
    if state.spec.replica_info is None:
        return state
    average_params_(state, "join_replicas")
    return join_remaining_state(state, caller="join_replicas")


def average_replicas_(tensors: Sequence[Tensor], replicas: ReplicaInfo | None, *, device: torch.device | None = None) -> None:
    """Replace every tensor by its mean over all replicas, on the local shards.

    Formula: ``tensor = (tensor_1 + ... + tensor_K) / K`` for ``K`` replicas

    Args:
        tensors: floating-point tensors or DTensors; same shapes, dtypes and order on all replicas.
        replicas: ``state.spec.replica_info``; None stands for one replica, whose mean is the tensor itself.
        device: device of the sum, for tensors on another device; None uses the tensors' device.

    Mutates: ``tensors``.
    Collective: one all-reduce between replicas per dtype and 64 MiB, in at least float32; none for one replica.
    Host sync: none; with ``device`` the syncs of the copies in both directions.

    Example:
        >>> import dtrain as dt
        >>> weight = torch.tensor([1.5])
        >>> dt.transforms.average_replicas_([weight], None)
        >>> weight.item()
        1.5

    Source: Stich 2019, arXiv:1805.09767, algorithm 1.
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
    """Return the floating-point parameters of the optimizer by name: the parameters that differ between split replicas."""
    optimized = {id(param) for group in state.optimizer.param_groups for param in group["params"]}
    return {name: param for name, param in state.params.items() if id(param) in optimized and param.is_floating_point()}


def average_params_(state: TrainState, caller: str) -> None:
    """Replace the parameters by their mean over all replicas. Mutates: parameters. Collective: as ``average_replicas_``."""
    # A forward may have left unsharded copies of the parameters.
    grad_sync_of(state.model).reshard()
    with report_missing_ranks(caller):
        average_replicas_(list(optimizer_params(state).values()), state.spec.replica_info, device=state.device)


def join_remaining_state(state: TrainState, *, caller: str, except_for: str = "") -> TrainState:
    """Average the optimizer state and the transform states, except the state of ``except_for``, after the parameters.

    Mutates: optimizer state, transform states; ``state`` must not be used again. Collective: as ``average_replicas_``.
    """
    others = {name: content for name, content in state.transform_states.items() if name != except_for}
    with report_missing_ranks(caller):
        average_replicas_(
            [*_optimizer_tensors(state), *_transform_state_tensors(others)], state.spec.replica_info, device=state.device
        )
    return state._next(spec=replace(state.spec, replica_info=None))


def grad_per_replica(inner: GradFn) -> GradFn:
    """Return ``inner`` with split replicas: each replica's gradient is that of its own samples."""

    def grad_fn(state: TrainState, batch: Batch, *, microbatch_size: int | None = None) -> tuple[TrainState, Metrics]:
        return inner(split_replicas(state), batch, microbatch_size=microbatch_size)

    return grad_fn


def check_replicas(state: TrainState, caller: str) -> None:
    """Check that the model has replicas to train apart, and all its parameters.

    Raises:
        ConfigError: ``state`` was narrowed by ``masked``, so the other parameters would never be averaged; or the strategy has
            no replicas.
    """
    if len(state.params) < len(parameters_by_fqn(state.model)[0]):
        raise ConfigError(
            f"{caller}: the parameters must be all parameters of the model, got a part. List {caller} without masked."
        )
    split_replicas(state)


def _find_replicas(spec: ShardSpec) -> ReplicaInfo | None:
    """Return the replicas of a model with this ``spec``; None for one replica."""
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
                f"split_replicas: strategy must be 'hybrid_shard' with dp_replicate={axis_size(mesh, 'dp_replicate')}, got "
                f"{spec.strategy!r}, which shards over dp_replicate too, so there is one replica. "
                "Use strategy='hybrid_shard'."
            )
        return None
    if axis_size(mesh, "cp") > 1:
        raise ConfigError(
            f"split_replicas: strategy must be 'hybrid_shard' with cp={axis_size(mesh, 'cp')}, got 'replicate', whose replicas "
            "have parts of samples only. "
            "Use strategy='hybrid_shard', or cp=1."
        )
    if spec.data_ranks == 1:
        return None
    tensor = {"tp": axis_size(mesh, "tp")} if axis_size(mesh, "tp") > 1 else {}
    # shard_model has created this mesh.
    replica_mesh = get_mesh({"dp_all": spec.data_ranks, "dp_one": 1, **tensor})
    within = (replica_mesh.get_group("tp"),) if tensor else ()
    return ReplicaInfo(
        index=spec.data_rank, count=spec.data_ranks, across_group=replica_mesh.get_group("dp_all"), within_groups=within
    )


def _optimizer_tensors(state: TrainState) -> Iterator[Tensor]:
    for param, content in state.optimizer.state.items():
        for key, value in content.items():
            if not isinstance(value, Tensor) or not value.is_floating_point() or key == "step":
                continue
            # A scalar state of a larger parameter is a count, which may be on the host.
            if value.ndim or not param.ndim:
                yield value


def _transform_state_tensors(tree: Mapping[str, Any]) -> Iterator[Tensor]:
    for value in tree.values():
        if isinstance(value, Mapping):
            yield from _transform_state_tensors(value)
        elif isinstance(value, Tensor) and value.is_floating_point():
            yield value


def _buckets(shards: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Group nonempty shards by dtype and device, and split each group into buckets of one all-reduce."""
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


def outer_step_(
    outer: Sequence[Tensor], momenta: Sequence[Tensor], deltas: Sequence[Tensor], *, lr: float, momentum: float
) -> None:
    """Make one step of Nesterov SGD on ``outer`` with ``deltas`` as gradients, on the local shards.

    Formula: ``m = momentum * m + delta``, then ``outer = outer - lr * (delta + momentum * m)``

    Args:
        outer: parameters after the previous outer step.
        momenta: momentum of each parameter; zeros at first.
        deltas: ``outer - mean(inner)``, with the mean of the inner parameters over replicas.
        lr: outer learning rate.
        momentum: number in ``[0, 1)``.

    Mutates: ``outer``, ``momenta``. Collective: none. Host sync: none.

    Example:
        >>> import dtrain as dt
        >>> outer, m = (
        ...     torch.tensor([1.0], dtype=torch.float64),
        ...     torch.zeros(1, dtype=torch.float64),
        ... )
        >>> delta = torch.tensor([0.1], dtype=torch.float64)
        >>> dt.transforms.outer_step_([outer], [m], [delta], lr=0.7, momentum=0.9)
        >>> round(outer.item(), 9), m.item()  # 1 - 0.7 * (0.1 + 0.9 * 0.1)
        (0.867, 0.1)

    Source: Douillard et al. 2023, arXiv:2311.08105, algorithm 1; the momentum as in ``torch.optim.SGD(nesterov=True)``.
    """
    if not outer:
        return
    with torch.no_grad():
        targets, velocities, grads = ([to_local(tensor) for tensor in tensors] for tensors in (outer, momenta, deltas))
        torch._foreach_mul_(velocities, momentum)
        torch._foreach_add_(velocities, grads)
        torch._foreach_add_(targets, grads, alpha=-lr)
        torch._foreach_add_(targets, velocities, alpha=-lr * momentum)


def diloco(
    every: Duration | int | str,
    *,
    lr: float | Schedule = 0.7,
    momentum: float | Schedule = 0.9,
    optimizer_state: Literal["average", "keep"] = "average",
) -> Transform:
    """Train each replica on its own samples, and make an outer step with the mean parameter delta at the end of every interval.

    The run's optimizer is the inner optimizer (AdamW in the paper). The outer optimizer is Nesterov SGD. Its gradient is the
    change of the parameters since the last outer step, averaged over replicas. All replicas continue from its result. Replicas,
    the end of a round, the averaged state and the steps with a checkpoint are as in ``local_sgd``. List ``diloco`` first, too.
    With one replica it is a lookahead optimizer. If steps are made without the transform (before ``between`` starts), the first
    round starts from their result. The outer momentum still moves parameters that ``freeze`` freezes later, until the momentum
    has decayed.

    The transform state is ``{"params": {name: outer}, "momentum": {name: m}, "next": int}``: parameters at the last outer step
    and the outer momentum, laid out like the parameters, in their dtype; and the step that continues the round. The state takes
    the memory of two copies of this rank's shards, and an outer step the memory of one more copy.

    Formula: at the end of an interval ``delta = outer - (param_1 + ... + param_K) / K``, ``m = momentum * m + delta``,
    ``outer = outer - lr * (delta + momentum * m)``, ``param_k = outer``

    Args:
        every: length of a round: a number of steps (500 in the paper) or a duration in any unit.
        lr: outer learning rate, >= 0, or a schedule. ``lr=1, momentum=0`` is ``local_sgd``.
        momentum: outer momentum in ``[0, 1)``, or a schedule. Both schedules are evaluated at the last step of a round.
        optimizer_state: ``"average"`` averages the state of the inner optimizer at the end of a round, so a checkpoint can
            store the round's end and any number of replicas can resume. ``"keep"`` keeps the state of each replica, as in the
            paper. The paper found no gain from averaging AdamW's state, which sends three times as much in all.

    Mutates: parameters, optimizer state and transform states, at the end of a round.
    Collective: as ``local_sgd``.
    Host sync: none.

    Example:
        >>> import dtrain as dt
        >>> model = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
        >>> _ = torch.nn.init.constant_(model.weight, 1.0)
        >>> loss_fn = dt.mean_loss(lambda model, x: model(x).mean(), weight=len)
        >>> step = dt.compose_step(loss_fn, [dt.transforms.diloco(2)])
        >>> state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.05))
        >>> for _ in range(2):  # the gradient is 1: inner steps to 0.95, then 0.9
        ...     state, _ = step(state, torch.ones(4, 1, dtype=torch.float64))
        >>> round(model.weight.item(), 9)  # 1 - 0.7 * (0.1 + 0.9 * 0.1)
        0.867

    Raises:
        ConfigError: as ``local_sgd``; ``lr`` is negative or not finite, or ``momentum`` is outside of ``[0, 1)``. Schedules are
            checked in each step, before the step changes anything.

    Source: Douillard et al. 2023, arXiv:2311.08105, algorithm 1 and section 3.

    Suggested values:
        C4, decoder of 150M, 8 replicas: ``every=500``, ``lr=0.7``, ``momentum=0.9`` (Douillard et al. 2023, section 3)
        C4, decoder of 1.1B, 4 replicas: ``every=125``, ``lr=0.7``, ``momentum=0.9`` (Jaghouar et al. 2024, arXiv:2407.07852)
    When not to use: the network between all ranks is fast: a gradient reduction in every step then costs little, and its result
        does not depend on the number of replicas.
    """
    interval = Duration.parse(every)
    lr_at = hyperparameter(lr, "diloco: lr", "[0, inf)")
    momentum_at = hyperparameter(momentum, "diloco: momentum", "[0, 1)")
    check_choice(_DILOCO, "optimizer_state", optimizer_state, ("average", "keep"))

    def update(inner: UpdateFn) -> UpdateFn:
        def update_fn(state: TrainState, metrics: Metrics) -> tuple[TrainState, Metrics]:
            outer_lr, outer_momentum = lr_at(state.clock), momentum_at(state.clock)
            state, metrics = inner(_start_round_if_needed(state), metrics)
            state = state.with_transform_state(_DILOCO, {**state.transform_states[_DILOCO], "next": state.step + 1})
            if ends_interval(state, interval):
                _outer_step_(state, lr=outer_lr, momentum=outer_momentum)
                if state.spec.replica_info is not None and optimizer_state == "average":
                    state = join_remaining_state(state, caller=_DILOCO, except_for=_DILOCO)
            return state, metrics

        return update_fn

    return Transform(
        name=_DILOCO,
        init=_init_diloco,
        grad=grad_per_replica,
        update=update,
        uses_grad=False,
        hyperparameters=(lr_at, momentum_at),
    )


def _init_diloco(state: TrainState) -> TransformState:
    check_replicas(state, _DILOCO)
    momenta = {name: torch.zeros_like(param.detach()) for name, param in optimizer_params(state).items()}
    return {"params": _clone_params(state), "momentum": momenta, "next": state.step}


def _clone_params(state: TrainState) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in optimizer_params(state).items()}


def _start_round_if_needed(state: TrainState) -> TrainState:
    """Return the state with a current round. A new round starts here if steps were made without this transform."""
    content = state.transform_states[_DILOCO]
    return (
        state
        if content["next"] == state.step
        else state.with_transform_state(_DILOCO, {**content, "params": _clone_params(state)})
    )


def _outer_step_(state: TrainState, *, lr: float, momentum: float) -> None:
    """Make the outer step. Mutates: parameters and the transform state. Collective: as ``average_replicas_``."""
    outer, momenta = state.transform_states[_DILOCO]["params"], state.transform_states[_DILOCO]["momentum"]
    params = [to_local(state.params[name]) for name in outer]
    # A forward may have left unsharded copies of the parameters.
    grad_sync_of(state.model).reshard()
    with torch.no_grad():
        deltas = torch._foreach_sub([to_local(tensor) for tensor in outer.values()], params)
        with report_missing_ranks(_DILOCO):
            average_replicas_(deltas, state.spec.replica_info, device=state.device)
        outer_step_(list(outer.values()), list(momenta.values()), list(deltas), lr=lr, momentum=momentum)
        if params:
            torch._foreach_copy_(params, [to_local(tensor) for tensor in outer.values()])
