"""Edits of BERT and GPT-2 of transformers: against attention and networks written out, cached, sharded, resumed."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel
from transformers.models.bert.modeling_bert import BertLayer
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

import dtrain as dt
from dtrain.dist.dtensor import full_tensor
from dtrain.errors import ConfigError
from dtrain.surgery.attention import alibi
from dtrain.surgery.dropout import GyroDropout, gyro_dropout
from dtrain.surgery.layers import gated_linear_units
from dtrain.surgery.normalization import LowPrecisionLayerNorm, fused_layer_norm, low_precision_layer_norm

SLOPES = torch.tensor([2.0**-4, 2.0**-8]).view(2, 1, 1)  # of two heads
LENGTH = 12


def bert(kind="sdpa"):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = BertConfig(vocab_size=64, max_position_embeddings=16, attn_implementation=kind, **sizes)
    return BertModel(config, add_pooling_layer=False).eval()


def gpt2(kind="sdpa", **options):
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    ends = {"bos_token_id": 0, "eos_token_id": 1}
    return GPT2LMHeadModel(GPT2Config(attn_implementation=kind, **sizes, **ends, **options)).eval()


def ids(length=LENGTH, batch=3):
    return torch.randint(2, 64, (batch, length), generator=torch.Generator().manual_seed(length))


def apart(length):
    return (torch.arange(length).unsqueeze(1) - torch.arange(length)).abs()


def heads(x):
    return x.view(*x.shape[:2], 2, 8).transpose(1, 2)


def attended(q, k, v, scores):
    weights = (q @ k.transpose(-1, -2) / 8**0.5 + scores).softmax(-1)
    return (weights @ v).transpose(1, 2).flatten(2)


def inputs_of(module, run):
    """Record the arguments and outputs of ``module`` while ``run`` runs."""
    seen = []
    handle = module.register_forward_hook(lambda m, args, result: seen.append((args[0], result[0])))
    with torch.no_grad():
        run()
    handle.remove()
    return seen[0]


@pytest.mark.parametrize("kind", ["sdpa", "eager"])
def test_bert_attends_with_symmetric_biases_and_its_mask(kind):
    model = alibi(bert(kind))
    mask = (torch.arange(LENGTH) < torch.tensor([[12], [7], [1]])).long()
    layer = model.encoder.layer[0].attention.self
    x, output = inputs_of(layer, lambda: model(input_ids=ids(), attention_mask=mask))
    scores = -SLOPES * apart(LENGTH) + torch.where(mask.bool(), 0.0, -1e30)[:, None, None, :]
    torch.testing.assert_close(
        output, attended(*(heads(projection(x)) for projection in (layer.query, layer.key, layer.value)), scores)
    )


@pytest.mark.parametrize("kind", ["sdpa", "eager"])
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_gpt2_attends_with_causal_biases(kind, padded):
    model = alibi(gpt2(kind))
    mask = (torch.arange(LENGTH) < torch.tensor([[12], [7], [1]])).long() if padded else None
    layer = model.transformer.h[0].attn
    x, output = inputs_of(layer, lambda: model(input_ids=ids(), attention_mask=mask))
    scores = -SLOPES * apart(LENGTH) + torch.full((LENGTH, LENGTH), -1e30).triu(1)
    scores = scores if mask is None else scores + torch.where(mask.bool(), 0.0, -1e30)[:, None, None, :]
    expected = layer.c_proj(attended(*(heads(projection) for projection in layer.c_attn(x).split(16, -1)), scores))
    torch.testing.assert_close(output, expected)


def test_implementations_agree_where_attention_is_upcast():
    given = ids()
    plain = alibi(gpt2("sdpa"))(given).logits
    torch.testing.assert_close(alibi(gpt2("eager", reorder_and_upcast_attn=True))(given).logits, plain)


def test_generation_with_a_cache_equals_a_full_forward():
    model, given = alibi(gpt2()), ids(20)  # longer than its table of positions was
    with torch.no_grad():
        whole = model(given).logits
        first = model(given[:, :12], use_cache=True)
        second = model(given[:, 12:19], past_key_values=first.past_key_values, use_cache=True)
        last = model(given[:, 19:], past_key_values=second.past_key_values, use_cache=True)
    torch.testing.assert_close(torch.cat([first.logits, second.logits, last.logits], 1), whole)


def test_alibi_extends_the_maximum_sequence_length():
    model = alibi(bert(), max_length=40)
    assert model(input_ids=ids(40)).last_hidden_state.shape == (3, 40, 16)
    assert model.config.max_position_embeddings == 40
    assert alibi(gpt2())(ids(40)).logits.shape == (3, 40, 64)


def test_alibi_removes_position_embeddings_and_keeps_other_names():
    for make, position in ((bert, "embeddings.position_embeddings.weight"), (gpt2, "transformer.wpe.weight")):
        before, after = make().state_dict(), alibi(make()).state_dict()
        assert set(before) - set(after) == {position}
        assert all(after[name].equal(before[name]) for name in after)


def test_transformers_still_records_attentions():
    attentions = alibi(bert("eager"))(input_ids=ids(), output_attentions=True).attentions
    assert [tuple(attention.shape) for attention in attentions] == [(3, 2, LENGTH, LENGTH)] * 2


def test_deep_copy_applies_the_same_biases():
    model = alibi(gpt2())
    torch.testing.assert_close(copy.deepcopy(model)(ids()).logits, model(ids()).logits)


def test_cross_attention_is_unchanged():
    model = alibi(gpt2(add_cross_attention=True))
    assert [type(layer).__name__ for block in model.transformer.h for layer in (block.attn, block.crossattention)] == [
        "AlibiGPT2Attention",
        "GPT2Attention",
    ] * 2


def test_unsupported_attention_implementations_are_refused():
    model = gpt2()
    model.config._attn_implementation = "flex_attention"
    with pytest.raises(ConfigError, match="alibi: attn_implementation must be 'sdpa' or 'eager', got 'flex_attention'"):
        alibi(model)


@pytest.mark.parametrize("activation", [None, "sigmoid", "relu", "silu", "bilinear", torch.tanh])
def test_gated_linear_units_matches_the_formula_in_bert(activation):
    model = gated_linear_units(bert(), activation=activation, linear_bias=True)
    inner, x = model.encoder.layer[0].intermediate, torch.randn(3, 16)
    functions = {None: functional.gelu, "sigmoid": torch.sigmoid, "relu": torch.relu, "silu": functional.silu}
    function = functions.get(activation, activation if callable(activation) else lambda x: x)
    expected = function(x @ inner.dense.weight.T) * (x @ inner.dense.linear.weight.T + inner.dense.linear.bias)
    torch.testing.assert_close(inner(x), expected)


def test_gated_networks_keep_names_and_weights():
    before, after = bert().state_dict(), gated_linear_units(bert(), bias=True).state_dict()
    new = {f"encoder.layer.{i}.intermediate.dense.linear.weight" for i in range(2)}
    assert set(after) - set(before) == new
    assert all(after[name].equal(before[name]) for name in before)
    spread = [after[name].std().item() for name in sorted(new)]
    assert spread == pytest.approx([0.02, 0.02], rel=0.2)  # the initialiser's of BERT


def test_dropout_and_norms_of_bert_are_replaced():
    model = low_precision_layer_norm(gyro_dropout(bert(), sigma=8, tau=2))
    kinds = [type(module) for module in model.modules()]
    assert (kinds.count(GyroDropout), kinds.count(LowPrecisionLayerNorm)) == (7, 5)
    assert model.train()(input_ids=ids()).last_hidden_state.isfinite().all()


@pytest.mark.filterwarnings("ignore:fused_layer_norm")
@pytest.mark.parametrize("kind", [LlamaRMSNorm, T5LayerNorm])
def test_handwritten_norms_become_torch_norms(kind):
    norm, x = kind(8), torch.randn(3, 8)
    nn.init.normal_(norm.weight)
    fused = fused_layer_norm(nn.Sequential(norm))[0]
    assert type(fused) is nn.RMSNorm
    expected = norm(x)
    torch.testing.assert_close(fused(x), expected)
    low = fused.bfloat16()(x.bfloat16())  # the weight is one object, so norm is in low precision now, too
    torch.testing.assert_close(low.float(), expected, rtol=0.03, atol=0.03)


def test_norm_with_unit_offset_weight_is_unchanged():
    with pytest.warns(UserWarning, match="the Sequential has no unfused norm and does not change. Its 0 nn.LayerNorm"):
        fused_layer_norm(nn.Sequential(GemmaRMSNorm(8)))


def test_fused_layer_norm_keeps_an_unmodified_bert():
    model = bert()
    before = copy.deepcopy(model.state_dict())
    with pytest.warns(UserWarning, match="the BertModel has no unfused norm and does not change. Its 5 nn.LayerNorm"):
        assert fused_layer_norm(model) is model
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


# ---- as they are trained -----------------------------------------------------------------------------------------------------


def edited_bert():
    return gated_linear_units(alibi(bert(), max_length=24))


def loss_of(model, batch):
    out = model(batch["input_ids"])
    out = out.logits if hasattr(out, "logits") else out.last_hidden_state
    # The sum of squares of a layer norm is a constant, whose gradient is rounding.
    return dt.LossSum(total=out.sin().sum(), weight=batch["input_ids"].numel())


def trained(name, root, resumed):
    """All parameters after four steps of a model that was made on meta, edited, cut and filled."""
    with torch.device("meta"):
        model = (edited_bert() if name == "bert" else alibi(gpt2(attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0))).double()
    init = model._init_weights
    model = dt.shard_model(model, dt.build_mesh(), blocks=(BertLayer if name == "bert" else GPT2Block,))
    model = dt.materialize(model, seed=0, init=init).eval()  # without dropout
    step = dt.compose_step(loss_of, [])
    state = step.init(model, torch.optim.AdamW(model.parameters(), lr=0.01), seed=0)
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if resumed:
        state = dt.load_sharded(root, state)
    while state.step < 4:
        state, _ = step(state, {"input_ids": ids(20, 4)[rank * 4 // world : (rank + 1) * 4 // world] + state.step % 2 - 2})
        if state.step == 2 and not resumed:
            dt.save_sharded(root, state)
    return [value for param in state.params.values() for value in full_tensor(param.detach()).flatten().tolist()]


@pytest.mark.slow  # each rank imports transformers; the battery has the quick cases, on models of its own
@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_training_on_two_ranks_matches_one_process_and_resumes(ranks, name, tmp_path: Path):
    alone = ranks(1).run(trained, name, str(tmp_path / "one"), False)[0]
    pair = ranks(2).run(trained, name, str(tmp_path / "two"), False)
    assert pair[0] == pair[1] == pytest.approx(alone, rel=1e-9, abs=1e-12)  # float64; Adam magnifies rounding
    assert ranks(2).run(trained, name, str(tmp_path / "two"), True) == pair


def test_model_without_supported_modules_is_refused():
    with pytest.raises(ConfigError, match="alibi: nothing to replace"):
        alibi(nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="gated_linear_units: the Linear must have a network of class BertIntermediate"):
        gated_linear_units(nn.Linear(2, 2))
