import pytest

from dtrain.errors import ConfigError
from dtrain.schedules.durations import Duration, RunLength

RUN = RunLength(total="3ep", steps_per_epoch=100, samples_per_step=256, tokens_per_step=1000.5)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (7, Duration(7, "ba")),
        ("7ba", Duration(7, "ba")),
        (" 3 ep ", Duration(3, "ep")),
        ("5_000sp", Duration(5000, "sp")),
        ("1e9tok", Duration(10**9, "tok")),
        ("1.5e3ba", Duration(1500, "ba")),
        ("9007199254740993tok", Duration(2**53 + 1, "tok")),
        ("0.1dur", Duration(0.1, "dur")),
        ("1dur", Duration(1.0, "dur")),
        ("90sec", Duration(90, "sec")),
        ("1h20m40s", Duration(4840, "sec")),
        ("2d", Duration(172_800, "sec")),
        ("30m", Duration(1800, "sec")),
        (Duration(2, "ep"), Duration(2, "ep")),
        ("0.00001dur", Duration(1e-05, "dur")),
        ("1e-3dur", Duration(0.001, "dur")),
    ],
)
def test_duration_text_round_trips(text, expected):
    assert Duration.parse(text) == expected
    assert Duration.parse(str(expected)) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("3 fortnights", r"unknown unit 'fortnights'. Use one of ep, ba, sp, tok, sec, dur \(as in '3ep', '100ba'\)"),
        ("1.5ep", "needs a whole number of ep, got '1.5ep'"),
        ("1.5sec", "needs a whole number of sec, got '1.5sec'. .* as in '1h20m40s'"),
        ("0ba", "needs at least 1 ba, got '0ba'"),
        ("0dur", "needs more than 0 of the run. Write '0.1dur'"),
        (0, "needs at least 1 ba, got 0"),
        (-3, "needs at least 0, got -3 ba"),
        (True, "needs a whole number of ba, got True ba"),
        ("fast", "cannot read 'fast'. Write one number and one unit of ep, ba, sp, tok, sec, dur"),
        ("ep", "the unit must be one of ep, ba, sp, tok, sec, dur, got 'ep'. Write '1ep'"),
        ("5", "cannot read '5'"),
        ("", "cannot read ''"),
        (None, "cannot read None"),
        (1.5, "cannot read 1.5"),
        ("3ep2ba", "cannot read '3ep2ba'"),
        ("20m1h", "cannot read '20m1h'"),
        ("0.5h", "cannot read '0.5h'"),
        ("1e-1ep", "needs a whole number of ep, got '1e-1ep'"),
        ("1e400dur", "cannot read '1e400dur'"),
    ],
)
def test_invalid_duration_text_is_refused(text, message):
    with pytest.raises(ConfigError, match=message) as caught:
        Duration.parse(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["0ba", "0ep", "0dur", 0])
def test_duration_parse_accepts_zero_with_allow_zero(text):
    assert Duration.parse(text, allow_zero=True).value == 0


def test_durations_add_only_within_one_unit():
    assert Duration.parse("3ep") + "2ep" == Duration(5, "ep")
    assert Duration.parse("0.1dur") + "0.2dur" == Duration(0.3, "dur"), "as it is written, not 0.30000000000000004"
    with pytest.raises(ConfigError, match=r"cannot add 2ba to 3ep, units must be equal. Convert both with .steps\(run\)"):
        Duration.parse("3ep") + "2ba"


@pytest.mark.parametrize(
    ("text", "steps"),
    [("7ba", 7), ("3ep", 300), ("256sp", 1), ("257sp", 2), ("10_005tok", 10), ("0.1dur", 30), ("0.001dur", 1), ("1dur", 300)],
)
def test_steps_round_up_to_cover_the_duration(text, steps):
    assert Duration.parse(text).steps(RUN) == steps


@pytest.mark.parametrize(
    ("text", "run", "message"),
    [
        ("3ep", None, r"3ep in steps needs steps_per_epoch. Give RunLength\(steps_per_epoch=...\), or loader.run_length"),
        ("3sp", RunLength(total=3), "needs samples_per_step"),
        ("3tok", RunLength(total=3), "needs tokens_per_step"),
        ("0.5dur", RunLength(steps_per_epoch=3), r"needs the length of the run. Give RunLength\(total=...\)"),
        ("0.5dur", RunLength(total="1h"), "3600sec cannot be converted to steps"),
        ("90sec", RUN, "90sec cannot be converted to steps, because the time of a step is unknown"),
    ],
)
def test_steps_of_an_unconvertible_duration_are_refused(text, run, message):
    with pytest.raises(ConfigError, match=message):
        Duration.parse(text).steps(run)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"total": "1dur"}, "total must be in another unit than 'dur', a share of the total, got '1dur'"),
        ({"total": 0}, "needs at least 1 ba, got 0"),
        ({"steps_per_epoch": 1.5}, "steps_per_epoch must be an integer of at least 1, got 1.5"),
        ({"steps_per_epoch": 0}, "steps_per_epoch must be an integer of at least 1, got 0"),
        ({"samples_per_step": -1}, "samples_per_step must be a finite number above 0, got -1"),
        ({"tokens_per_step": "8"}, "tokens_per_step must be a finite number above 0, got '8'"),
    ],
)
def test_invalid_run_length_is_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        RunLength(**given)


def test_run_length_converts_to_steps():
    assert (RUN.steps(), RunLength(total="1000sp", samples_per_step=256).steps()) == (300, 4)
