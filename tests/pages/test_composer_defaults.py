"""Defaults of functions with Composer's names, beside those of mosaicml 0.32.1; composer.md lists each difference."""

import inspect
from pathlib import Path

import pytest

import dtrain as dt
from dtrain.schedules import composer

PAGE = (Path(__file__).parents[2] / "docs" / "composer.md").read_text()
REQUIRED = inspect.Parameter.empty
SAME = [
    (dt.optim.DecoupledAdamW, {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 1e-5, "amsgrad": False}),
    (dt.optim.DecoupledSGDW, {"momentum": 0, "dampening": 0, "weight_decay": 0, "nesterov": False}),
    (composer.constant, {"alpha": 1.0, "t_max": "1dur"}),
    (composer.linear, {"alpha_i": 1.0, "alpha_f": 0.0, "t_max": "1dur"}),
    (composer.cosine, {"t_max": "1dur", "alpha_f": 0.0}),
    (composer.cosine_warm_restarts, {"t_0": REQUIRED, "t_mult": 1.0, "alpha_f": 0.0}),
    (composer.polynomial, {"power": REQUIRED, "t_max": "1dur", "alpha_f": 0.0}),
    (composer.exponential, {"gamma": REQUIRED, "decay_period": "1ep"}),
    (composer.step, {"step_size": REQUIRED, "gamma": 0.1}),
    (composer.multi_step, {"milestones": REQUIRED, "gamma": 0.1}),
    (composer.constant_with_warmup, {"t_warmup": REQUIRED, "alpha": 1.0, "t_max": "1dur"}),
    (composer.linear_with_warmup, {"t_warmup": REQUIRED, "alpha_i": 1.0, "alpha_f": 0.0, "t_max": "1dur"}),
    (composer.cosine_with_warmup, {"t_warmup": REQUIRED, "t_max": "1dur", "alpha_f": 0.0}),
    (composer.polynomial_with_warmup, {"t_warmup": REQUIRED, "power": 2.0, "t_max": "1dur", "alpha_f": 0.0}),
    (composer.multi_step_with_warmup, {"t_warmup": REQUIRED, "milestones": REQUIRED, "gamma": 0.1}),
    (dt.transforms.augmix, {"severity": 3, "width": 3, "alpha": 1.0}),
    (dt.surgery.blur_pool, {"replace_convs": True, "replace_maxpools": True, "blur_first": True, "min_channels": 16}),
    (dt.transforms.colout, {"p_row": 0.15, "p_col": 0.15}),
    (dt.transforms.cutmix, {"alpha": 1.0}),
    (dt.transforms.cutout, {"holes": 1, "length": 0.5}),
    (dt.surgery.factorize, {"factorize_convs": True, "factorize_linears": True, "latent_channels": 0.25}),
    (dt.surgery.gated_linear_units, {"activation": None, "bias": False, "linear_bias": False}),
    (dt.surgery.ghost_batch_norm, {"ghost_batch_size": 32}),
    (dt.transforms.clip_by_norm, {"max_norm": REQUIRED}),
    (dt.transforms.clip_by_value, {"limit": REQUIRED}),
    (dt.surgery.gyro_dropout, {"sigma": 256, "tau": 16}),
    (dt.transforms.label_smoothing, {"smoothing": 0.1}),
    (dt.transforms.freeze_layers, {"start": "0.5dur", "level": 1.0}),
    (dt.transforms.mixup, {"alpha": 0.2}),
    (
        dt.transforms.progressive_resizing,
        {"initial_scale": 0.5, "start": "0.5dur", "end": "0.8dur", "size_increment": 4, "method": "resize"},
    ),
    (dt.transforms.rand_augment, {"magnitude": 9, "depth": 2}),
    (dt.transforms.sam, {"rho": 0.05, "every": 1}),
    (dt.transforms.selective_backprop, {"keep": 0.5}),
    (
        dt.transforms.sequence_length_warmup,
        {"end": "0.3dur", "initial_length": 8, "max_length": 1024, "step_size": 8, "truncate": True},
    ),
    (dt.surgery.squeeze_excite, {"min_channels": 128}),
    (dt.surgery.stochastic_depth, {"method": "block", "distribution": "linear"}),
    (dt.transforms.swa, {"start": "0.7dur", "end": "0.97dur", "every": "1ep", "shape": "linear", "lr": None}),
    (dt.surgery.weight_standardization, {"n_last_layers_to_ignore": 0}),
]
DIFFERENT = [
    (dt.transforms.ema, {"half_life": (None, "1000ba"), "every": (1, "1ba")}),
    (dt.surgery.factorize, {"min_channels": (512, 256), "min_features": (512, 256), "latent_features": (0.25, 128)}),
    (dt.transforms.adaptive_clip, {"clipping": (0.01, REQUIRED)}),
    (dt.surgery.gyro_dropout, {"p": (None, 0.5)}),
    (dt.transforms.selective_backprop, {"start": (0, 0.5), "end": (None, 0.9), "interrupt": (None, 2)}),
    (dt.surgery.squeeze_excite, {"latent_channels": (0.0625, 64)}),
    (dt.surgery.stochastic_depth, {"drop_rate": (0.5, 0.2)}),
]


@pytest.mark.parametrize(("function", "theirs"), SAME, ids=lambda value: getattr(value, "__qualname__", ""))
def test_defaults_equal_composer_defaults(function, theirs):
    own = inspect.signature(function).parameters
    assert {name: own[name].default for name in theirs} == theirs


@pytest.mark.parametrize(("function", "both"), DIFFERENT, ids=lambda value: getattr(value, "__qualname__", ""))
def test_differing_defaults_are_documented_on_the_page(function, both):
    own = inspect.signature(function).parameters
    rows = [line for line in PAGE.splitlines() if line.startswith(f"| `{function.__name__}(")]
    for name, (ours, theirs) in both.items():
        assert own[name].default == ours != theirs
        assert any(f"{name}=" in row for row in rows), f"composer.md says nothing of {function.__name__}({name}=)"
