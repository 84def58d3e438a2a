"""The script that measures the costs of methods: it writes the file that the recipe cards read, and refuses early."""

import json
import sys

import pytest

import ablation
import algorithms


def test_measured_figures_are_merged_into_the_existing_file(monkeypatch, tmp_path, capsys):
    out = tmp_path / "costs.json"
    out.write_text(json.dumps({"costs": {"ema": {"ratio": 1.0, "low": 1.0, "high": 1.0}}}))
    monkeypatch.setattr(algorithms.torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr(
        sys, "argv", ["algorithms.py", "--only", "clip_by_value", "blur_pool", "--pairs", "1", "--out", str(out)]
    )
    algorithms.main()
    content = json.loads(out.read_text())
    assert list(content["costs"]) == ["ema", "clip_by_value", "blur_pool"]
    assert content["costs"]["blur_pool"].keys() == {"ratio", "low", "high"}
    assert content["against"] == algorithms.AGAINST
    assert "clip_by_value: " in capsys.readouterr().out


def test_every_reference_method_has_a_transform():
    assert algorithms.METHODS.keys() == algorithms.TRANSFORMS.keys()


@pytest.mark.parametrize(
    ("script", "options", "expected"),
    [
        (algorithms, ["--pairs", "0"], "--pairs must be at least 1, got 0"),
        (algorithms, ["--out", "not/there/costs.json"], "--out is in a folder that is not there: not/there/costs.json"),
        (ablation, ["--seeds", "0"], "--epochs and --seeds must be at least 1, got 8 and 0"),
    ],
    ids=["pairs", "folder", "seeds"],
)
def test_invalid_options_are_refused_before_measuring(monkeypatch, tmp_path, capsys, script, options, expected):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["script.py", *options])
    with pytest.raises(SystemExit, match="2"):
        script.main()
    assert expected in capsys.readouterr().err
