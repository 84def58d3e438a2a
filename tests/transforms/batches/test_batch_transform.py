from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from tensordict import TensorDict
from torch import nn

import dtrain as dt
from draws import generator
from dtrain.data.fetcher import apply_transform
from dtrain.errors import ConfigError
from dtrain.transforms.batches.cutout import colout, colout_batch, cutout, cutout_batch
from dtrain.transforms.batches.mixup import cutmix_batch, label_smoothing, mixup_batch
from dtrain.transforms.batches.progressive_resizing import progressive_resizing, resize_batch
from dtrain.transforms.batches.rand_augment import augmix, augmix_batch, rand_augment, rand_augment_batch


def images(count: int, dtype: torch.dtype = torch.float32) -> dict:
    x = torch.rand(count, 3, 9, 9, generator=generator(5))
    x = (x * 255).to(dtype) if dtype == torch.uint8 else x
    return {"x": x, "y": torch.arange(count) % 3, "names": [str(number) for number in range(count)]}


# Each batch method, and the values that may stand for a generator.
METHODS: dict[str, tuple[Callable[..., Any], str]] = {
    "mixup": (partial(mixup_batch, num_classes=3), "coefficient= and order="),
    "cutmix": (partial(cutmix_batch, num_classes=3), "box= and order="),
    "cutout": (cutout_batch, "boxes="),
    "colout": (colout_batch, "rows= and columns="),
    "rand_augment": (rand_augment_batch, "chains="),
    "augmix": (augmix_batch, "chains=, weights= and image_weights="),
    "progressive_resizing": (partial(resize_batch, scale=0.5, method="crop"), "offset="),
}


@pytest.mark.parametrize("name", METHODS)
def test_batch_method_draws_from_its_generator_only_and_keeps_its_input(name):
    method, instead = METHODS[name]
    given, state = images(8), torch.get_rng_state()
    one, same, other = (method(given, generator=generator(seed)) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(given[key], images(8)[key]) for key in ("x", "y"))
    assert one["names"] is given["names"]
    assert torch.equal(one["x"], same["x"])
    assert not torch.equal(one["x"], other["x"])
    with pytest.raises(ConfigError, match=f"{name}: generator must be given, got None. Give generator= or {instead}"):
        method(given)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_batch_method_keeps_the_dtype_and_an_empty_batch(name, dtype):
    if name == "mixup" and dtype == torch.uint8:
        return
    for count in (8, 0):
        made = METHODS[name][0](images(count, dtype), generator=generator())
        assert (made["x"].dtype, len(made["x"]), len(made["y"])) == (dtype, count, count)


@pytest.mark.parametrize("name", ["cutout", "colout", "rand_augment", "augmix", "progressive_resizing"])
def test_batch_method_transforms_one_sample_in_a_loader(name):
    sample = {"x": images(1)["x"][0], "y": 3}

    def transform(sample: dict, generator: torch.Generator) -> dict:
        return METHODS[name][0](sample, generator=generator)

    one, again, other = (apply_transform(transform, sample, seed=0, epoch=epoch, index=4) for epoch in (0, 0, 1))
    assert torch.equal(one["x"], again["x"])
    assert not torch.equal(one["x"], other["x"])
    assert (len(one["x"]), one["x"].ndim, one["y"]) == (3, 3, 3)
    assert torch.equal(sample["x"], images(1)["x"][0])


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


X, Y, SWAP = torch.tensor([0.0, 8.0]), torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([1, 0])

KINDS = {
    "mapping": ({"x": X, "y": Y}, "x", "y"),
    "TensorDict": (TensorDict({"x": X, "y": Y}, batch_size=[2]), "x", "y"),
    "tuple": ((X, Y), 0, 1),
    "list": ([X, Y], 0, 1),
    "named tuple": (Pair(X, Y), 0, 1),
    "tuple from its end": ((X, Y), 0, -1),
    "named tuple from its end": (Pair(X, Y), -2, -1),
}


@pytest.mark.parametrize("kind", KINDS)
def test_mixup_batch_keeps_the_type_of_the_batch(kind):
    given, inputs, targets = KINDS[kind]
    made = mixup_batch(given, input_key=inputs, target_key=targets, coefficient=0.75, order=SWAP)
    assert type(made) is type(given)
    assert made[inputs].tolist() == [2.0, 6.0]
    assert made[targets].tolist() == [[0.75, 0.25], [0.25, 0.75]]
    assert given[inputs] is X or torch.equal(given[inputs], X)


DEFAULTS = {
    "x and y": {"id": SWAP, "x": X, "y": Y},
    "input_ids and labels": {"id": SWAP, "input_ids": X, "labels": Y},
    "TensorDict": TensorDict({"labels": Y, "x": X}, batch_size=[2]),
    "tuple": (X, Y),
    "named tuple": Pair(X, Y),
}


@pytest.mark.parametrize("kind", DEFAULTS)
def test_batch_methods_find_the_usual_inputs_and_targets(kind):
    made = mixup_batch(DEFAULTS[kind], coefficient=0.75, order=SWAP)
    tensors = list(made.values()) if hasattr(made, "values") else list(made)
    assert [2.0, 6.0] in [tensor.tolist() for tensor in tensors]
    assert [[0.75, 0.25], [0.25, 0.75]] in [tensor.tolist() for tensor in tensors]


def in_a_step(transform: dt.Transform, batch: object) -> None:
    """A step on ``batch`` that comes no further than ``transform``."""
    model = nn.Linear(1, 1)
    step = dt.compose_step(dt.mean_loss(lambda model, batch: model(batch), weight=len), [transform])
    step(step.init(model, torch.optim.SGD(model.parameters(), lr=0.1)), batch)


@pytest.mark.parametrize(
    "make",
    [
        lambda: mixup_batch(torch.rand(4, 3), coefficient=0.5, order=SWAP),
        lambda: cutmix_batch(torch.rand(2, 1, 4, 4), box=(0, 0, 1, 1), order=SWAP),
        lambda: in_a_step(label_smoothing(0.1), torch.rand(4, 3)),
    ],
    ids=["mixup", "cutmix", "label_smoothing"],
)
def test_bare_tensor_has_no_targets(make):
    with pytest.raises(
        ConfigError, match=r"(mixup|cutmix|label_smoothing): the batch must have inputs and targets, got one tensor"
    ):
        make()


@pytest.mark.parametrize("make", [cutout, colout, rand_augment, augmix, lambda: progressive_resizing(start=1, end=2)])
def test_transform_refuses_images_without_a_batch_axis(make):
    """A batch of images without an axis of channels: as one image, all would be treated alike, and two as its channels."""
    transform = make()
    message = rf"{transform.name}: images must be \[batch, channels, height, width\], got shape \(3, 8, 8\) at 'x'"
    with pytest.raises(ConfigError, match=message):
        in_a_step(transform, {"x": torch.rand(3, 8, 8)})


def test_colout_batch_shrinks_images_of_a_tensordict():
    given = TensorDict({"x": torch.arange(12.0).reshape(1, 1, 3, 4), "y": torch.tensor([1])}, batch_size=[1])
    made = colout_batch(given, rows=torch.tensor([0, 2]), columns=torch.tensor([1]))
    assert made["x"].flatten().tolist() == [1.0, 9.0]
    assert (made.batch_size, given["x"].shape) == (torch.Size([1]), (1, 1, 3, 4))
