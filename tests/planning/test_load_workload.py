"""``file.py:factory`` and ``module:factory``: the loaded workload, and one line for each failure."""

import sys

import pytest

from dtrain.errors import ConfigError, StepError
from dtrain.planning.estimate import estimate_memory
from dtrain.planning.workload import load_workload

MODEL = """
import torch
from dtrain.planning.workload import Workload
import beside

def workload(*, width: int = 8):
    return Workload(model=lambda: torch.nn.Linear(width, 2), loss_fn=beside.loss, batch=lambda n: torch.zeros(n, width))

ready = workload()
number = 3

def nothing():
    return None

def raising():
    return 1 // 0

def stumbling():
    return Workload(model=lambda: torch.nn.Linear(8, 2), loss_fn=beside.loss, batch=lambda n: torch.zeros(n, 9))
"""
BESIDE = """
from dtrain.typing import LossSum

def loss(model, batch):
    return LossSum(total=model(batch).sum(), weight=len(batch))
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "planned_model.py").write_text(MODEL)
    (tmp_path / "sub" / "beside.py").write_text(BESIDE)
    (tmp_path / "broken_model.py").write_text("import sub.planned_model\nimport not_there_at_all\n")
    (tmp_path / "top_model.py").write_text("def workload(): return None\n")
    yield tmp_path
    for name in ("planned_model", "beside", "broken_model", "top_model", "sub", "sub.planned_model"):
        sys.modules.pop(name, None)


def test_workload_factory_in_a_file_receives_arguments(folder):
    before = list(sys.path)
    with load_workload("sub/planned_model.py:workload", {"width": 16}) as workload:
        assert workload.batch(2).shape == (2, 16)
        assert estimate_memory(workload, world_size=2).parameter_count == 16 * 2 + 2
    assert sys.path == before


def test_workload_object_is_used_unchanged(folder):
    with load_workload("sub/planned_model.py:ready", {}) as workload:
        assert workload.batch(3).shape == (3, 8)


def test_module_is_imported_from_the_current_folder(folder, monkeypatch):
    monkeypatch.chdir(folder / "sub")
    with load_workload("planned_model:workload", {}) as workload:
        assert workload.batch(1).shape == (1, 8)


REFUSED = {
    "no factory": ("sub/planned_model.py", {}, "target must name a file or module and a factory, got"),
    "empty factory": ("sub/planned_model.py:", {}, "target must name a file or module and a factory, got"),
    "no file": ("nope.py:workload", {}, r"no such file: 'nope.py' \(in "),
    "no python": ("sub/:workload", {}, "no such file: 'sub/'"),
    "no module": ("nope.deeper:workload", {}, "no module named 'nope.deeper' in "),
    "no name": ("a-b:workload", {}, "neither a module's name nor a file"),
    "not there": (
        "sub/planned_model.py:nope",
        {},
        "'nope' does not exist in .*Its functions are nothing, raising, stumbling, workload",
    ),
    "no function": ("sub/planned_model.py:number", {}, "'number' is not a function in"),
    "another argument": (
        "sub/planned_model.py:workload",
        {"depth": 3},
        "cannot be called with these arguments: got an unexpected keyword.*'depth'",
    ),
    "nothing returned": ("top_model:workload", {}, "must return a dt.planning.Workload, got NoneType"),
    "it raises": ("sub/planned_model.py:raising", {}, r"failed: ZeroDivisionError: .* \(in planned_model.py, line 16\)"),
    "its import raises": ("broken_model:workload", {}, "'broken_model' cannot be imported: ModuleNotFoundError"),
}


@pytest.mark.parametrize(("target", "arguments", "expected"), REFUSED.values(), ids=REFUSED)
def test_invalid_target_raises_one_line_error(folder, target, arguments, expected):
    with pytest.raises(ConfigError, match=expected) as error, load_workload(target, arguments):
        pass
    assert "\n" not in str(error.value)
    assert ". " in str(error.value)


def test_failed_step_error_names_file_and_line(folder):
    with (
        pytest.raises(StepError, match=r"a step of .* failed: RuntimeError: .* \(in beside.py, line 5\)"),
        load_workload("sub/planned_model.py:stumbling", {}) as workload,
    ):
        estimate_memory(workload, world_size=2)
