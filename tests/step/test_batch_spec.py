"""One description of a batch for every function that counts, splits or weighs a batch."""

import inspect
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import dtrain as dt
import public
from dtrain.errors import ConfigError

SAMPLES = 5


class Rows:
    """A batch that only its user can count and split."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y


def columns(batch) -> tuple[Tensor, Tensor]:
    return (batch.x, batch.y) if isinstance(batch, Rows) else (batch["x"], batch["y"])


def tensors(samples: int = SAMPLES) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(samples)
    return {"x": torch.randn(samples, 3, generator=generator), "y": torch.randn(samples, generator=generator)}


def split(batch, size: int) -> list:
    x, y = columns(batch)
    parts = zip(x.split(size), y.split(size), strict=True)
    return [Rows(*pair) if isinstance(batch, Rows) else dict(zip("xy", pair, strict=True)) for pair in parts]


FUNCTIONS = {
    "count": lambda batch: (len(columns(batch)[1]), 7),
    "split": split,
    "weight": lambda batch: len(columns(batch)[1]),
}
SPECS = {
    "axes": (dt.batch_spec({"x": "batch seq", "y": "batch"}, weight=FUNCTIONS["weight"]), tensors),
    "axes and functions": (dt.batch_spec({"x": "batch seq", "y": "batch"}, **FUNCTIONS), tensors),
    "functions": (dt.batch_spec(**FUNCTIONS), lambda samples=SAMPLES: Rows(**tensors(samples))),
}


def loss_fn(model, batch) -> dt.LossSum:
    x, y = columns(batch)
    return dt.LossSum(total=(model(x)[:, 0] - y).square().sum(), weight=len(y))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, affine=False), nn.Linear(4, 1)).eval()


def start(step: dt.step.Step) -> dt.TrainState:
    model = net()
    return step.init(model, torch.optim.SGD(model.parameters(), lr=0.1))


def state() -> dt.TrainState:
    return start(dt.compose_step(loss_fn))


def after_a_step(step: dt.step.Step, batch: object) -> tuple:
    """Return the loss, the weights, and the counts of the clock."""
    after, metrics = step(start(step), batch)
    weights = torch.cat([param.detach().flatten() for param in after.params.values()])
    return dt.reduce_metrics(metrics)["loss"], weights, after.clock.samples


USES: dict[str, Callable] = {
    "dtrain.microbatch_step": lambda spec, batch: dt.microbatch_step(
        state(), batch, loss_fn=loss_fn, microbatch_size=2, batch_spec=spec
    )[1],
    "dtrain.step.grad_cache_step": lambda spec, batch: dt.step.grad_cache_step(
        state(), batch, loss_fn=loss_fn, microbatch_size=2, batch_spec=spec
    )[1],
    "dtrain.step.count_first_step": lambda spec, batch: dt.step.count_first_step(
        state(), batch, loss_fn=loss_fn, microbatch_size=2, batch_spec=spec, after_count=lambda model, counts: None
    )[1],
    "dtrain.compose_step": lambda spec, batch: after_a_step(
        dt.compose_step(loss_fn, microbatch_size=2, batch_spec=spec), batch
    ),
    "dtrain.step.optimizer_in_backward": lambda spec, batch: after_a_step(
        dt.step.optimizer_in_backward(loss_fn, microbatch_size=2, batch_spec=spec), batch
    ),
    "dtrain.evaluate": lambda spec, batch: dt.evaluate(net(), [batch], loss_fn, microbatch_size=2, batch_spec=spec),
    "dtrain.step.auto_batch_eval": lambda spec, batch: torch.cat(
        dt.step.auto_batch_eval(lambda model, inputs: model(columns(inputs)[0]), initial_size=2, batch_spec=spec)(net(), batch)
    ),
    "dtrain.data.split_batch": lambda spec, batch: [
        len(columns(piece)[1]) for piece in dt.data.split_batch(batch, 2, batch_spec=spec)
    ],
    "dtrain.build_loader": lambda spec, batch: [
        len(columns(piece)[1])
        for piece in dt.build_loader([batch] * 4, global_batch_size=2, seed=0, collate=lambda two: two[0], batch_spec=spec)
    ],
    "dtrain.step.find_microbatch_size": lambda spec, batch: (
        dt.step.find_microbatch_size(state(), batch, loss_fn=loss_fn, batch_spec=spec).largest_batch
    ),
    "dtrain.monitors.count_flops": lambda spec, batch: dt.monitors.count_flops(net(), batch, loss_fn, batch_spec=spec),
    "dtrain.planning.Workload": lambda spec, batch: (
        dt.planning.estimate_memory(
            dt.planning.Workload(model=net, loss_fn=loss_fn, batch=lambda n: tensors(n), batch_spec=spec),
            world_size=1,
            device="cpu",
            microbatch_size=2,
            microbatches=2,
        ).peak
    ),
    "dtrain.testing.check_loss_fn": lambda spec, batch: dt.testing.check_loss_fn(loss_fn, net(), batch, batch_spec=spec),
    "dtrain.transforms.update_batch_norm_": lambda spec, batch: dt.transforms.update_batch_norm_(
        net(), [batch], loss_fn, batch_spec=spec
    ),
    "dtrain.transforms.noise_scale": lambda spec, batch: after_a_step(
        dt.compose_step(loss_fn, [dt.transforms.noise_scale(batch_spec=spec)], batch_spec=spec), batch
    ),
    "dtrain.transforms.selective_backprop": lambda spec, batch: after_a_step(
        dt.compose_step(
            loss_fn,
            [dt.transforms.selective_backprop(lambda model, inputs: model(columns(inputs)[0])[:, 0], batch_spec=spec)],
            batch_spec=spec,
        ),
        batch,
    ),
}
BY_ROW = {"dtrain.transforms.noise_scale", "dtrain.transforms.selective_backprop"}


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("name", USES)
def test_one_spec_works_in_every_function(name, kind):
    spec, make = SPECS[kind]
    if name in BY_ROW and kind == "functions":
        with pytest.raises(ConfigError, match="found no tensor to split in a Rows"):
            USES[name](spec, make())
        return
    result, expected = USES[name](spec, make()), USES[name](SPECS["axes"][0], tensors())
    torch.testing.assert_close(result, expected)


def test_every_function_of_batches_takes_only_a_spec():
    functions = [name for name in public.all_names() if inspect.isfunction(public.value(name))]
    parameters = {name: inspect.signature(public.value(name)).parameters for name in functions}
    with_spec = {name for name, annotations in parameters.items() if "batch_spec" in annotations}
    assert with_spec | {"dtrain.planning.Workload"} == set(USES)
    kinds = re.compile("CountFn|SplitFn|WeightFn")
    assert [name for name, annotations in parameters.items() if kinds.search(str(annotations))] == ["dtrain.batch_spec"]


@pytest.mark.parametrize("name", sorted(BY_ROW))
def test_methods_that_select_rows_refuse_samples_of_several_rows(name):
    pairs = dt.batch_spec(count=lambda batch: len(batch["y"]) // 2, split=split)
    with pytest.raises(ConfigError, match=r"count returns 2 samples for a batch of 4 rows\. .*tensors with a row per sample"):
        USES[name](pairs, tensors(4))


@pytest.mark.parametrize("axes", [None, {"x": "batch seq", "y": "batch"}], ids=["functions", "axes"])
def test_count_without_split_never_leaves_out_rows(axes):
    spec = dt.batch_spec(axes, count=lambda batch: len(batch["y"]) // 2)
    step = dt.compose_step(loss_fn, microbatch_size=1, batch_spec=spec)
    with pytest.raises(ConfigError, match=r"count returns 2 samples for a batch of 4 rows\. Pass split= as well"):
        step(start(step), tensors(4))


@pytest.mark.parametrize("name", ["count", "split", "weight"])
def test_spec_refuses_a_value_that_is_not_a_function(name):
    with pytest.raises(ConfigError, match=f"batch_spec: {name} must be a function of a batch, got 3"):
        dt.batch_spec({"x": "batch"}, **{name: 3})
