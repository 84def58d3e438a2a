"""Checkpoints to look at, and the command line that does."""

import shutil
import sys
import tempfile

import pytest

from checkpoint.states import plain_state, train
from dtrain.checkpoint.save import save_sharded
from dtrain.cli import main


@pytest.fixture(scope="session")
def clean(tmp_path_factory):
    """Steps 1 and 2 of one run."""
    root = tmp_path_factory.mktemp("checkpoints") / "root"
    state = train(plain_state(), 1)
    save_sharded(root, state)
    save_sharded(root, train(state, 1))
    return root


@pytest.fixture
def root(clean, tmp_path, monkeypatch):
    """A copy of the checkpoints, named ``root`` in the current folder."""
    shutil.copytree(clean, tmp_path / "root")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "root"


@pytest.fixture
def checkpoints(monkeypatch, capsys):
    """``checkpoints(*args)``: the exit code of the command, what it printed, and what it complained about."""

    def run(*args):
        monkeypatch.setattr(sys, "argv", ["dtrain", "checkpoints", *args])
        with pytest.raises(SystemExit) as end:
            main.run()
        out, err = capsys.readouterr()
        return end.value.code, out, err

    return run


@pytest.fixture
def data(monkeypatch, capsys, tmp_path_factory):
    """``data(*args)``: the exit code of ``dtrain data``, what it printed, and what it complained about."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("temporary")))  # where caches are

    def run(*args):
        monkeypatch.setattr(sys, "argv", ["dtrain", "data", *args])
        with pytest.raises(SystemExit) as end:
            main.run()
        out, err = capsys.readouterr()
        return end.value.code, out, err

    return run
