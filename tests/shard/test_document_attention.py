"""Attention within documents on parts of rows equals masked attention on whole rows, and exchanges the bytes that it must."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dtrain.data.packed_tokens import document_bounds, document_mask
from dtrain.dist.collective_replay import get_interceptor
from dtrain.dist.mesh import build_mesh
from dtrain.errors import ConfigError
from dtrain.shard.sequence_attention import document_attention

TOLERANCE = 1e-12  # largest difference of an output or a gradient near 1, in float64
BATCH, SEQ, DIM, VALUE_DIM = 2, 12, 4, 6
# Ragged, across parts, of one token, and a row that is one document.
DOCUMENTS = torch.tensor([[0, 0, 0, 0, 0, 1, 2, 2, 2, 2, -1, -1], [7] * SEQ])
HEADS = {
    "equal": (4, 4),
    "grouped": (8, 4),
    "as many key heads as ranks of two": (8, 2),
    "one key head": (4, 1),
    "key heads that the ranks do not divide": (12, 6),
    "ranks with different numbers of key heads": (12, 3),
}


def tensors(heads: int, key_heads: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(heads)
    shapes = [(heads, DIM), (key_heads, DIM), (key_heads, VALUE_DIM), (heads, VALUE_DIM)]
    return [torch.randn(BATCH, count, SEQ, dim, generator=generator, dtype=torch.float64) for count, dim in shapes]


def whole(heads: int, key_heads: int, causal: bool) -> list[Tensor]:
    """Return the output and the gradients of torch's attention with a dense mask."""
    query, key, value, weight = tensors(heads, key_heads)
    leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
    mask = document_mask(DOCUMENTS, causal=causal)
    output = F.scaled_dot_product_attention(*leaves, attn_mask=mask, scale=0.7, enable_gqa=True)
    (output * weight).sum().backward()
    return [output.detach(), *(leaf.grad for leaf in leaves)]


def in_parts(cases: dict[str, tuple[int, int]], ranks: int) -> dict[str, list[float]]:
    """Return the largest differences of this rank's part of the output and the gradients."""
    axis = build_mesh(cp=ranks)["cp"]
    length = SEQ // ranks
    own = slice(axis.get_local_rank() * length, (axis.get_local_rank() + 1) * length)
    largest = {}
    for name, heads in cases.items():
        for causal in (True, False):
            *leaves, weight = (tensor[:, :, own].clone() for tensor in tensors(*heads))
            leaves = [leaf.requires_grad_() for leaf in leaves]
            bounds = document_bounds(DOCUMENTS)
            output = document_attention(*leaves, bounds, causal=causal, scale=0.7, axis=axis)
            (output * weight).sum().backward()
            results = [output.detach(), *(leaf.grad for leaf in leaves)]
            pairs = zip(results, whole(*heads, causal), strict=True)
            largest[f"{name}, causal={causal}"] = [
                (result - expected[:, :, own]).abs().max().item() for result, expected in pairs
            ]
    return largest


@pytest.mark.parametrize("count", [2, 4])
def test_parts_of_rows_equal_masked_attention_on_whole_rows(ranks, count):
    for largest in ranks(count).run(in_parts, HEADS, count):
        assert len(largest) == 2 * len(HEADS)
        assert max(map(max, largest.values())) <= TOLERANCE, largest


@pytest.mark.parametrize("causal", [True, False])
def test_one_rank_needs_no_axis(causal):
    *leaves, _ = tensors(8, 4)
    output = document_attention(*leaves, document_bounds(DOCUMENTS), causal=causal, scale=0.7)
    assert (output - whole(8, 4, causal)[0]).abs().max() <= TOLERANCE
    rows = document_attention(*leaves, causal=causal)
    assert torch.equal(rows, F.scaled_dot_product_attention(*leaves, is_causal=causal, enable_gqa=True))


def test_an_empty_batch_has_an_empty_output():
    query, key, value = (tensor[:0] for tensor in tensors(4, 2)[:3])
    output = document_attention(query, key, value, document_bounds(torch.zeros(0, SEQ, dtype=torch.int64)))
    assert output.shape == (0, 4, SEQ, VALUE_DIM)


def exchanged(heads: int, key_heads: int) -> list[tuple[str, int]]:
    """Return the operation and the bytes that this rank gives to it, for each collective of a forward and a backward."""
    axis = build_mesh(cp=4)["cp"]
    *leaves, _ = (tensor[:, :, : SEQ // 4].clone().requires_grad_() for tensor in tensors(heads, key_heads))
    calls = []

    def count(operation, args, kwargs, issue):
        calls.append((operation.name(), args[1].numel() * args[1].element_size()))
        return issue()

    with get_interceptor().listen(count):
        document_attention(*leaves, document_bounds(DOCUMENTS), axis=axis).sum().backward()
    return calls


@pytest.mark.parametrize(("heads", "key_heads", "sent_key_heads"), [(8, 4, 4), (8, 2, 4), (4, 1, 4)])
def test_a_rank_exchanges_its_own_part_of_query_key_value_and_output(ranks, heads, key_heads, sent_key_heads):
    tokens = BATCH * SEQ // 4 * 8  # of a part, times bytes of a float64
    inputs = tokens * (heads * DIM + sent_key_heads * (DIM + VALUE_DIM))
    output = tokens * heads * VALUE_DIM
    for calls in ranks(4).run(exchanged, heads, key_heads):
        assert {operation for operation, _ in calls} == {"c10d::alltoall_base_"}
        # Forward, and the same backward in the opposite order. The documents cost nothing.
        assert [size for _, size in calls] == [inputs, output, output, inputs]


def refused(case: str) -> str:
    axis = build_mesh(cp=4)["cp"]
    query, key, value = (tensor[:, :, :3] for tensor in tensors(8, 4)[:3])
    bounds = document_bounds(DOCUMENTS)
    if case == "heads":
        query, key, value = query[:, :6], key[:, :3], value[:, :3]
    if case == "key heads":
        key, value = key[:, :3], value[:, :3]
    if case == "dims":
        query = query[0]
    if case == "lengths":
        key = key[:, :, :2]
    if case == "bounds":
        bounds = document_bounds(DOCUMENTS[:, :3])
    try:
        document_attention(query, key, value, bounds, axis=axis)
    except ConfigError as error:
        return str(error)
    return "taken"


REFUSED = {
    "heads": "the number of query heads must be a multiple of the 4 ranks along cp, got 6 heads on this rank. Use a smaller cp",
    "key heads": "[batch, heads] of key and value must be equal and divide the heads of query, got [2, 8], [2, 3] and [2, 3].",
    "dims": "query, key and value must be [batch, heads, seq, dim], got 3, 4 and 4 dims.",
    "lengths": "query, key and value must have the same length, got 3, 2 and 3. Use self-attention without a cache.",
    "bounds": "bounds must be those of 2 rows of 12 tokens, each ending with its row, got 2 documents up to token 6. Pass",
}


@pytest.mark.parametrize("case", REFUSED)
def test_tensors_that_do_not_fit_are_refused(ranks, case):
    for message in ranks(4).run(refused, case):
        assert re.match(f"document_attention: {re.escape(REFUSED[case])}", message)
