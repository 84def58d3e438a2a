"""Offload of activations and of parameters to host memory."""

import gc

import pytest
import torch
from torch import Tensor, nn

from dtrain.checkpoint.load import load_sharded
from dtrain.checkpoint.save import save_sharded
from dtrain.dist.dtensor import to_local
from dtrain.dist.init import get_dist_info
from dtrain.dist.mesh import build_mesh
from dtrain.errors import ConfigError, StepError
from dtrain.shard.activations import ActivationOffloader, offload_activations
from dtrain.shard.fsdp import shard_model
from dtrain.shard.fsdp2_private import fsdp_param_groups
from dtrain.shard.materialize import materialize
from dtrain.shard.spec import get_spec
from dtrain.shard.unshard import describe, full_params
from dtrain.step.compose import compose_step
from dtrain.step.evaluate import evaluate
from dtrain.transforms.gradients.clipping import clip_by_norm
from dtrain.transforms.weights.averaging import ema
from shard import models

X = torch.randn(4, 8)


def taken(offloader: ActivationOffloader, module: nn.Module, run) -> tuple[list[bool], Tensor]:
    """Return True for each tensor saved by ``run`` that was offloaded, in order; and the result of ``run``."""
    offloaded: list[bool] = []
    put = offloader._pack

    def watched(tensor, stays):
        offloaded_tensor = put(tensor, stays)
        offloaded.append(offloaded_tensor is not tensor)
        return offloaded_tensor

    offloader._pack = watched  # type: ignore[method-assign]
    with offloader.offload_saved_tensors(module):
        out = run()
    return offloaded, out


def test_parameters_views_and_small_tensors_are_not_offloaded():
    layer = nn.Linear(8, 8)
    offloader = ActivationOffloader(min_bytes=X.nbytes, copies_on_cpu=True)
    offloaded, out = taken(offloader, layer, lambda: layer(X.clone().requires_grad_()))
    assert sorted(offloaded) == [False, True], "the weight's view, and the input"
    offloaded, out = taken(
        ActivationOffloader(min_bytes=X.nbytes + 1, copies_on_cpu=True), layer, lambda: layer(X.clone().requires_grad_())
    )
    assert offloaded == [False, False]
    assert out.requires_grad


def test_cpu_tensors_are_not_offloaded():
    layer = nn.Linear(8, 8)
    offloaded, _ = taken(ActivationOffloader(min_bytes=0), layer, lambda: layer(X.clone().requires_grad_()))
    assert offloaded == [False, False]


def test_tensor_saved_by_several_operators_is_offloaded_once():
    offloader = ActivationOffloader(min_bytes=0, copies_on_cpu=True)
    x = X.clone().requires_grad_()
    with offloader.offload_saved_tensors(nn.Identity()):
        h = x * 2
        out = h.sin() + h.cos() + h.exp().sum()
    tensors = list(offloader._streams[torch.device("cpu")]._offloaded.values())
    assert len([ref for ref in tensors if ref() is not None]) == 2, "the input of sin and cos, and the output of exp"
    out.sum().backward()
    torch.testing.assert_close(x.grad, 2 * ((2 * X).cos() - (2 * X).sin() + 32 * (2 * X).exp()))


@pytest.mark.parametrize(
    "make",
    [lambda x: x.t(), lambda x: x[:, ::2], lambda x: x.expand(3, 4, 8), lambda x: x.to(torch.bfloat16)],
    ids=["turned", "with gaps", "expanded", "of another dtype"],
)
def test_fetched_tensor_equals_the_offloaded_tensor(make):
    offloader = ActivationOffloader(min_bytes=0, copies_on_cpu=True)
    tensor = make(X)
    offloaded_tensor = offloader._pack(tensor, set())
    back = offloaded_tensor if isinstance(offloaded_tensor, Tensor) else offloaded_tensor.fetch()
    assert torch.equal(back, tensor)
    assert back.dtype == tensor.dtype


def test_previously_offloaded_tensors_are_fetched_ahead():
    offloader = ActivationOffloader(min_bytes=0, copies_on_cpu=True)
    tensors = [offloader._pack(torch.full((4,), float(number)), set()) for number in range(6)]
    tensors[5].fetch()
    assert [offloaded_tensor._fetched is not None for offloaded_tensor in tensors] == [False, False, False, True, True, False]
    assert [offloaded_tensor.fetch()[0].item() for offloaded_tensor in reversed(tensors)] == [5, 4, 3, 2, 1, 0]


def test_in_place_change_of_a_saved_tensor_raises():
    offloader = ActivationOffloader(min_bytes=0, copies_on_cpu=True)
    with offloader.offload_saved_tensors(nn.Identity()):
        h = X.clone().requires_grad_() * 2
        out = h.sin().sum()
        h.add_(1.0)
    with pytest.raises(StepError, match=r"a saved tensor \[4, 8\] was modified in place before backward"):
        out.backward()


def test_in_flight_originals_are_bounded_and_freed_with_the_graph():
    offloader = ActivationOffloader(min_bytes=0, copies_on_cpu=True)
    tensors = [offloader._pack(torch.full((4,), float(number)), set()) for number in range(50)]
    assert [number for number, offloaded_tensor in enumerate(tensors) if offloaded_tensor.is_in_flight] == [46, 47, 48, 49]
    streams = offloader._streams[torch.device("cpu")]
    del tensors
    gc.collect()
    assert [ref for ref in streams._in_flight if ref() is not None] == []
    assert len(streams._offloaded) <= 32


def test_activation_offload_on_cpu_keeps_gradients():
    plain, net = (nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)) for _ in range(2))
    net.load_state_dict(plain.state_dict())
    offload_activations(net, blocks=nn.Linear, min_bytes=0)
    for model in (plain, net):
        model(X).sum().backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(plain.parameters(), net.parameters(), strict=True))


# Parameters and optimizer


def trained(name: str, strategy: str, offload: str | None, meta: bool) -> list[Tensor]:
    mesh = build_mesh(dp_replicate=2) if strategy == "hybrid_shard" else build_mesh()
    if meta:
        with torch.device("meta"):
            net = models.CASES[name].make().double()
    else:
        net = models.make(name)
    net = shard_model(net, mesh, strategy=strategy, offload=offload, **models.CASES[name].options)
    net = materialize(net, seed=0) if meta else net
    # FSDP2 replicates offloaded parameters. The norm of its DTensors is rounded in another way than that of plain tensors.
    clipping = [] if strategy == "replicate" else [clip_by_norm(0.5)]
    step = compose_step(models.CASES[name].loss, [*clipping, ema(0.9)])
    state = step.init(net, torch.optim.AdamW(net.parameters(), lr=0.01, foreach=False))
    share = models.SAMPLES // get_dist_info().world_size
    mine = slice(get_dist_info().rank * share, (get_dist_info().rank + 1) * share)
    batch = {key: value[mine] for key, value in models.batch(name, models.WEIGHTS).items()}
    for _ in range(3):
        state, _ = step(state, batch)
    loss = evaluate(net, [batch], models.CASES[name].loss)["loss"].total
    assert state.device == get_dist_info().device
    assert all(group.offload_policy.__class__.__name__.startswith("CPU") is bool(offload) for group in fsdp_param_groups(net))
    assert get_spec(net).compute_device == (get_dist_info().device if offload else None)
    assert all(to_local(p).device.type == "cpu" for p in net.parameters())
    averages = [value for _, value in full_params(state.transform_states["ema"]["params"])]
    return [*(value.clone() for _, value in full_params(state)), *averages, loss]


def offloaded(strategy: str) -> dict[str, bool]:
    cases = [("called twice", False), ("called twice", True), ("left out", False), ("tied across blocks", False)]
    equal = {}
    for name, meta in cases:
        pairs = zip(trained(name, strategy, "params", meta), trained(name, strategy, None, meta), strict=True)
        equal[f"{name} {meta}"] = all(torch.equal(a, b) for a, b in pairs)
    return equal


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "hybrid_shard", "replicate"])
def test_parameter_offload_training_matches_bit_for_bit(ranks, strategy):
    for equal in ranks(4 if strategy == "hybrid_shard" else 2).run(offloaded, strategy):
        assert all(equal.values()), equal


def moved_through_a_checkpoint(folder: str, there: str | None, here: str | None) -> bool:
    """Save a state with its shards in one place, and load it with its shards in another place."""
    made = {}
    for key, offload in (("saved", there), ("loaded", here)):
        net = shard_model(models.make("left out"), build_mesh(), offload=offload, **models.CASES["left out"].options)
        step = compose_step(models.CASES["left out"].loss, [ema(0.9)])
        made[key] = step.init(net, torch.optim.AdamW(net.parameters(), lr=0.01, foreach=False))
        if key == "saved":
            share = models.SAMPLES // get_dist_info().world_size
            mine = slice(get_dist_info().rank * share, (get_dist_info().rank + 1) * share)
            made[key], _ = step(made[key], {k: v[mine] for k, v in models.batch("left out", models.WEIGHTS).items()})
            save_sharded(folder, made[key])
    loaded = load_sharded(folder, made["loaded"])
    assert loaded.step == 1
    pairs = zip(full_params(made["saved"]), full_params(loaded), strict=True)
    moments = [state["exp_avg"] for state in loaded.optimizer.state.values()]
    return all(torch.equal(a, b) for (_, a), (_, b) in pairs) and all(to_local(m).device.type == "cpu" for m in moments)


@pytest.mark.parametrize(("there", "here"), [("params", None), (None, "params"), ("params", "params")])
def test_checkpoint_loads_with_and_without_parameter_offload(ranks, tmp_path, there, here):
    assert ranks(2).run(moved_through_a_checkpoint, str(tmp_path), there, here) == [True, True]


def refused() -> str:
    try:
        shard_model(nn.Linear(2, 2), build_mesh(), offload="optimizer")
    except ConfigError as error:
        return str(error)
    return "no error"


def test_unknown_offload_option_is_refused_on_all_ranks(ranks):
    for error in ranks(2).run(refused):
        assert "offload must be 'params' or None, got 'optimizer'." in error


def described() -> list[str]:
    nets = [shard_model(models.make("frozen"), build_mesh(), offload=offload) for offload in ("params", None)]
    return [describe(net).splitlines()[0] for net in nets]


def test_describe_reports_offloaded_params(ranks):
    for offloaded, plain in ranks(2).run(described):
        assert offloaded == f"{plain}, offload=params"
