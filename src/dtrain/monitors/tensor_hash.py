"""A number of 64 bits that stands for the bits of a tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_BLOCK = 2**15  # words; of a place in a block the factor is the same in all blocks, and each block has one, too
_STRIDE = 0x9E3779B97F4A7C15 - 2**64  # an odd number without a pattern (2**64 over the golden ratio), as int64
_PER_BLOCK = 0xD1B54A32D192ED03 - 2**64
_MIX = 0xBF58476D1CE4E5B9 - 2**64  # these two are odd, and nothing else


def hash_tensors(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """A hash of the bits of each tensor, in the order of its elements: int64 ``[n]`` on ``device``.

    One changed bit always changes it, also of a zero's sign or of a NaN; other changes go unseen with a probability of about
    ``2**-33`` or less. The shape does not count. Equal bits give equal hashes on every device.

    Formula: ``sum_i word_i * odd_i  mod 2**64`` with the 32-bit words of a tensor (of 1- and 2-byte dtypes its elements) and an
    odd number for each place: one of the place within a block times one of the block

    Args:
        tensors: dense, plain, of any dtype but float4.
        device: where the hashes are to be.

    Host sync: none, except for tensors on another device.

    Source: multiply-add hashing, Dietzfelbinger 1996, Universal hashing and k-wise independent random variables.

    Example:
        >>> one, other = hash_tensors([torch.tensor([0.0, 1.0]), torch.tensor([1.0, 0.0])], torch.device("cpu"))
        >>> bool(one == other), bool(one == hash_tensors([torch.tensor([0.0, 1.0])], torch.device("cpu"))[0])
        (False, True)
    """
    words = [_to_words(tensor.detach()) for tensor in tensors]
    blocks = 1 + max((len(each) for each in words), default=0) // _BLOCK
    odd: dict[torch.device, tuple[Tensor, Tensor]] = {}
    for where in {each.device for each in words}:
        odd[where] = _odd_factors(_BLOCK, _STRIDE, where), _odd_factors(blocks, _PER_BLOCK, where)
    found = [_hash_words(each, *odd[each.device]).to(device) for each in words]
    return torch.stack(found) if found else torch.zeros(0, dtype=torch.int64, device=device)


def _to_words(tensor: Tensor) -> Tensor:
    """The bits of a tensor as flat integers, of at most 32 bits: of wider ones a sum of products loses the upper bits."""
    flat = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    flat = flat.contiguous().view(-1)
    return flat.view({1: torch.uint8, 2: torch.int16}.get(flat.element_size(), torch.int32))


def _odd_factors(count: int, stride: int, device: torch.device) -> Tensor:
    """Odd numbers without a pattern, one for each place: multiples of one number would let regular changes cancel out."""
    mixed = torch.arange(1, count + 1, device=device, dtype=torch.int64).mul_(stride)
    for shift in (32, 29):
        mixed.bitwise_xor_(mixed >> shift).mul_(_MIX)
    return mixed.bitwise_or_(1)


def _hash_words(words: Tensor, within: Tensor, of_block: Tensor) -> Tensor:
    whole = len(words) // _BLOCK
    rest = words[whole * _BLOCK :]
    last = (rest * within[: len(rest)]).sum() * of_block[whole]
    if not whole:
        return last
    at_once = 1 if words.device.type == "cpu" else 256  # what stays in a cache, and what keeps a GPU busy
    blocks = words[: whole * _BLOCK].view(whole, _BLOCK).split(at_once)
    return (torch.cat([(some * within).sum(dim=1) for some in blocks]) * of_block[:whole]).sum() + last
