"""Classes of libraries that may not be there."""

from torch import nn

from dtrain.surgery.known import known_class


def test_a_class_is_known_only_where_it_was_imported():
    assert known_class("torch.nn", "Linear") is nn.Linear
    assert known_class("torch.nn", "nothing") is None
    assert known_class("torch.nn", "functional") is None
    assert known_class("not.imported", "Linear") is None
