"""Check the package's syntax trees for forbidden code: nothing unpickles, nothing runs text as a program."""

import ast
from pathlib import Path

import pytest

import dtrain

SOURCE = Path(dtrain.__file__).parent
TRUSTED = {"checkpoint/conversion/unpickle_subprocess.py"}  # a program of its own, run only when the user says --trust
RUNS_THE_SCRIPT = {file: ["exec"] for file in ("launch/rank_main.py", "prove/runs.py")}  # as Python itself would
PICKLED_DATA = {"data/stream/formats/shard_format.py": ["import pickle"]}  # of other programs, read only with allow_pickle=True
FROM_ITS_OWN_CHILDREN = {"data/workers.py": ["import pickle"]}  # messages of its loader workers to a rank
EXPORT_OF_THE_SCRIPT = {"prove/evaluations.py": ["torch.load"]}  # that a proof has just made, with weights_only=True
BATCHES_OF_THE_SCRIPT = {"prove/experiments.py": ["torch.load"]}  # that another run of the same proof has just written

MODULES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
BUILTINS = {"eval", "exec", "builtins.eval", "builtins.exec"}  # as functions: ``model.eval()`` is a method
OBJECTS = "_object"  # torch's collectives of Python objects, which pickle: all_gather_object, broadcast_object_list, ...
LOADERS = {"torch.load", "torch.storage._load_from_bytes", "torch.hub.load_state_dict_from_url", "torch.jit.load"}


def violations(source: str) -> list[str]:
    """List the forbidden operations of a module, with their lines."""
    lines = []
    names: dict[str, str] = {}  # the meaning of each name of this module
    nodes = list(ast.walk(ast.parse(source)))
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.asname or alias.name.split(".")[0]: alias.name if alias.asname else alias.name.split(".")[0]
                      for alias in node.names}  # fmt: skip
            lines += [f"{node.lineno}: import {alias.name}" for alias in node.names if alias.name.split(".")[0] in MODULES]
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            if (node.module or "").split(".")[0] in MODULES:
                lines.append(f"{node.lineno}: from {node.module} import")
    for node in nodes:
        if isinstance(node, ast.Name | ast.Attribute):
            path = _path(node, names)
            if path in BUILTINS or path in LOADERS or _passes_objects(path):
                lines.append(f"{node.lineno}: {path}")
    return lines


def _path(node: ast.expr, names: dict[str, str]) -> str:
    """The dotted name, its first part as it was imported."""
    if isinstance(node, ast.Name):
        return names.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        return f"{_path(node.value, names)}.{node.attr}"
    return ""


def _passes_objects(path: str) -> bool:
    return path.startswith("torch.") and path.endswith((OBJECTS, f"{OBJECTS}_list"))


def test_package_contains_no_unlisted_unpickling_or_code_execution():
    by_module = {
        str(path.relative_to(SOURCE)): lines
        for path in sorted(SOURCE.rglob("*.py"))
        if str(path.relative_to(SOURCE)) not in TRUSTED and (lines := violations(path.read_text(encoding="utf-8")))
    }
    by_module = {name: [line.split(": ", 1)[1] for line in lines] for name, lines in by_module.items()}
    own = FROM_ITS_OWN_CHILDREN | EXPORT_OF_THE_SCRIPT | BATCHES_OF_THE_SCRIPT
    assert by_module == RUNS_THE_SCRIPT | PICKLED_DATA | own


def test_trusted_scripts_are_not_imported():
    programs = {f"dtrain.{name.removesuffix('.py').replace('/', '.')}" for name in TRUSTED}
    importers = []
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            targets = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                targets = [f"{node.module}.{alias.name}" for alias in node.names] + [str(node.module)]
            importers += [f"{path.relative_to(SOURCE)} imports {target}" for target in targets if target in programs]
    assert importers == []


@pytest.mark.parametrize(
    ("source", "line"),
    [
        pytest.param("import pickle", "1: import pickle", id="pickle"),
        pytest.param("import pickle as p", "1: import pickle", id="pickle-renamed"),
        pytest.param("from pickle import loads", "1: from pickle import", id="from-pickle"),
        pytest.param("def f():\n    import cloudpickle.cloudpickle", "2: import cloudpickle.cloudpickle", id="inside"),
        pytest.param("import marshal", "1: import marshal", id="marshal"),
        pytest.param("import torch\ntorch.load('x', weights_only=True)", "2: torch.load", id="torch.load"),
        pytest.param("from torch import load\nload('x')", "2: torch.load", id="load-from-torch"),
        pytest.param("import torch as t\nread = t.load", "2: torch.load", id="torch.load-renamed"),
        pytest.param("eval('1')", "1: eval", id="eval"),
        pytest.param("exec('1')", "1: exec", id="exec"),
        pytest.param("run = eval", "1: eval", id="eval-renamed"),
        pytest.param("import builtins\nbuiltins.exec('1')", "2: builtins.exec", id="builtins"),
        pytest.param(
            "import torch.distributed as dist\ndist.all_gather_object([], 1)",
            "2: torch.distributed.all_gather_object",
            id="all_gather_object",
        ),
        pytest.param(
            "from torch.distributed import broadcast_object_list\nbroadcast_object_list([])",
            "2: torch.distributed.broadcast_object_list",
            id="broadcast_object_list",
        ),
        pytest.param(
            "from torch import distributed\ndistributed.scatter_object_list([], [])",
            "2: torch.distributed.scatter_object_list",
            id="scatter_object_list",
        ),
    ],
)
def test_forbidden_call_check_detects_violations(source, line):
    assert violations(source) == [line]


@pytest.mark.parametrize(
    "source",
    [
        pytest.param("model.eval()", id="model.eval"),
        pytest.param("import json\njson.load(file)", id="json.load"),
        pytest.param("text = 'torch.load, pickle and eval'", id="text"),
        pytest.param("def plain_object(x): return x\nplain_object(1)", id="a-name-of-our-own"),
    ],
)
def test_forbidden_call_check_accepts_safe_code(source):
    assert violations(source) == []
