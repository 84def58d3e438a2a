"""Classes of libraries that may be there: a model of theirs can only be given by somebody who has imported them."""

from __future__ import annotations

import sys

from torch import nn


def known_class(module: str, name: str) -> type[nn.Module] | None:
    """The class ``name`` of ``module`` where this process has imported that, else None. Nothing is imported.

    Example:
        >>> known_class("torch.nn", "Linear"), known_class("a.library.that.is.not.there", "Linear")
        (<class 'torch.nn.modules.linear.Linear'>, None)
    """
    found = getattr(sys.modules.get(module), name, None)
    return found if isinstance(found, type) and issubclass(found, nn.Module) else None
