"""Change the class of a module in place, so that the module keeps its parameters, hooks and names.

A ``Mixin`` precedes the module's own class: ``Blur`` and ``nn.Conv2d`` form ``BlurConv2d``, whose ``forward`` calls the
``forward`` of ``nn.Conv2d``. The module is still an ``nn.Conv2d`` (or a user's block, which
``shard_model(blocks=(Block,))`` finds), and several edits combine. ``swap_class`` sets a complete class such as
``LowPrecisionLayerNorm`` in the same way.
"""

from __future__ import annotations

from functools import cache
from typing import Any, TypeVar

from torch import nn

from dtrain.errors import ConfigError


class Mixin(nn.Module):
    """Base class of mixins. A mixin stores its settings in attributes that begin with ``_``, which no constructor takes."""

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # A combined class cannot be imported by name, so copies and pickles store its base class and mixins.
        base, *mixins = _split_combined_class(type(self))
        return _new_instance, (base, mixins), self.__getstate__()  # type: ignore[no-untyped-call]


AnyMixin = TypeVar("AnyMixin", bound=Mixin)


def add_mixin(module: nn.Module, mixin: type[AnyMixin]) -> AnyMixin | None:
    """Put ``mixin`` in front of the class of ``module``, and return the module; None if the module has the mixin already.

    Mutates: ``module.__class__``.
    """
    if isinstance(module, mixin):
        return None
    pair: Any = (mixin, type(module))
    swap_class(module, _combined_class(*pair))
    assert isinstance(module, mixin)
    return module


def swap_class(module: nn.Module, kind: Any) -> nn.Module:
    """Set the class of ``module`` to ``kind``, a subclass of its class that stores nothing in ``__init__``; return the module.

    Mutates: ``module.__class__``.

    Raises:
        ConfigError: the module has its own ``forward``, which would hide the ``forward`` of the class.

    Example:
        >>> class Doubled(nn.Linear):
        ...     def forward(self, input):
        ...         return 2 * super().forward(input)
        >>> linear = nn.Linear(1, 1, bias=False)
        >>> bool(swap_class(linear, Doubled)(torch.ones(1)) == 2 * linear.weight), list(linear.state_dict())
        (True, ['weight'])
    """
    if "forward" in module.__dict__:
        raise ConfigError(
            f"surgery: a {type(module).__name__} has its own forward, which would hide the forward of the new class. Edit the "
            "model before checkpoint_activations and before replacing forward."
        )
    module.__class__ = kind
    return module


# One class per pair, so that class comparisons and the compiler see the same class.
@cache
def _combined_class(mixin: Any, base: Any) -> Any:
    name = f"{mixin.__name__}{base.__name__}"
    return type(name, (mixin, base), {"__module__": mixin.__module__, "__doc__": mixin.__doc__, "_dtrain_combined": True})


def _split_combined_class(kind: type[nn.Module]) -> list[type[nn.Module]]:
    """Return the base class and then the mixins in the order of addition."""
    if "_dtrain_combined" not in vars(kind):
        return [kind]
    mixin, base = kind.__bases__
    return [*_split_combined_class(base), mixin]


def _new_instance(base: type[nn.Module], mixins: list[type[Mixin]]) -> nn.Module:
    """Return an empty module of the combined class."""
    for mixin in mixins:
        pair: Any = (mixin, base)
        base = _combined_class(*pair)
    return base.__new__(base)
