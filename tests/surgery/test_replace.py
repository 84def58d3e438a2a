"""replace_modules: its changes, its report, the kept attributes, and its refusals."""

import copy
import pickle

import pytest
import torch
from torch import nn

import dtrain as dt
from dtrain.errors import ConfigError
from dtrain.surgery.attention import alibi
from dtrain.surgery.convolutions import (
    Blur,
    ChannelsLast,
    WeightStandardized,
    blur_pool,
    channels_last,
    squeeze_excite,
    standardize_weight,
    weight_standardization,
)
from dtrain.surgery.normalization import low_precision_layer_norm
from dtrain.surgery.replace import add_mixin, apply_policies, find_imported_class, replace_modules

GELU = {nn.ReLU: lambda module, name: nn.GELU()}


class Wrapping(nn.Module):
    """A module that keeps the module it replaces."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.scale = nn.Parameter(torch.ones(2))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        return self.inner(x) * self.scale


class SubReLU(nn.ReLU):
    pass


def test_report_lists_replaced_modules_and_their_names():
    model = nn.Sequential(nn.ReLU(), nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Tanh())
    done = replace_modules(model, {**GELU, nn.Tanh: lambda module, name: nn.Sigmoid()})
    assert done.model is model
    assert done.replaced == {"0": ("ReLU", "GELU"), "1.1": ("ReLU", "GELU"), "2": ("Tanh", "Sigmoid")}
    assert repr(done) == "3 modules replaced: 2 ReLU by GELU (0, 1.1); 1 Tanh by Sigmoid (2)"
    assert [type(module) for module in (model[0], model[1][1], model[2])] == [nn.GELU, nn.GELU, nn.Sigmoid]


def test_policy_receives_module_and_clean_name_and_may_keep_it():
    model = nn.ModuleDict({"a": nn.ReLU(), "b": nn.ModuleDict({"c": nn.ReLU()})})
    inner = model["b"]["c"]
    seen = []

    def policy(module, name):
        seen.append((name, module))
        return nn.GELU() if name == "b.c" else None

    assert list(replace_modules(model, {nn.ReLU: policy}).replaced) == ["b.c"]
    assert seen == [("a", model["a"]), ("b.c", inner)]


def test_replace_modules_searches_modules_that_a_policy_keeps():
    model = nn.Sequential(nn.Sequential(nn.ReLU()))
    done = replace_modules(model, {nn.Sequential: lambda module, name: None, **GELU})
    assert list(done.replaced) == ["0.0"]


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        (nn.ReLU, ["0"]),
        ((nn.ReLU, nn.Tanh), ["0", "2"]),
        (lambda name, module: isinstance(module, nn.ReLU), ["0", "1"]),
        (lambda name, module: name == "2", ["2"]),
    ],
    ids=["class", "classes", "predicate of classes", "predicate of names"],
)
def test_selectors_pick_modules(key, expected):
    model = nn.Sequential(nn.ReLU(), SubReLU(), nn.Tanh())
    assert list(replace_modules(model, {key: lambda module, name: nn.GELU()}).replaced) == expected


def test_the_first_policy_that_picks_a_module_decides():
    model = nn.Sequential(nn.ReLU())
    replace_modules(model, {nn.ReLU: lambda module, name: nn.Tanh(), lambda name, module: name: lambda module, name: nn.GELU()})
    assert type(model[0]) is nn.Tanh


def test_root_module_may_be_replaced():
    layer = nn.Linear(2, 2)
    done = replace_modules(layer, {nn.Linear: lambda module, name: Wrapping(module)})
    assert isinstance(done.model, Wrapping)
    assert done.model.inner is layer
    assert repr(done) == "1 module replaced: 1 Linear by Wrapping (the root)"


def test_replacement_may_contain_the_old_module_and_is_not_searched():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    first = model[0]
    done = replace_modules(model, {nn.Linear: lambda module, name: Wrapping(module)})
    assert len(done.replaced) == 2
    assert model[0].inner is first


def test_shared_module_is_replaced_once_and_stays_shared():
    shared = nn.ReLU()
    model = nn.Sequential(shared, nn.Sequential(shared))
    done = replace_modules(model, GELU)
    assert model[0] is model[1][0]
    assert done.replaced == {"0": ("ReLU", "GELU")}


def test_tied_parameters_stay_tied_when_the_policy_reuses_them():
    model = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 4, bias=False))
    model[1].weight = model[0].weight

    def policy(module, name):
        new = nn.Linear(3, 4, bias=False)
        new.weight = module.weight
        return new

    replace_modules(model, {nn.Linear: policy})
    assert model[1].weight is model[0].weight


def test_new_modules_take_mode_dtype_and_device_except_reused_parts():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU()).to("meta", torch.bfloat16)
    model[0].eval()
    kept = model[0].weight
    model.train()
    model[0].eval()
    replace_modules(model, {nn.Linear: lambda module, name: Wrapping(module), nn.ReLU: lambda module, name: nn.PReLU()})
    wrapping, prelu = model
    assert wrapping.inner.weight is kept
    assert (wrapping.scale.dtype, wrapping.scale.is_meta, wrapping.scale.requires_grad) == (torch.bfloat16, True, True)
    assert (wrapping.count.dtype, wrapping.count.is_meta) == (torch.int64, True)
    assert (wrapping.training, wrapping.inner.training, prelu.training) == (False, False, True)
    assert prelu.weight.dtype == torch.bfloat16, "a module without tensors is followed by one like the model"
    assert prelu.weight.is_meta


def test_parameters_tied_within_a_replacement_stay_tied():
    def policy(module, name):
        new = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
        new[1].weight = new[0].weight
        return new

    model = nn.Sequential(nn.Linear(2, 2)).double()
    replace_modules(model, {nn.Linear: policy})
    assert model[0][0].weight is model[0][1].weight
    assert model[0][0].weight.dtype == torch.float64


def test_hooks_of_a_kept_module_stay():
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].register_forward_hook(lambda module, given, out: out + 1)
    replace_modules(model, {nn.Linear: lambda module, name: Wrapping(module)})
    assert len(model[0].inner._forward_hooks) == 1


def hooked():
    model = nn.Sequential(nn.ReLU())
    model[0].register_forward_hook(lambda module, given, out: out)
    return model


def compiled():
    model = nn.Sequential(nn.ReLU())
    model[0].compile(backend="eager")
    return model


def checkpointed():
    return dt.shard.checkpoint_activations(nn.Sequential(nn.ReLU()), blocks=nn.ReLU)


@pytest.mark.parametrize(
    ("make", "policies", "said"),
    [
        (
            lambda: nn.Sequential(nn.Tanh()),
            GELU,
            r"replace_modules: nothing to replace: none of the 2 modules of the Sequential \(.*1 Tanh\) matches \(ReLU\)",
        ),
        (lambda: nn.ReLU, GELU, "model must be a torch.nn.Module, got type"),
        (lambda: nn.Sequential(nn.ReLU()), {}, "policies must be a mapping of module classes to functions"),
        (lambda: nn.Sequential(nn.ReLU()), [nn.ReLU], "policies must be a mapping of module classes to functions"),
        (lambda: nn.Sequential(nn.ReLU()), {"0": None}, "keys of policies must be module classes, .* got '0'"),
        (lambda: nn.Sequential(nn.ReLU()), {int: None}, "keys of policies must be module classes, .* got <class 'int'>"),
        (
            lambda: nn.Sequential(nn.ReLU()),
            {nn.ReLU: lambda m, n: nn.GELU},
            "a policy must return a module or None, got <class .* for '0'",
        ),
        (hooked, GELU, "the replacement of '0' would lose forward hooks"),
        (checkpointed, GELU, "the replacement of '0' would lose forward"),
        (
            compiled,
            GELU,
            "'0' is compiled already, and its replacement would not be compiled. Edit the model before torch.compile",
        ),
        (
            lambda: nn.Sequential(torch.compile(nn.ReLU(), backend="eager")),
            GELU,
            "'0' is compiled already, and its replacement",
        ),
        (
            lambda: nn.Sequential(nn.LazyLinear(2), nn.ReLU()),
            GELU,
            "replace_modules: '0.weight' has no shape yet. Call the model on a batch before the edit",
        ),
        (
            lambda: nn.DataParallel(nn.Sequential(nn.ReLU())),
            GELU,
            "model must not be wrapped in DataParallel. Edit the model before wrapping",
        ),
    ],
    ids=[
        "nothing",
        "class",
        "empty",
        "list",
        "text key",
        "other class",
        "no module",
        "hook",
        "forward",
        "compiled",
        "compiled around",
        "lazy",
        "wrapped",
    ],
)
def test_invalid_arguments_are_refused(make, policies, said):
    with pytest.raises(ConfigError, match=said):
        replace_modules(make(), policies)


def test_missing_ok_accepts_a_model_without_matches():
    assert repr(replace_modules(nn.Tanh(), GELU, missing_ok=True)) == "0 modules replaced"


def refused() -> str:
    model = dt.shard_model(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), dt.build_mesh())
    with pytest.raises(ConfigError) as error:
        apply_policies(model, GELU, caller="here")
    return str(error.value)


def test_a_sharded_model_is_refused(ranks):
    assert "is sharded already. Edit the model before shard_model." in ranks(1).run(refused)[0]


def made() -> nn.Module:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Conv2d(4, 4, 3, stride=2, padding=1))
    model = squeeze_excite(weight_standardization(blur_pool(model, min_channels=4)), min_channels=4, latent_channels=2)
    return channels_last(model).eval()


def test_add_mixin_reuses_one_class_per_module_class():
    one, two = nn.Conv2d(1, 1, 1), nn.Conv2d(1, 1, 1)
    assert add_mixin(one, ChannelsLast)
    assert add_mixin(two, ChannelsLast)
    assert type(one) is type(two)
    assert type(one).__name__ == "ChannelsLastConv2d"
    assert isinstance(one, nn.Conv2d)


def test_add_mixin_keeps_a_mixed_module():
    module = nn.Conv2d(1, 1, 1)
    add_mixin(module, ChannelsLast)
    kind = type(module)
    assert not add_mixin(module, ChannelsLast)
    assert type(module) is kind


def test_combined_edits_keep_parameter_names():
    model = made()
    assert type(model[0]).__name__ == "ChannelsLastSqueezeExciteWeightStandardizedBlurConv2d"
    assert isinstance(model[0], Blur)
    assert isinstance(model[0], WeightStandardized)
    names = ["0.weight", "0.bias", "0.squeeze_excite.reduce.weight", "0.squeeze_excite.expand.weight"]
    assert list(model.state_dict()) == names
    x = torch.randn(2, 4, 8, 8)
    padded = nn.functional.pad(x, (1, 1, 1, 1), mode="replicate")
    blurred = nn.functional.avg_pool2d(nn.functional.avg_pool2d(padded, 2, 1), 2, 1)
    out = nn.functional.conv2d(blurred, standardize_weight(model[0].weight), model[0].bias, stride=2, padding=1)
    torch.testing.assert_close(model(x), model[0].squeeze_excite(out))


def test_copies_and_pickles_compute_the_same():
    model, x = made(), torch.randn(2, 4, 8, 8)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.copy(model)):
        assert type(again[0]) is type(model[0])
        assert torch.equal(again(x), model(x))
    assert copy.deepcopy(model)[0].weight is not model[0].weight


def test_repr_shows_the_settings():
    text = repr(blur_pool(nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(16, 1, 3, stride=2))))
    assert (
        "BlurMaxPool2d(kernel_size=2, stride=(1, 1), padding=0, dilation=1, ceil_mode=False, blur=3 after, stride=(2, 2))"
        in text
    )
    assert "blur=3 first" in text


class Attention(nn.Module):
    heads, is_causal = 2, True

    def forward(self, x, attention_mask=None):
        return attention_mask


def test_attention_with_alibi_biases_can_be_pickled():
    model, x = alibi(nn.Sequential(Attention()), attentions={Attention: "heads"}), torch.ones(1, 3, 8)
    assert isinstance(model[0], Attention)
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), model(x))


class Counted(nn.Conv2d):
    """A module that chooses its pickled content itself."""

    def __getstate__(self):
        return {**self.__dict__, "pickled": True}


def test_pickling_uses_getstate_of_the_module():
    again = pickle.loads(pickle.dumps(channels_last(Counted(1, 1, 1))))
    assert isinstance(again, ChannelsLast)
    assert again.pickled


def test_parametrized_modules_refuse_pickling():
    conv = nn.utils.parametrizations.weight_norm(channels_last(nn.Conv2d(1, 1, 1)))
    with pytest.raises(RuntimeError, match="Serialization of parametrized modules"):
        pickle.dumps(conv)


def test_compiled_module_uses_the_swapped_class():
    model = nn.Sequential(nn.LayerNorm(4))
    model[0].compile(backend="eager")
    with torch.autocast(torch.get_default_device().type, torch.bfloat16):
        assert model(torch.ones(2, 4)).dtype == torch.float32
        low_precision_layer_norm(model)
        assert model(torch.ones(2, 4)).dtype == torch.bfloat16


@pytest.mark.parametrize("edit", [low_precision_layer_norm, lambda model: blur_pool(model, min_channels=1)])
def test_swap_class_refuses_a_module_with_its_own_forward(edit):
    model = nn.Sequential(nn.LayerNorm(4), nn.Conv2d(4, 4, 3, stride=2))
    before = [type(module) for module in model]
    dt.shard.checkpoint_activations(model, blocks=(nn.LayerNorm, nn.Conv2d))
    with pytest.raises(ConfigError, match=r"surgery: a (LayerNorm|Conv2d) has its own forward, which would hide"):
        edit(model)
    assert [type(module) for module in model] == before


def test_find_imported_class_finds_imported_classes_only():
    assert find_imported_class("torch.nn", "Linear") is nn.Linear
    assert find_imported_class("torch.nn", "nothing") is None
    assert find_imported_class("torch.nn", "functional") is None
    assert find_imported_class("not.imported", "Linear") is None
