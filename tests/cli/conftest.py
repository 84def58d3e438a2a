"""Checkpoints to look at, and the command line that does."""

import shutil
import sys
import tempfile
from functools import partial

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
def dtrain(monkeypatch, capfd):
    """Return ``dtrain(*args)``, which runs a command line in this process: its exit code, its output, and its complaints."""

    def run(*args):
        monkeypatch.setattr(sys, "argv", ["dtrain", *args])
        with pytest.raises(SystemExit) as end:
            main.run()
        return end.value.code, *capfd.readouterr()

    return run


@pytest.fixture
def command_line(dtrain):
    """``command_line("new")``: the function ``dtrain`` for one command."""
    return lambda name: partial(dtrain, name)


@pytest.fixture
def checkpoints(command_line):
    """``checkpoints(*args)``, as of ``command_line``."""
    return command_line("checkpoints")


@pytest.fixture
def data(command_line, monkeypatch, tmp_path_factory):
    """``data(*args)``, as of ``command_line``; caches are in a folder of the test's."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("temporary")))
    return command_line("data")
