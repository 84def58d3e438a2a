"""Parameter groups: their members, the members without decay, and refused rules."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import BertConfig, BertForMaskedLM

import dtrain as dt
from dtrain.errors import ConfigError
from dtrain.fqn import parameters_by_fqn
from dtrain.optim.groups import ParamGroup, param_groups


class Tied(nn.Module):
    """An embedding that is the head, too, a norm, a scale of its own, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.body = nn.Linear(4, 4)
        self.norm = nn.LayerNorm((3, 4))
        self.scale = nn.Parameter(torch.ones(4))
        self.frozen = nn.Linear(4, 4)
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight


def members(model: nn.Module, *rules: ParamGroup, **options) -> dict[str, list[str]]:
    """The names in each group."""
    names = {id(param): name for name, param in parameters_by_fqn(model)[0].items()}
    return {group["name"]: [names[id(p)] for p in group["params"]] for group in param_groups(model, *rules, **options)}


def test_norms_biases_and_embeddings_do_not_decay():
    assert members(Tied()) == {
        "all": ["body.weight"],
        "all.no_decay": ["scale", "embed.weight", "body.bias", "norm.weight", "norm.bias"],
    }
    groups = param_groups(Tied(), weight_decay=0.3)
    assert [group["weight_decay"] for group in groups] == [0.3, 0.0]


def test_every_trainable_parameter_of_a_transformer_is_in_one_group():
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = BertForMaskedLM(BertConfig(vocab_size=20, max_position_embeddings=8, **sizes))
    groups = members(model)
    assert sorted(groups["all"] + groups["all.no_decay"]) == sorted(parameters_by_fqn(model)[0])
    assert all(name.endswith(".weight") and "LayerNorm" not in name and "embeddings" not in name for name in groups["all"])
    assert len(groups["all"]) == 7  # query, key, value, two of the feed-forward part, two dense ones


@pytest.mark.parametrize("no_decay", ["**.weight", ["body.*", "**.weight"], lambda name, param: param.ndim == 2, ()])
def test_no_decay_selects_parameters_without_decay(no_decay):
    groups = members(nn.Sequential(nn.Linear(2, 2)), no_decay=no_decay)
    assert groups == ({"all": ["0.bias"], "all.no_decay": ["0.weight"]} if no_decay else {"all": ["0.weight", "0.bias"]})


def test_rule_weight_decay_applies_to_its_whole_group():
    head = ParamGroup("head", "head.**", {"lr": 0.5, "weight_decay": 0.7})
    model = nn.ModuleDict({"body": nn.Linear(2, 2), "head": nn.Linear(2, 2)})
    decays = [
        {k: v for k, v in g.items() if k != "params"} for g in param_groups(model, head, ParamGroup("rest"), weight_decay=0.1)
    ]
    assert decays == [
        {"name": "head", "lr": 0.5, "weight_decay": 0.7},
        {"name": "rest", "weight_decay": 0.1},
        {"name": "rest.no_decay", "weight_decay": 0.0},
    ]


def test_tied_parameter_matches_any_name_and_is_grouped_once():
    assert members(Tied(), ParamGroup("tied", "head.*"), ParamGroup("rest"))["tied.no_decay"] == ["embed.weight"]


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (
            [ParamGroup("a", "body.*"), ParamGroup("b", ["**.*", "scale"])],
            "the rules a and b both match body.weight, body.bias. Let one",
        ),
        (
            [ParamGroup("a", "body.*")],
            r"no rule matches scale, embed.weight, norm.weight, norm.bias. Add .*: ParamGroup\('rest'\)",
        ),
        (
            [ParamGroup("a", "frozen.*"), ParamGroup("rest")],
            "the rule 'a' matches none of 6 trainable parameters .first: 'scale'.",
        ),
        ([ParamGroup("a", "body.*"), ParamGroup("a")], "names of rules must be unique, got 'a' twice"),
        ([ParamGroup("a"), ParamGroup("b")], "only one rule may have no select, got 'a' and 'b'"),
        ([{"params": "body.*"}], "rules must be ParamGroup objects, got .* Pass for example ParamGroup"),
    ],
    ids=["overlap", "leftover", "nothing", "one name", "two rests", "no rule"],
)
def test_invalid_rules_are_refused(rules, message):
    with pytest.raises(ConfigError, match=f"param_groups: {message}"):
        param_groups(Tied(), *rules)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ParamGroup(""), "ParamGroup: name must be a non-empty string, got ''. Pass for example ParamGroup"),
        (lambda: ParamGroup("a", 3), "ParamGroup: select must be name patterns or a function .*, got 3"),
        (lambda: ParamGroup("a", [3]), "ParamGroup: patterns of names must be text, got 3"),
        (lambda: ParamGroup("a", None, {"params": []}), "ParamGroup: options of 'a' must be optimizer options, got 'params'"),
        (
            lambda: param_groups(Tied(), weight_decay=-1.0),
            "param_groups: weight_decay must be a finite number at least 0, got -1.0",
        ),
        (lambda: param_groups(Tied().parameters()), "param_groups: model must be a torch.nn.Module, got generator"),
        (lambda: param_groups(Tied().requires_grad_(False)), "param_groups: the model has no trainable parameters"),
    ],
)
def test_invalid_arguments_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_group_names_are_clean_for_every_wrapper():
    model = Tied()
    model.body = checkpoint_wrapper(model.body)
    assert members(model, ParamGroup("body", "body.*"), ParamGroup("rest"))["body"] == ["body.weight"]


def sharded(leave_out: list[str]) -> list:
    """Names in groups before and after, and a step of the fused optimizer with them."""
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    before = members(model)
    model = dt.shard_model(model, dt.build_mesh(), blocks=(nn.Linear,), ignored_params=leave_out)
    loss = dt.mean_loss(lambda model, batch: model(batch).square().mean(), weight=len)
    step = dt.compose_step(loss, [])
    step(step.init(model, torch.optim.AdamW(param_groups(model), fused=True)), torch.ones(2, 4))
    return [before, members(model)]


def test_groups_are_the_same_after_sharding(ranks):
    for before, after in ranks(2).run(sharded, []):
        assert before == after == {"all": ["0.weight", "2.weight"], "all.no_decay": ["0.bias", "1.weight", "1.bias", "2.bias"]}


def test_sharded_and_unsharded_parameters_form_separate_groups(ranks):
    for _, after in ranks(2).run(sharded, ["2.*"]):
        assert sorted(after) == ["all.no_decay.over_dp_all", "all.no_decay.whole", "all.over_dp_all", "all.whole"]
        assert after["all.whole"] == ["2.weight"]
