"""Attention over packed documents is attention over each of them alone."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from documents import documents
from dtrain.data.packed_tokens import PackedTokens, document_bounds, document_mask
from dtrain.errors import ConfigError

FLOAT64_REORDERING = 1e-12  # absolute, on outputs near 1: a masked softmax sums in another order than a short one
HEADS, DIM, SEQ = 2, 8, 11
LENGTHS = [4, 0, 6, 3, 25, 1, 1, 2]  # document 4 goes over three blocks: each of its parts is alone, too


class Layer(nn.Module):
    """Attention with learned positions, whose heads get their mask or their bounds from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(1000, DIM), nn.Embedding(SEQ, DIM)
        self.qkv = nn.Linear(DIM, 3 * DIM)

    def heads(self, tokens: Tensor, positions: Tensor) -> list[Tensor]:
        """Query, key and value ``[..., heads, seq, dim of a head]``."""
        x = self.qkv(self.tokens(tokens) + self.places(positions))
        return [projection.unflatten(-1, (HEADS, -1)).transpose(-3, -2) for projection in x.chunk(3, dim=-1)]


def layer() -> Layer:
    torch.manual_seed(0)
    return Layer().double()


def batch() -> dict[str, Tensor]:
    blocks = list(PackedTokens(documents(LENGTHS), seq=SEQ, lengths=LENGTHS))
    return {name: torch.stack([block[name] for block in blocks]) for name in blocks[0]}


def alone(net: Layer, packed: dict[str, Tensor], *, causal: bool) -> Tensor:
    """The outputs of each document's part of a block, run on its own: ``[batch, heads, seq, dim]``, zero at padding."""
    rows = []
    for tokens, numbers in zip(packed["input_ids"], packed["documents"], strict=True):
        row = torch.zeros(HEADS, SEQ, DIM // HEADS, dtype=torch.float64)
        for number in numbers.unique():
            places = (numbers == number).nonzero().squeeze(1)
            if number >= 0:
                heads = net.heads(tokens[places], torch.arange(len(places)))
                row[:, places] = F.scaled_dot_product_attention(*heads, is_causal=causal)
        rows.append(row)
    return torch.stack(rows)


@pytest.mark.parametrize("causal", [True, False])
def test_masked_attention_equals_that_of_separate_documents(causal):
    net, packed = layer(), batch()
    attended = F.scaled_dot_product_attention(
        *net.heads(packed["input_ids"], packed["positions"]), attn_mask=document_mask(packed["documents"], causal=causal)
    )
    real = (packed["documents"] >= 0)[:, None, :, None]
    assert attended.isfinite().all(), "padding has nothing to look at"
    assert (attended * real - alone(net, packed, causal=causal)).abs().max() <= FLOAT64_REORDERING


@pytest.mark.parametrize("causal", [True, False])
def test_attention_within_bounds_equals_that_of_separate_documents(causal):
    """Bounds cut the batch, its rows joined in order, into the documents for each variable-length kernel."""
    net, packed = layer(), batch()
    offsets, longest = document_bounds(packed["documents"])
    heads = [tensor.transpose(1, 2).flatten(0, 1) for tensor in net.heads(packed["input_ids"], packed["positions"])]
    parts = []
    for begin, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        assert 0 < end - begin <= longest
        piece = [tensor[begin:end].transpose(0, 1) for tensor in heads]
        parts.append(F.scaled_dot_product_attention(*piece, is_causal=causal).transpose(0, 1))
    attended = torch.cat(parts).unflatten(0, packed["documents"].shape).transpose(1, 2)
    real = (packed["documents"] >= 0)[:, None, :, None]
    assert (attended * real - alone(net, packed, causal=causal)).abs().max() <= FLOAT64_REORDERING


def test_equal_document_numbers_in_two_rows_are_separate_documents():
    offsets, longest = document_bounds(torch.tensor([[7, 7], [7, 8]]))
    assert (offsets.tolist(), offsets.dtype, longest) == ([0, 2, 3, 4], torch.int32, 2)


def test_document_bounds_of_an_empty_batch_are_empty():
    offsets, longest = document_bounds(torch.zeros(0, 5, dtype=torch.int64))
    assert (offsets.tolist(), longest) == ([0], 0)


@pytest.mark.parametrize("function", [document_mask, document_bounds])
def test_document_numbers_of_a_different_shape_are_refused(function):
    with pytest.raises(ConfigError, match=r"documents must be \[batch, seq\], got shape \(5,\)"):
        function(torch.zeros(5))
