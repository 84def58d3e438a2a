from typing import NamedTuple

import pytest
import torch
from tensordict import TensorDict

from dtrain.algorithms.batches.colout import colout_batch
from dtrain.algorithms.batches.mixup import mixup_batch


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
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_of_any_kind_stays_of_its_kind(kind):
    given, inputs, targets = KINDS[kind]
    made = mixup_batch(given, inputs=inputs, targets=targets, coefficient=0.75, order=SWAP)
    assert type(made) is type(given)
    assert made[inputs].tolist() == [2.0, 6.0]
    assert made[targets].tolist() == [[0.75, 0.25], [0.25, 0.75]]
    assert given[inputs] is X or torch.equal(given[inputs], X)


def test_a_tensordict_may_get_smaller_images():
    given = TensorDict({"x": torch.arange(12.0).reshape(1, 1, 3, 4), "y": torch.tensor([1])}, batch_size=[1])
    made = colout_batch(given, rows=torch.tensor([0, 2]), columns=torch.tensor([1]))
    assert made["x"].flatten().tolist() == [1.0, 9.0]
    assert (made.batch_size, given["x"].shape) == (torch.Size([1]), (1, 1, 3, 4))
