import builtins
from dataclasses import replace

import pytest

from dtrain.errors import ConfigError
from dtrain.report.png import write_pngs

NAMES = ["loss", "eval-loss", "norm-gradient", "learning-rate", "throughput", "speed-tokens-per-s", "mfu", "memory", "time",
         "ranks", "checkpoints", "checkpoint-size"]  # fmt: skip


def test_there_is_a_picture_of_one_chart_of_each_kind(made, tmp_path):
    run = made.run(ranks=2, points=20)
    only = replace(run, series={"loss": run.series["loss"]}, speed=[], gauges={}, checkpoints=[])
    paths = write_pngs(made.report(only), tmp_path / "new" / "pictures")
    assert [path.name for path in paths] == ["loss.png", "time.png", "ranks.png"]
    assert all(path.read_bytes()[:4] == b"\x89PNG" for path in paths)


@pytest.mark.slow
def test_there_is_a_picture_of_every_chart(made, tmp_path):
    paths = write_pngs(made.report(made.run(ranks=2, points=20)), tmp_path)
    assert [path.stem for path in paths] == NAMES
    assert sorted(tmp_path.iterdir()) == sorted(paths)


def test_an_empty_report_has_no_pictures(made, tmp_path):
    assert write_pngs(made.report(made.bare()), tmp_path) == []


def test_without_matplotlib_the_extra_is_named(made, tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r'report: pictures need the package matplotlib: pip install "dtrain\[report\]"'):
        write_pngs(made.report(made.run(ranks=1, points=5)), tmp_path / "pictures")
    assert not (tmp_path / "pictures").exists()
