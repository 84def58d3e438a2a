from typing import NamedTuple

import pytest
import torch
from tensordict import TensorDict
from torch import nn

import dtrain as dt
from dtrain.errors import ConfigError
from dtrain.transforms.batches.cutout import colout, colout_batch, cutout
from dtrain.transforms.batches.mixup import cutmix_batch, label_smoothing, mixup_batch
from dtrain.transforms.batches.progressive_resizing import progressive_resizing
from dtrain.transforms.batches.rand_augment import augmix, rand_augment


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
