"""Linear biases of attention: the numbers of the paper, masks, and models of one's own; BERT and GPT-2 are tested beside."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from dtrain.errors import ConfigError
from dtrain.surgery.attention import (
    AlibiMultiheadAttention,
    ZeroPositionEmbedding,
    add_alibi_bias,
    alibi,
    alibi_bias,
    alibi_slopes,
)

LEAST = torch.finfo(torch.float32).min


@pytest.mark.parametrize(
    ("heads", "exponents"),
    [
        (1, [-8]),
        (8, [-1, -2, -3, -4, -5, -6, -7, -8]),
        (16, [-0.5 * h for h in range(1, 17)]),
        (12, [-1, -2, -3, -4, -5, -6, -7, -8, -0.5, -1.5, -2.5, -3.5]),
        (6, [-2, -4, -6, -8, -1, -3]),
    ],
)
def test_slopes_match_the_paper(heads, exponents):
    assert alibi_slopes(heads).tolist() == pytest.approx([2.0**exponent for exponent in exponents])


def test_alibi_bias_is_slope_times_distance():
    bias = alibi_bias(8, 2, 4, dtype=torch.float64)
    assert bias.dtype == torch.float64
    assert bias[0].tolist() == [[-1.0, -0.5, 0.0, -0.5], [-1.5, -1.0, -0.5, 0.0]]
    assert bias[7].equal(bias[0] / 128)


def test_biases_in_low_precision_are_computed_before_they_are_rounded():
    assert alibi_bias(8, 1, 400, dtype=torch.bfloat16)[7, 0, 0].item() == torch.tensor(-399 / 256).bfloat16().item()


@pytest.mark.parametrize(
    ("mask", "causal", "expected"),
    [
        (None, False, [[0.0, -1.0], [-1.0, 0.0]]),
        (None, True, [[0.0, LEAST], [-1.0, 0.0]]),
        (torch.tensor([[True, False]]), True, [[0.0, LEAST], [-1.0, LEAST]]),
        (torch.tensor([[0.0, LEAST]]), False, [[0.0, LEAST], [-1.0, LEAST]]),
        (torch.tensor([[0.5, -3.0], [LEAST, LEAST]]), False, [[0.5, -4.0], [LEAST, LEAST]]),
    ],
    ids=["none", "causal", "bools", "floats", "floats of each query"],
)
def test_bias_is_added_to_every_mask_type(mask, causal, expected):
    bias = -torch.tensor([[[0.0, 1.0], [1.0, 0.0]]])
    biased = add_alibi_bias(None if mask is None else mask[None, None], bias, causal=causal)
    assert biased[0, 0].tolist() == expected


def test_half_precision_masks_stay_finite():
    mask = torch.full((1, 1, 1, 2000), torch.finfo(torch.float16).min, dtype=torch.float16)
    assert add_alibi_bias(mask, alibi_bias(8, 1, 2000, dtype=torch.float16), causal=False).isfinite().all()


class Attention(nn.Module):
    """A user's attention that takes a mask by name."""

    def __init__(self, dim=8, heads=2, is_causal=False):
        super().__init__()
        self.heads, self.is_causal = heads, is_causal
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x, attention_mask=None):
        q, k, v = (projection.unflatten(-1, (self.heads, -1)).transpose(1, 2) for projection in self.qkv(x).chunk(3, -1))
        causal = self.is_causal and attention_mask is None
        attended = functional.scaled_dot_product_attention(q, k, v, attn_mask=attention_mask, is_causal=causal)
        return self.out(attended.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, is_causal=True):
        super().__init__()
        self.tokens, self.places = nn.Embedding(11, 8), nn.Embedding(6, 8)
        self.attention = Attention(is_causal=is_causal)

    def forward(self, ids):
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        return x + self.attention(x, attention_mask=None)


@pytest.mark.parametrize("is_causal", [True, False])
def test_alibi_biases_a_users_attention(is_causal):
    model = alibi(Model(is_causal), attentions={Attention: "heads"}, positions="places")
    assert isinstance(model.places, ZeroPositionEmbedding)
    x = torch.randn(2, 9, 8)
    scores = alibi_bias(2, 9) + (torch.full((9, 9), -1e30).triu(1) if is_causal else 0)
    torch.testing.assert_close(model.attention(x), Attention.forward(model.attention, x, scores.unsqueeze(0)))
    assert model(torch.zeros(2, 9, dtype=torch.int64)).shape == (2, 9, 8)  # longer than the table was


def test_attention_under_autocast_takes_the_bias():
    model = alibi(Model(), attentions={Attention: "heads"})
    ids = torch.arange(12).view(2, 6) % 11
    with torch.autocast(torch.get_default_device().type, torch.bfloat16):
        low = model(ids)
    torch.testing.assert_close(low, model(ids), rtol=0.05, atol=0.05)


def test_attention_in_low_precision_takes_the_bias():
    layer = alibi(nn.Sequential(Attention(is_causal=True)), attentions={Attention: "heads"})[0].bfloat16()
    x = torch.randn(2, 6, 8, dtype=torch.bfloat16)
    assert layer(x).dtype == torch.bfloat16


def test_edited_layers_share_one_class():
    model = alibi(nn.Sequential(Attention(), Attention()), attentions={Attention: "heads"})
    assert type(model[0]) is type(model[1])
    assert isinstance(model[0], Attention)
    assert type(model[0]).__name__ == "AlibiAttention"


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda: alibi_slopes(0), "alibi_slopes: heads must be an integer of at least 1, got 0"),
        (lambda: alibi_bias(2.0, 3), r"alibi_slopes: heads must be an integer of at least 1, got 2\.0"),
        (lambda: alibi(Model(), max_length=0), "max_length must be an integer of at least 1, got 0"),
        (lambda: alibi(Model(), attentions={Attention: "width"}), r"Attention\.width must be the number of heads, got None"),
        (
            lambda: alibi(Model(), attentions={Attention: "heads"}, positions="position"),
            "alibi: positions='position' matches no module of the Model",
        ),
        (
            lambda: add_alibi_bias(torch.ones(2, 2), alibi_bias(1, 2), causal=False),
            r"mask must be a bool or float tensor \[batch, heads, length, keys\], got torch.float32 \[2, 2\]. Use sdpa",
        ),
        (lambda: add_alibi_bias("full", alibi_bias(1, 2), causal=False), "mask must be a bool or float tensor .*, got str"),
        (
            lambda: add_alibi_bias(torch.ones(1, 1, 2, 3), alibi_bias(1, 2), causal=False),
            "mask must have 2 keys, got 3. Do not use caches of a fixed size",
        ),
        (
            lambda: alibi(nn.Sequential(Attention()), attentions={Attention: "heads"})[0](torch.ones(1, 2, 8), None),
            "AlibiAttention must get keyword arguments after hidden_states",
        ),
    ],
)
def test_invalid_arguments_are_refused(run, message):
    with pytest.raises(ConfigError, match=message):
        run()


def test_attentions_must_be_given_without_transformers(monkeypatch):
    monkeypatch.setattr("dtrain.surgery.attention.find_imported_class", lambda module, name: None)
    with pytest.raises(ConfigError, match="alibi: the model must have a known attention, but this process did not import"):
        alibi(Model())


def test_unmatched_positions_pattern_is_refused_before_any_change():
    model = nn.Sequential(Attention())
    with pytest.raises(ConfigError, match="alibi: positions='wpe' matches no module of the Sequential"):
        alibi(model, attentions={Attention: "heads"}, positions=("0", "wpe"))
    assert type(model[0]) is Attention


MINE = {nn.MultiheadAttention: "num_heads"}
LENGTH = 5
PADDING = torch.arange(LENGTH) >= torch.tensor([[5], [3]])  # True is hidden
CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)


def written(layer, x, hidden):
    """``[batch, length, dim]``, by the formula; ``hidden`` ``[batch or 1, length, length]``."""
    q, k, v = (
        projection.unflatten(-1, (2, -1)).transpose(1, 2)
        for projection in (x @ layer.in_proj_weight.T + layer.in_proj_bias).chunk(3, -1)
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
    output, seen = layer(x, x, x, need_weights=need_weights, average_attn_weights=False, **options)
    torch.testing.assert_close(output, expected)
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
