"""Compare tensors that several ranks hold: the replicas of a shard, and a hash of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dtrain.dist.init import get_dist_info
from dtrain.dtensor import is_dtensor, shard_box, to_local

# words per block; the factor of a word is the factor of its position in the block times the factor of the block
_BLOCK = 2**15
# odd number without a pattern (2**64 over the golden ratio), as int64
_STRIDE = 0x9E3779B97F4A7C15 - 2**64
# two arbitrary odd numbers
_PER_BLOCK = 0xD1B54A32D192ED03 - 2**64
_MIX = 0xBF58476D1CE4E5B9 - 2**64


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicatedEntry:
    """Entry that several ranks hold: all ranks with the same ``shard_key``. An empty ``shard_key`` means all ranks."""

    name: str
    shard_key: str = ""
    tensor: Tensor | None = None
    hash: int = 0


def replicated_entries(named: Mapping[str, Tensor]) -> Iterator[ReplicatedEntry]:
    """Yield the tensors of which another rank holds a replica. A plain tensor is whole on all ranks."""
    for name, tensor in named.items():
        if not is_dtensor(tensor):
            yield ReplicatedEntry(name=name, tensor=tensor)
            continue
        box = shard_box(tensor)
        if box.num_replicas == get_dist_info().world_size:
            yield ReplicatedEntry(name=name, tensor=to_local(tensor))
        elif box.num_replicas > 1:
            yield ReplicatedEntry(name=name, tensor=to_local(tensor), shard_key=f"{box.offset} {box.size}")


def hash_tensors(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Hash the bits of each tensor in the order of its elements: int64 ``[n]`` on ``device``.

    A change of a single bit always changes the hash, including the sign of zero and NaN payloads. Any other change is missed
    with probability about ``2**-33`` or less. The shape is ignored. Equal bits give equal hashes on every device.

    Formula: ``sum_i word_i * odd_i  mod 2**64`` with the 32-bit words of a tensor (of 1- and 2-byte dtypes its elements) and
    an odd number for each position: the factor of the position within a block times the factor of the block

    Args:
        tensors: dense, plain tensors of any dtype except float4.
        device: device of the hashes.

    Host sync: none, except for tensors on another device.

    Source: multiply-add hashing, Dietzfelbinger 1996, Universal hashing and k-wise independent random variables.

    Example:
        >>> first, second = hash_tensors([torch.tensor([0.0, 1.0]), torch.tensor([1.0, 0.0])], torch.device("cpu"))
        >>> bool(first == second), bool(first == hash_tensors([torch.tensor([0.0, 1.0])], torch.device("cpu"))[0])
        (False, True)
    """
    words = [_to_words(tensor.detach()) for tensor in tensors]
    blocks = 1 + max((len(each) for each in words), default=0) // _BLOCK
    factors: dict[torch.device, tuple[Tensor, Tensor]] = {}
    for place in {each.device for each in words}:
        factors[place] = _odd_factors(_BLOCK, _STRIDE, place), _odd_factors(blocks, _PER_BLOCK, place)
    hashes = [_hash_words(each, *factors[each.device]).to(device) for each in words]
    return torch.stack(hashes) if hashes else torch.zeros(0, dtype=torch.int64, device=device)


def _to_words(tensor: Tensor) -> Tensor:
    """View the bits of a tensor as flat integers of at most 32 bits. A sum of wider products would lose the upper bits."""
    flat = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    flat = flat.contiguous().view(-1)
    return flat.view({1: torch.uint8, 2: torch.int16}.get(flat.element_size(), torch.int32))


def _odd_factors(count: int, stride: int, device: torch.device) -> Tensor:
    """Compute odd numbers without a pattern, one per position. With multiples of one number, regular changes could cancel."""
    mixed = torch.arange(1, count + 1, device=device, dtype=torch.int64).mul_(stride)
    for shift in (32, 29):
        mixed.bitwise_xor_(mixed >> shift).mul_(_MIX)
    return mixed.bitwise_or_(1)


def _hash_words(words: Tensor, position_factors: Tensor, block_factors: Tensor) -> Tensor:
    num_blocks = len(words) // _BLOCK
    rest = words[num_blocks * _BLOCK :]
    last = (rest * position_factors[: len(rest)]).sum() * block_factors[num_blocks]
    if not num_blocks:
        return last
    # One block fits in the cache of a CPU. A GPU needs many blocks to be busy.
    blocks_at_once = 1 if words.device.type == "cpu" else 256
    blocks = words[: num_blocks * _BLOCK].view(num_blocks, _BLOCK).split(blocks_at_once)
    sums = torch.cat([(some * position_factors).sum(dim=1) for some in blocks])
    return (sums * block_factors[:num_blocks]).sum() + last
