"""Modules that do a little more than before, under the names that they had.

A ``Mixed`` class stands in front of a module's own: ``Blur`` and ``nn.Conv2d`` make ``BlurConv2d``, whose ``forward`` calls
that of ``nn.Conv2d``. A module is given that class where it is, so its parameters, its hooks, its place and all names in a
state dict stay, it is still an ``nn.Conv2d`` (or a user's block, which ``shard_model(blocks=(Block,))`` finds), and edits
combine.

A class that is written out for one kind of module, as ``LowPrecisionLayerNorm`` is, is given in the same way, by ``become``.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import nn

from dtrain.errors import ConfigError


class Mixin(nn.Module):
    """Base of what is mixed in. It keeps its settings in attributes that begin with ``_``, which no constructor takes."""

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # A class made here cannot be found by name, so copies and pickles are made from what it was mixed from.
        base, *mixins = _split_combined_class(type(self))
        return _new_instance, (base, mixins), self.__getstate__()  # type: ignore[no-untyped-call]


def add_mixin(module: nn.Module, mixin: type[Mixin]) -> bool:
    """Give ``module`` the class that is ``mixin`` in front of its own; False when it has that already.

    Mutates: ``module.__class__``.
    """
    if isinstance(module, mixin):
        return False
    pair: Any = (mixin, type(module))
    swap_class(module, _combined_class(*pair))
    return True


def swap_class(module: nn.Module, kind: Any) -> nn.Module:
    """Give ``module`` the class ``kind``, a subclass of its own that stores nothing in ``__init__``; return it.

    Mutates: ``module.__class__``.

    Raises:
        ConfigError: a ``forward`` was set on the module itself, which would hide that of the class.

    Example:
        >>> class Doubled(nn.Linear):
        ...     def forward(self, input):
        ...         return 2 * super().forward(input)
        >>> linear = nn.Linear(1, 1, bias=False)
        >>> bool(become(linear, Doubled)(torch.ones(1)) == 2 * linear.weight), list(linear.state_dict())
        (True, ['weight'])
    """
    if "forward" in module.__dict__:
        raise ConfigError(
            f"surgery: a {type(module).__name__} has a forward of its own, which would hide what it is to do; change the model "
            "before hooks, checkpoint_activations and the like"
        )
    module.__class__ = kind
    return module


@cache  # one class for each pair: what compares classes, or compiles for them, sees one
def _combined_class(mixin: Any, base: Any) -> Any:
    name = f"{mixin.__name__}{base.__name__}"
    return type(name, (mixin, base), {"__module__": mixin.__module__, "__doc__": mixin.__doc__, "_dtrain_mixed": True})


def _split_combined_class(kind: type[nn.Module]) -> list[type[nn.Module]]:
    """The class at the bottom, and then what was mixed into it, in that order."""
    if "_dtrain_mixed" not in vars(kind):
        return [kind]
    mixin, base = kind.__bases__
    return [*_split_combined_class(base), mixin]


def _new_instance(base: type[nn.Module], mixins: list[type[Mixin]]) -> nn.Module:
    """An empty module of that class, to be filled."""
    for mixin in mixins:
        pair: Any = (mixin, base)
        base = _combined_class(*pair)
    return base.__new__(base)
