"""torch's own attention with linear biases, in all the forms that it is called in."""

import pytest
import torch
from torch import nn

from dtrain.surgery.attention.alibi import AlibiMultiheadAttention, alibi, alibi_bias

MINE = {nn.MultiheadAttention: "num_heads"}
LENGTH = 5
PADDING = torch.arange(LENGTH) >= torch.tensor([[5], [3]])  # True is hidden
CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)


def written(layer, x, hidden):
    """``[batch, length, dim]``, by the formula; ``hidden`` ``[batch or 1, length, length]``."""
    q, k, v = (
        part.unflatten(-1, (2, -1)).transpose(1, 2) for part in (x @ layer.in_proj_weight.T + layer.in_proj_bias).chunk(3, -1)
    )
    scores = q @ k.transpose(-1, -2) / 2.0 + alibi_bias(2, LENGTH)
    weights = scores.masked_fill(hidden.unsqueeze(1), -torch.inf).softmax(-1)
    return layer.out_proj((weights @ v).transpose(1, 2).flatten(2)), weights


def made(**options):
    torch.manual_seed(0)
    return alibi(nn.Sequential(nn.MultiheadAttention(8, 2, **options)), attentions=MINE)[0]


def added(mask):
    return torch.zeros(mask.shape).masked_fill(mask, -torch.inf)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize(
    ("options", "hidden"),
    [
        ({}, torch.zeros(1, LENGTH, LENGTH, dtype=torch.bool)),
        ({"attn_mask": CAUSAL}, CAUSAL[None]),
        ({"attn_mask": added(CAUSAL), "is_causal": True}, CAUSAL[None]),
        ({"is_causal": True}, CAUSAL[None]),
        ({"key_padding_mask": PADDING}, PADDING[:, None]),
        ({"key_padding_mask": added(PADDING), "attn_mask": CAUSAL}, PADDING[:, None] | CAUSAL),
        ({"attn_mask": CAUSAL.expand(4, LENGTH, LENGTH)}, CAUSAL[None]),
    ],
    ids=["none", "bools", "floats", "causal", "padding", "both", "by head"],
)
def test_alibi_attention_matches_the_formula_for_every_mask(options, hidden, need_weights):
    layer, x = made(batch_first=True), torch.randn(2, LENGTH, 8)
    expected, weights = written(layer, x, hidden.expand(2, LENGTH, LENGTH))
    found, seen = layer(x, x, x, need_weights=need_weights, average_attn_weights=False, **options)
    torch.testing.assert_close(found, expected)
    assert (seen is not None) is need_weights
    if need_weights:
        torch.testing.assert_close(seen, weights)


def test_sequence_first_and_unbatched_inputs_match_batch_first():
    first, last, x = made(batch_first=True), made(), torch.randn(2, LENGTH, 8)
    expected = first(x, x, x)[0]
    flipped = x.transpose(0, 1)
    torch.testing.assert_close(last(flipped, flipped, flipped)[0].transpose(0, 1), expected)
    torch.testing.assert_close(last(x[0], x[0], x[0])[0], expected[0])


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_torch_encoder_evaluation_fast_path_applies_biases(padded):
    """It has kernels of its own for evaluation, and nested tensors, which know no biases."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = alibi(nn.TransformerEncoder(layer, 2), attentions=MINE)
    x, options = torch.randn(2, LENGTH, 8), {"src_key_padding_mask": PADDING} if padded else {}
    trained = model(x, **options).detach()
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(x, **options), trained)


def test_cross_attention_of_a_decoder_is_unchanged():
    model = alibi(nn.TransformerDecoderLayer(8, 2, 16), attentions=MINE)
    assert type(model.self_attn) is AlibiMultiheadAttention
    assert type(model.multihead_attn) is nn.MultiheadAttention


def test_parameter_names_are_unchanged():
    model = nn.Sequential(nn.MultiheadAttention(8, 2))
    alibi(model, attentions=MINE)
    assert model.state_dict().keys() == nn.Sequential(nn.MultiheadAttention(8, 2)).state_dict().keys()
