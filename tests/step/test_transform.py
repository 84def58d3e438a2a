import pytest

from dtrain.errors import ConfigError
from dtrain.step.transform import Transform, check_transform
from dtrain.transforms.weights.averaging import ema


def test_check_transform_accepts_a_transform():
    assert check_transform(ema(0.9), "here", "there({})") is None


def test_check_transform_error_for_an_uncalled_factory_shows_the_call():
    with pytest.raises(
        ConfigError, match=r"^here: got the function ema instead of its result. Use there\(dt\.transforms\.ema\(\.\.\.\)\)\.$"
    ):
        check_transform(ema, "here", "there({})")


@pytest.mark.parametrize("value", [None, 3, "ema", Transform, [ema(0.9)]])
def test_check_transform_error_for_other_values_shows_an_example(value):
    with pytest.raises(ConfigError, match=r"^here: needs a Transform, got .*\. Use there\(dt\.transforms\.ema\(0\.999\)\)\.$"):
        check_transform(value, "here", "there({})")
