"""Classes of libraries that may not be there."""

from torch import nn

from dtrain.surgery.replace import find_imported_class


def test_find_imported_class_finds_imported_classes_only():
    assert find_imported_class("torch.nn", "Linear") is nn.Linear
    assert find_imported_class("torch.nn", "nothing") is None
    assert find_imported_class("torch.nn", "functional") is None
    assert find_imported_class("not.imported", "Linear") is None
