"""The table of docs/sharding.md: each row is tried on 1 and 2 ranks, under four strategies, against plain torch."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dtrain as dt
from dtrain.dist.dtensor import full_tensor, is_dtensor
from dtrain.dist.init import get_dist_info
from dtrain.errors import ConfigError, DtrainError, StepError
from shard.test_param_objects import WORLDS, mesh_for, strategies

PAGE = Path(__file__).parents[2] / "docs" / "sharding.md"
STEPS, SAMPLES = 2, 4

Edit = Callable[[nn.Module], Any]


def batch_of(step: int) -> torch.Tensor:
    return torch.randn(SAMPLES, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def squares(model: nn.Module, x: torch.Tensor) -> dt.LossSum:
    return dt.LossSum(total=model(x).square().sum(), weight=len(x))


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def built(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().double()


def nothing(model: nn.Module) -> None:
    """The default of the edits below."""


def plain(make: Callable[[], nn.Module], edit: Edit, loss_fn: Any, batch: Any) -> nn.Module:
    """Train by plain torch in one process, on whole batches."""
    model = built(make)
    edit(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        loss = loss_fn(model, batch(step))
        (loss.total / loss.weight).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def trained(
    strategy: str, make: Callable[[], nn.Module], before: Edit, after: Edit, loss_fn: Any, batch: Any, options: dict[str, Any]
) -> dt.TrainState:
    """Train by dtrain on this rank's part of the same batches."""
    info, model = get_dist_info(), built(make)
    before(model)
    model = dt.shard_model(model, mesh_for(strategy), strategy=strategy, **options)
    after(model)
    step = dt.compose_step(loss_fn)
    state = step.init(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1))
    for number in range(STEPS):
        state, _ = step(state, batch(number)[info.rank :: info.world_size])
    return state


def check_exact(
    strategy: str,
    make: Callable[[], nn.Module],
    *,
    before: Edit = nothing,
    after: Edit = nothing,
    loss_fn: Any = squares,
    batch: Any = batch_of,
    **options: Any,
) -> None:
    """Compare parameters and buffers with those of plain torch."""
    state = trained(strategy, make, before, after, loss_fn, batch, options)
    one = plain(make, lambda model: (before(model), after(model)), loss_fn, batch)
    tensors = {**dict(dt.full_params(state)), **dict(state.model.named_buffers())}
    expected = {**dict(one.named_parameters()), **dict(one.named_buffers())}
    assert tensors.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(full_tensor(tensors[name]).detach(), value.detach(), rtol=1e-12, atol=1e-12, msg=name)


def check_refused(
    strategy: str,
    make: Callable[[], nn.Module],
    match: str,
    *,
    before: Edit = nothing,
    after: Edit = nothing,
    loss_fn: Any = squares,
    batch: Any = batch_of,
    kind: type[Exception] = DtrainError,
    **options: Any,
) -> None:
    """Check that one line of an error names the object."""
    with pytest.raises(kind, match=match) as raised:
        trained(strategy, make, before, after, loss_fn, batch, options)
    assert "\n" not in str(raised.value)


# The rows. Each is a function of the strategy, and raises if the page is wrong.


def attributes(strategy: str) -> None:
    def mark(model: nn.Module) -> None:
        model[2].bias._no_weight_decay = True

    def see(model: nn.Module) -> None:
        assert model[2].bias._no_weight_decay

    check_exact(strategy, layers, before=mark, after=lambda model: see(model))


class Marked(nn.Parameter):
    """A subclass."""


def subclasses(strategy: str) -> None:
    def check_class(model: nn.Module) -> None:
        assert type(model[0].weight) is Marked

    def make() -> nn.Module:
        model = layers()
        model[0].weight = Marked(model[0].weight.detach().double())
        return model

    if strategy == "replicate":
        check_exact(strategy, make, after=check_class)
    else:
        message = "shard_model: the parameter '0.weight' must be a plain nn.Parameter, got Marked"
        check_refused(strategy, make, message, kind=ConfigError)


def gradient_hooks(strategy: str) -> None:
    def hook(model: nn.Module) -> None:
        model[0].weight.register_hook(lambda grad: grad / grad.norm())

    check_exact(strategy, layers, before=hook)
    check_exact(strategy, layers, after=hook)


def accumulation_hooks(strategy: str) -> None:
    def hook(model: nn.Module) -> None:
        def halve(param: torch.Tensor) -> None:
            param.grad.mul_(0.5)

        model[0].weight.register_post_accumulate_grad_hook(halve)

    check_exact(strategy, layers, before=hook)


def hooks_of_several(strategy: str) -> None:
    for mode in ("all", "any"):

        def hook(model: nn.Module, mode: str = mode) -> None:
            torch.autograd.graph.register_multi_grad_hook(list(model.parameters()), lambda grads: None, mode=mode)

        check_refused(strategy, layers, "'0.weight' must have no hook of .*multi_grad", after=hook, kind=StepError)


def hooks_on_one_rank(strategy: str) -> None:
    def hook(model: nn.Module) -> None:
        if get_dist_info().rank == 0:
            model[0].weight.register_hook(lambda grad: grad * 2)

    if get_dist_info().world_size > 1:
        check_refused(strategy, layers, "0.weight", before=hook)


def backwards_by_hand(strategy: str) -> None:
    model, alone = dt.shard_model(built(layers), mesh_for(strategy), strategy=strategy), built(layers)
    x = batch_of(0).requires_grad_()
    torch.autograd.grad(model(x).square().sum(), x)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (model, alone)]
    state = dt.compose_step(squares).init(model, optimizers[0])
    for net in (model, alone):
        net(x).square().sum().backward()
    with pytest.raises(StepError, match="optimizer_step: no step is in progress"):
        dt.optimizer_step(state, {})
    if strategy == "replicate" and get_dist_info().world_size > 1:
        with pytest.raises(StepError, match=r"Call dt\.microbatch_step"):
            dt.apply_gradients(state, {})
        return
    dt.apply_gradients(state, {})
    optimizers[1].step()
    for (_, mine), param in zip(dt.full_params(state), alone.parameters(), strict=True):
        torch.testing.assert_close(mine, param, rtol=0, atol=1e-12)


def module_hooks(strategy: str) -> None:
    def hook(model: nn.Module) -> None:
        model[0].register_forward_pre_hook(lambda module, args: (args[0] * 2,))
        model[0].register_forward_hook(lambda module, args, output: output + 1)
        model[2].register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 0.5,))

    check_exact(strategy, layers, before=hook, blocks=(nn.Linear,))


def parameter_writes(strategy: str) -> None:
    def clip(model: nn.Module) -> None:
        with torch.no_grad():
            model(batch_of(0))
        for param in model.parameters():
            param.data.clamp_(-0.1, 0.1)

    check_exact(strategy, layers, after=clip)


def data_assignments(strategy: str) -> None:
    def halve(model: nn.Module) -> None:
        model[2].weight.data = model[2].weight.data * 0.5

    def move(model: nn.Module) -> None:
        model.float().double()
        model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()}, assign=True)

    if strategy == "replicate":
        check_exact(strategy, layers, after=halve)
    else:
        check_refused(strategy, layers, "no effect on the sharded parameter '2.weight'", after=halve, kind=StepError)
        model = dt.shard_model(built(layers), mesh_for(strategy), strategy=strategy)
        step = dt.compose_step(squares)
        state, _ = step(step.init(model, torch.optim.SGD(model.parameters(), lr=0.1)), batch_of(0))
        halve(model)
        with pytest.raises(StepError, match=r"Write in place: param\.data\.copy_\(tensor\)"):
            step(state, batch_of(1))
    check_exact(strategy, layers, after=move)


class Clamping(nn.Linear):
    """Writes its weight in forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


def forward_writes(strategy: str) -> None:
    def make() -> nn.Module:
        return nn.Sequential(Clamping(4, 4), nn.Linear(4, 2))

    if strategy == "replicate":
        check_exact(strategy, make)
    else:
        check_refused(strategy, make, "0.weight", kind=StepError)


def words(step: int) -> torch.Tensor:
    return torch.randint(0, 7, (SAMPLES, 2), generator=torch.Generator().manual_seed(step))


def max_norm(strategy: str) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Embedding(7, 3, max_norm=0.5))

    if strategy == "replicate" and get_dist_info().world_size == 1:
        check_exact(strategy, make, batch=words)
    else:
        check_refused(strategy, make, "0", batch=words, kind=ConfigError)


def sparse(strategy: str) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Embedding(7, 3, sparse=True))

    if strategy == "replicate" and get_dist_info().world_size == 1:
        check_exact(strategy, make, batch=words)
    else:
        check_refused(strategy, make, "0", batch=words, kind=ConfigError)


def penalty(strategy: str) -> None:
    def loss_fn(model: nn.Module, x: torch.Tensor) -> dt.LossSum:
        total = model(x).square().sum() + len(x) * sum(p.abs().sum() for p in model.parameters())
        return dt.LossSum(total=total, weight=len(x))

    # The parameters of the model's own unit are whole after its forward, and with one strategy those of all units.
    check_exact(strategy, layers, loss_fn=loss_fn)
    if strategy in ("replicate", "shard_grad_op"):
        check_exact(strategy, layers, loss_fn=loss_fn, blocks=(nn.Linear,))
    else:
        message = "must not compute with a sharded parameter outside of the forward of its unit.* torch says: RuntimeError: "
        check_refused(strategy, layers, message, loss_fn=loss_fn, kind=StepError, blocks=(nn.Linear,))
    for read in (squares_of_whole, whole_sum_of_squares, squares_of_shard):
        check_penalty_on_shards(strategy, read)


def squares_of_whole(param: torch.Tensor) -> torch.Tensor:
    return (param.full_tensor() if is_dtensor(param) else param).square().sum()


def whole_sum_of_squares(param: torch.Tensor) -> torch.Tensor:
    total = param.square().sum()
    return total.full_tensor() if is_dtensor(total) else total


def squares_of_shard(param: torch.Tensor) -> torch.Tensor:
    return (param.to_local() if is_dtensor(param) else param).square().sum()


def check_penalty_on_shards(strategy: str, read: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """No rank reduces the gradient that reaches a shard outside of its unit."""

    def loss_fn(model: nn.Module, x: torch.Tensor) -> dt.LossSum:
        total = model(x).square().sum() + len(x) * sum(read(p) for p in model.parameters())
        return dt.LossSum(total=total, weight=len(x))

    if get_dist_info().world_size == 1 or strategy in ("replicate", "shard_grad_op"):
        check_exact(strategy, layers, loss_fn=loss_fn, blocks=(nn.Linear,))
    else:
        message = r"outside of the forward of its unit, got '[02]\.(weight|bias)'"
        check_refused(strategy, layers, message, loss_fn=loss_fn, kind=StepError, blocks=(nn.Linear,))


class Result:
    """An object of a class of one's own."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class Boxing(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.inner = nn.Linear(4, size)

    def forward(self, x: torch.Tensor | Result) -> Result:
        return Result(self.inner(x.value if isinstance(x, Result) else x))


class Unboxing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Boxing(4), Boxing(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        boxed = self.first(x)
        boxed.value = torch.tanh(boxed.value)
        return self.second(boxed).value


class Viewing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).view(-1, 2, 2)


class ChangingViews(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.out = Viewing(), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.block(x).mul_(2).add_(1).flatten(1))


def objects_and_views(strategy: str) -> None:
    check_exact(strategy, Unboxing, blocks=(Boxing,))
    check_exact(strategy, ChangingViews, blocks=(Viewing,))


def plain_state_dicts(strategy: str) -> None:
    stored = {name: value + 1 for name, value in built(layers).state_dict().items()}

    def load(model: nn.Module) -> None:
        model.load_state_dict(stored)

    check_exact(strategy, layers, before=load)
    if strategy == "replicate":
        check_exact(strategy, layers, after=load)
    else:
        with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
            load(dt.shard_model(built(layers), mesh_for(strategy), strategy=strategy))


def shared_memory(strategy: str) -> None:
    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
        model[1].weight = nn.Parameter(model[0].weight.data)
        return model

    check_refused(strategy, make, "weight", kind=ConfigError)


class Tied(nn.Module):
    """Two layers share a weight, and one layer runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.second(torch.tanh(self.second(torch.tanh(self.first(x)))))))


def tied_and_repeated(strategy: str) -> None:
    check_exact(strategy, Tied)
    check_exact(strategy, Tied, blocks=(nn.Linear,))


def strided(strategy: str) -> None:
    def make() -> nn.Module:
        model = layers().double()
        model[0].weight = nn.Parameter(torch.randn(4, 4, dtype=torch.float64).t())
        return model

    check_exact(strategy, make)


def weight_with_graph(strategy: str) -> None:
    def weighted(model: nn.Module, x: torch.Tensor) -> dt.LossSum:
        weights = model(x).exp()
        return dt.LossSum(total=(weights * x[:, :2]).sum(), weight=weights.sum())

    check_refused(strategy, layers, "must be a constant", loss_fn=weighted, kind=ConfigError)


def options_of_ranks(strategy: str) -> None:
    model = dt.shard_model(built(layers), mesh_for(strategy), strategy=strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = dt.compose_step(squares)
    state, metrics = step(step.init(model, optimizer), batch_of(0))
    # Any loss is worse than the bound.
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    plateau.best = -1.0
    plateau.step(dt.reduce_metrics(metrics)["loss"])
    state, _ = step(state, batch_of(1))
    plateau.step(-2.0 if get_dist_info().rank else 0.0)
    if get_dist_info().world_size == 1:
        step(state, batch_of(2))
        return
    with pytest.raises(DtrainError, match=r"the option 'lr' of group 0 of SGD must be equal on all ranks, got "):
        step(state, batch_of(2))


def loss_parameters(strategy: str) -> None:
    scale = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def scaled(model: nn.Module, x: torch.Tensor) -> dt.LossSum:
        return dt.LossSum(total=(model(x).square() * (-scale).exp() + scale).sum(), weight=len(x))

    if get_dist_info().rank == 0:
        with pytest.warns(UserWarning, match=r"the loss reaches 1 trainable parameter of no state \(first: shape \(\)"):
            trained(strategy, layers, nothing, nothing, scaled, batch_of, {})
    else:
        trained(strategy, layers, nothing, nothing, scaled, batch_of, {})


def added_later(strategy: str) -> None:
    def trained_on(change: Edit) -> None:
        model = dt.shard_model(built(layers), mesh_for(strategy), strategy=strategy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = dt.compose_step(squares)
        state, _ = step(step.init(model, optimizer), batch_of(0))
        change(model)
        if len(model) > 3:
            optimizer.add_param_group({"params": list(model[3].parameters())})
        with pytest.raises(StepError, match=r"after step\.init"):
            step(state, batch_of(1))

    trained_on(lambda model: model.append(nn.Linear(2, 2).double()))
    trained_on(lambda model: model.__setitem__(2, nn.Linear(4, 2).double()))


def frozen_on_one_rank(strategy: str) -> None:
    model = dt.shard_model(built(layers), mesh_for(strategy), strategy=strategy)
    step = dt.compose_step(squares)
    state, _ = step(step.init(model, torch.optim.SGD(model.parameters(), lr=0.1)), batch_of(0))
    model[2].bias.requires_grad_(get_dist_info().rank == 0)
    if get_dist_info().world_size == 1:
        step(state, batch_of(1))
        return
    with pytest.raises(StepError, match=r"'2\.bias' must be trainable on all ranks or on none, got ranks \[0\] alone"):
        step(state, batch_of(1))


def accumulated_by_hand(strategy: str) -> None:
    model = dt.shard_model(built(layers), mesh_for(strategy), strategy=strategy)
    state = dt.compose_step(squares).init(model, torch.optim.SGD(model.parameters(), lr=0.1))
    state, _ = dt.microbatch_step(state, batch_of(0), loss_fn=squares)
    with pytest.warns(UserWarning, match=r"microbatch_step drops the gradient of an earlier batch, which no update applied"):
        state, _ = dt.microbatch_step(state, batch_of(1), loss_fn=squares)
    state.drop_gradients()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state, metrics = dt.microbatch_step(state, batch_of(2), loss_fn=squares)
        # A second gradient of one batch, as in sharpness-aware minimization.
        state.drop_gradients()
        state, metrics = dt.microbatch_step(state, batch_of(2), loss_fn=squares)
        state, _ = dt.optimizer_step(state, metrics)
        dt.microbatch_step(state, batch_of(3), loss_fn=squares)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 2, dtype=torch.complex128))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.to(torch.complex128) @ self.weight).abs()


def complex_parameters(strategy: str) -> None:
    check_refused(strategy, Complex, "weight", kind=ConfigError)


def lazy(strategy: str) -> None:
    check_refused(strategy, lambda: nn.Sequential(nn.LazyLinear(2)), "0", kind=ConfigError)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 2)
        self.register_buffer("seen", torch.zeros(2, dtype=torch.float64))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += (x[:, :2] > 0).sum(0)
            self.calls += len(x)
        return self.inner(x)


def counters(strategy: str) -> None:
    check_exact(strategy, Counting, buffers="sum")


class Remembering(nn.Linear):
    """Counts in an attribute, which is its extra state."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


def extra_state(strategy: str) -> None:
    def begun() -> tuple[dt.step.Step, dt.TrainState]:
        model = dt.shard_model(built(lambda: Remembering(4, 2)), mesh_for(strategy), strategy=strategy)
        step = dt.compose_step(squares)
        return step, step.init(model, torch.optim.SGD(model.parameters(), lr=0.1))

    step, state = begun()
    for number in range(STEPS):
        state, _ = step(state, batch_of(number))
    with ExitStack() as stack:
        own = stack.enter_context(tempfile.TemporaryDirectory()) if get_dist_info().rank == 0 else None
        root = str(dt.dist.broadcast_json(own))
        dt.save_sharded(root, state)
        _, other = begun()
        assert dt.load_sharded(root, other).model.calls == STEPS
        # All ranks have read the folder.
        dt.dist.gather_json(None)


def random_numbers(strategy: str) -> None:
    def update(inner: Any) -> Any:
        def noisy(state: dt.TrainState, metrics: Any) -> Any:
            for name, param in state.params.items():
                param.grad.add_(dt.step.random_like(state, param.grad, "noise", name))
            return inner(state, metrics)

        return noisy

    def run(model: nn.Module, rows: slice) -> list[torch.Tensor]:
        step = dt.compose_step(squares, [dt.Transform(name="noise", update=update)])
        state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1), seed=3)
        for number in range(STEPS):
            state, _ = step(state, batch_of(number)[rows])
        return [full_tensor(value).detach() for _, value in dt.full_params(state)]

    info = get_dist_info()
    sharded = run(dt.shard_model(built(layers), mesh_for(strategy), strategy=strategy), slice(info.rank, None, info.world_size))
    one = run(
        dt.shard_model(built(layers), mesh_for("replicate"), strategy="replicate"), slice(info.rank, None, info.world_size)
    )
    for value, expected in zip(sharded, one, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)


ROWS: dict[str, Callable[[str], None]] = {
    "attributes of parameters and buffers": attributes,
    "a subclass of `nn.Parameter`": subclasses,
    "`register_hook` on a parameter": gradient_hooks,
    "`register_post_accumulate_grad_hook` on a parameter": accumulation_hooks,
    "`torch.autograd.graph.register_multi_grad_hook` on parameters": hooks_of_several,
    "hooks that differ between ranks": hooks_on_one_rank,
    "a backward outside of a step": backwards_by_hand,
    "forward and backward hooks of modules": module_hooks,
    "a write of parameters outside of a step": parameter_writes,
    "`p.data = tensor`": data_assignments,
    "a forward that writes a parameter in place": forward_writes,
    "`Embedding(max_norm=...)`": max_norm,
    "`Embedding(sparse=True)`": sparse,
    "a penalty on weights in the loss": penalty,
    "a `LossSum.weight` with a graph": weight_with_graph,
    "options of the optimizer that differ between ranks": options_of_ranks,
    "parameters that are trainable on some ranks only": frozen_on_one_rank,
    "two calls of `microbatch_step` before an update": accumulated_by_hand,
    "a trainable parameter of the loss that is in no state": loss_parameters,
    "a unit that returns objects of your own classes": objects_and_views,
    "`model.load_state_dict(tensors)`": plain_state_dicts,
    "two parameters, or a parameter and a buffer, in the same memory": shared_memory,
    "a parameter that several modules share, a module that runs several times": tied_and_repeated,
    "transposed weights, `channels_last`": strided,
    "a parameter that the model or the optimizer gets after `step.init`": added_later,
    "complex parameters": complex_parameters,
    "lazy modules that have not run": lazy,
    "a forward that counts in a buffer": counters,
    "`get_extra_state` and `set_extra_state` of a module": extra_state,
    "random numbers in a `grad` or `update` wrapper": random_numbers,
}


def try_all(names: Sequence[str]) -> list[str]:
    """Return the rows that are not as the page says, with the strategy and the reason."""
    wrong = []
    for name in names:
        for strategy in strategies():
            try:
                ROWS[name](strategy)
            # Any exception is a row that the page does not describe.
            except (Exception, pytest.fail.Exception) as error:  # noqa: BLE001
                wrong.append(f"{name}, {strategy}: {type(error).__name__}: {error}"[:400])
    return wrong


@pytest.mark.costly
@pytest.mark.parametrize("world", WORLDS)
def test_each_row_of_the_table_is_as_the_page_says(ranks, world):
    assert ranks(world).run(try_all, list(ROWS)) == [[]] * world


def test_the_table_has_these_rows():
    section = PAGE.read_text().split("### Ordinary PyTorch code")[1].split("\n#")[0]
    table = section.split("| your code |")[1].split("\n\n")[0]
    cells = [line.split("|")[1].strip() for line in table.splitlines()[2:] if line.startswith("|")]
    named = [next((name for name in ROWS if cell.startswith(name)), cell) for cell in cells]
    assert named == list(ROWS)
