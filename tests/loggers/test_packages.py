"""Sinks whose package is missing or broken."""

import sys
from types import SimpleNamespace

import pytest

from dtrain.errors import ConfigError
from dtrain.loggers.logger import null_logger
from dtrain.loggers.trackers import mlflow, tensorboard, wandb

MAKE = {
    "tensorboard": lambda path, **more: tensorboard(path, **more),
    "wandb": lambda path, **more: wandb("p", path=path, offline=True, **more),
    "mlflow": lambda path, **more: mlflow("e", path=path, **more),
}


@pytest.mark.parametrize("name", MAKE)
def test_missing_package_error_names_extra(monkeypatch, tmp_path, name):
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "path_importer_cache", {})
    monkeypatch.setattr(sys, "meta_path", [finder for finder in sys.meta_path if "Editable" not in str(finder)])
    with pytest.raises(ConfigError, match=rf'^{name}: needs the package {name}: pip install "dtrain\[{name}\]"$'):
        MAKE[name](tmp_path)


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_folder_with_package_name_is_not_a_package(monkeypatch, tmp_path, name):
    (tmp_path / name).mkdir()  # as W&B makes one where it runs
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(ConfigError, match=f"{name}: needs the package {name}"):
        MAKE[name](tmp_path)


BROKEN = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb", "mlflow": "mlflow.tracking"}


@pytest.mark.parametrize(("name", "module"), BROKEN.items())
def test_broken_package_warns_once(monkeypatch, tmp_path, name, module):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: SimpleNamespace(origin="somewhere"))
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.warns(UserWarning, match=rf"^{name}: .* None in sys.modules. Metrics are no longer logged there"):
        assert MAKE[name](tmp_path) is null_logger


BAD = {
    "server": ({"path": "s3://bucket/tb"}, "path must be local, got 's3://bucket/tb'"),
    "patience": ({"timeout_s": -1}, "timeout_s must be a finite number above 0, got -1"),
    "settings": ({"settings": [1]}, "settings must be a mapping, a dataclass or an argparse.Namespace, got list"),
    "ranks": ({"ranks": "all"}, r"path must contain \{rank\} if ranks='all'"),
}


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize(("arguments", "message"), BAD.values(), ids=BAD)
def test_invalid_arguments_are_refused(name, arguments, message, tmp_path):
    with pytest.raises(ConfigError, match=f"{name}: {message}"):
        MAKE[name](**{"path": tmp_path, **arguments})


def test_services_require_a_name(tmp_path):
    with pytest.raises(ConfigError, match="wandb: project must be the name of a project, got ''"):
        wandb("", path=tmp_path)
    with pytest.raises(ConfigError, match="mlflow: experiment must be the name of an experiment, got None"):
        mlflow(None, path=tmp_path)
