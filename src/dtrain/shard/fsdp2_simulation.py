"""Use private names of FSDP2 to simulate a step: shards of rank 0 alone, memory by purpose (``tests/planning/``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor

from dtrain.shard.fsdp2_private import unreduced_grads


@contextmanager
def only_first_shards() -> Iterator[None]:
    """Let FSDP2 make the first shard of each parameter only, which is all that rank 0 keeps. Mutates: a function of torch."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    original = _fsdp_param._chunk_with_empty
    _fsdp_param._chunk_with_empty = lambda tensor, num_chunks, dim: [tensor.narrow(dim, 0, -(-tensor.size(dim) // num_chunks))]
    try:
        yield
    finally:
        _fsdp_param._chunk_with_empty = original


def wrap_collectives(group: Any, during: Callable[[str], AbstractContextManager[None]]) -> None:
    """Run the allocations of ``group`` inside ``during("gathered")`` or ``during("communication")``. Mutates: ``group``."""

    def wrap(method: Callable[..., Any], purpose: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with during(purpose):
                return method(*args)

        return call

    for name, purpose in (("unshard", "communication"), ("wait_for_unshard", "gathered"), ("post_backward", "communication")):
        setattr(group, name, wrap(getattr(group, name), purpose))


def iter_grads(group: Any) -> Iterator[Tensor]:
    """Yield the gradients that ``group`` stores now: unreduced full gradients, and gradients of shards."""
    for param in group.fsdp_params:
        yield from unreduced_grads(param)
        if param.sharded_param.grad is not None:
            yield param.sharded_param.grad
