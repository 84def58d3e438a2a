"""Checks of arguments: allowed values come back, all others raise in the library's words."""

import re
from typing import Any

import numpy as np
import pytest

from dtrain.arguments import check_choice, check_int, check_number, format_bytes, format_count, join_or, parse_bytes
from dtrain.errors import ConfigError


def test_integers_within_the_limits_are_returned() -> None:
    assert check_int("f", "n", 1) == 1
    assert check_int("f", "n", 0, minimum=0) == 0
    result = check_int("f", "n", np.int64(7), maximum=7)
    assert result == 7
    assert type(result) is int


@pytest.mark.parametrize("value", [0, -1, True, 1.0, "1", None, np.bool_(True), 10**30])
def test_invalid_integers_raise(value: Any) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"f: n must be an integer from 1 to 9, got {value!r}.")):
        check_int("f", "n", value, maximum=9)


def test_error_message_ends_with_the_advice() -> None:
    with pytest.raises(ConfigError, match=r"^f: n must be an integer of at least 2, got 1\. Pass 2\.$"):
        check_int("f", "n", 1, minimum=2, advice="Pass 2.")


def test_numbers_within_the_limits_are_returned() -> None:
    assert check_number("f", "x", 0, minimum=0) == 0.0
    assert check_number("f", "x", np.float32(0.5), above=0, below=1) == 0.5
    assert type(check_number("f", "x", 3)) is float


@pytest.mark.parametrize("value", [0.0, 1.0, float("nan"), float("inf"), True, "0.5", None])
def test_invalid_numbers_raise(value: Any) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"f: x must be a finite number above 0 and below 1, got {value!r}.")):
        check_number("f", "x", value, above=0, below=1)


def test_an_int_too_large_for_a_float_raises_a_config_error() -> None:
    with pytest.raises(ConfigError, match="f: x must be a finite number"):
        check_number("f", "x", 10**400)


def test_choices_are_compared_with_their_type() -> None:
    assert check_choice("f", "x", "a", ("a", "b")) == "a"
    with pytest.raises(ConfigError, match=r"^f: x must be 'a', 'b' or 1, got True\.$"):
        check_choice("f", "x", True, ("a", "b", 1))


@pytest.mark.parametrize(
    ("text", "size"), [("100", 100), ("5GB", 5 * 10**9), ("1.5 MiB", 3 * 2**19), ("1.5 kb", 1500), (" 80gib ", 80 * 2**30)]
)
def test_sizes_are_parsed(text: str, size: int) -> None:
    assert parse_bytes("--size", text) == size


@pytest.mark.parametrize("text", ["", "0", "-1", "IB", "5 XB", "1e3", "nan", "0.1B", "5GiBs", "\u0661"])
def test_invalid_sizes_raise(text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"--size must be a size such as 512MiB or 5GB, got {text!r}.")):
        parse_bytes("--size", text)


def test_quantities_are_formatted() -> None:
    assert [format_bytes(n) for n in (0, 999, 1000, 1536, 3 * 2**29, 80 * 2**30, 999 * 2**30, 2**40)] == [
        "0 B", "999 B", "0.977 KiB", "1.5 KiB", "1.5 GiB", "80 GiB", "999 GiB", "1 TiB",
    ]  # fmt: skip
    assert [format_count(n, "batch", "batches") for n in (0, 1, 12345)] == ["0 batches", "1 batch", "12,345 batches"]
    assert [join_or("abc"[:n]) for n in (1, 2, 3)] == ["a", "a or b", "a, b or c"]
