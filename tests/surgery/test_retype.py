"""A module as an instance of a subclass."""

import torch
from torch import nn

from dtrain.surgery.known import known_class
from dtrain.surgery.retype import retyped


class Doubled(nn.Linear):
    def forward(self, input):
        return 2 * super().forward(input)


def test_a_retyped_module_has_the_tensors_and_the_mode_of_the_old_one():
    linear = nn.Linear(2, 3).eval()
    doubled = retyped(linear, Doubled)
    x = torch.randn(4, 2)
    assert doubled(x).equal(2 * linear(x))
    assert doubled.weight is linear.weight
    assert not doubled.training


def test_what_is_added_to_a_retyped_module_is_not_in_the_old_one():
    linear = nn.Linear(2, 3)
    doubled = retyped(linear, Doubled)
    doubled.register_buffer("more", torch.zeros(1), persistent=False)
    doubled.child = nn.Identity()
    assert set(doubled.state_dict()) == {"weight", "bias"}
    assert [list(linear.buffers()), list(linear.children())] == [[], []]
    linear.register_buffer("more", torch.zeros(1))
    assert set(linear.state_dict()) == {"weight", "bias", "more"}


def test_a_class_is_known_only_where_it_was_imported():
    assert known_class("torch.nn", "Linear") is nn.Linear
    assert known_class("torch.nn", "nothing") is None
    assert known_class("torch.nn", "functional") is None
    assert known_class("not.imported", "Linear") is None
