"""The architecture as a check: a module imports only from layers above it, from its left neighbours, and from its own room."""

import ast
from collections.abc import Iterable
from pathlib import Path

import dtrain

SOURCE = Path(dtrain.__file__).parent

# One row per line of the table in docs/architecture.md, top to bottom; a later row may import from an earlier one.
LAYERS = [
    ["errors", "device", "lazy_imports", "arguments", "typing"],
    ["launch_protocol", "launch/heartbeats", "spans", "packages", "machine"],
    ["storage"],
    ["schedules"],
    ["dist", "memory"],
    ["run_context", "run_objects", "fqn", "named_optimizers", "init_checks", "shard/spec", "state"],
    ["shard", "losses", "experts"],
    ["data"],
    ["step"],
    ["checkpoint"],
    ["run/run_files", "run", "monitors", "loggers", "profiling/trace", "profiling"],
    ["transforms", "surgery", "optim"],
    ["launch"],
    ["testing"],
    ["planning"],
    ["report"],
    ["prove"],
    ["cli"],
]
ORDER = {room: index for index, room in enumerate(room for row in LAYERS for room in row)}
TORCH_FREE = {
    "errors",
    "lazy_imports",
    "arguments",
    "launch_protocol",
    "launch/heartbeats",
    "spans",
    "packages",
    "machine",
    "storage",
    "run/run_files",
    "profiling/trace",
    "report",
    "launch",
    "cli",
}
# Commands import these rooms when they run, so the start of a command stays quick.
WITH_NUMPY = {"report", "profiling/trace"}
PROGRAMS_WITH_TORCH = {
    "cli.torch_probe",
    "launch.agent_main",
    "launch.forkserver_main",
}  # run in a process of their own, imported only by each other


def modules() -> dict[str, Path]:
    paths = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        paths[".".join(name for name in parts if name != "__init__")] = path
    return paths


def imports(path: Path) -> set[str]:
    """Return absolute names of all imports of ``path``, inside functions and TYPE_CHECKING blocks too."""
    return imported(ast.walk(ast.parse(path.read_text())), path)


def imports_at_start(source: str) -> set[str]:
    """Return the names that are imported with the module: not inside functions, and not for type checkers only."""
    left, seen = list(ast.parse(source).body), []
    while left:
        node = left.pop()
        seen.append(node)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            left += node.orelse
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            left += ast.iter_child_nodes(node)
    return imported(seen, Path("source"))


def imported(nodes: Iterable[ast.AST], path: Path) -> set[str]:
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the layer"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def is_door(path: Path) -> bool:
    return path.name == "__init__.py" and "dtrain.lazy_imports.attach" in imports_at_start(path.read_text())


def room_of(name: str) -> str:
    """Return the room of a module: its folder at the top, or a part of a folder that has a place of its own in a table."""
    first, *rest = name.split(".")
    folder = f"{first}/{rest[0]}" if rest else first
    return folder if folder in ORDER or folder in TORCH_FREE else first


def violations(imports_of: dict[str, set[str]]) -> list[str]:
    rows = []
    for name, imported in imports_of.items():
        for target in sorted(imported):
            if not target.startswith("dtrain."):
                continue
            mine, theirs = room_of(name), room_of(target.removeprefix("dtrain."))
            if theirs in ORDER and mine != theirs and ORDER[theirs] > ORDER[mine]:
                rows.append(f"{name} imports {target}, which is below it")
    return rows


def test_modules_import_only_from_layers_above():
    """The ``__init__`` of a public sub-package names objects of any room, for type checkers only."""
    imports_of = {
        name: imports(path) for name, path in modules().items() if room_of(name) not in ("", "__main__") and not is_door(path)
    }
    assert {room_of(name) for name in imports_of} <= set(ORDER), "a new room needs a row in LAYERS and in docs/architecture.md"
    assert violations(imports_of) == []


def test_import_check_detects_a_violation():
    assert violations({"dist.dtensor": {"dtrain.shard.fsdp.shard_model"}}) == [
        "dist.dtensor imports dtrain.shard.fsdp.shard_model, which is below it"
    ]


def test_torch_free_packages_do_not_import_torch():
    heavy = ("torch", "tensordict", "numpy", "einops")
    rows = [
        f"{name} imports {target}"
        for name, path in modules().items()
        if room_of(name) in TORCH_FREE and name not in PROGRAMS_WITH_TORCH
        for target in imports(path)
        if (target.split(".")[0] in heavy and not (target.split(".")[0] == "numpy" and room_of(name) in WITH_NUMPY))
        or target.removeprefix("dtrain.") in PROGRAMS_WITH_TORCH
    ]
    assert rows == []


def test_torch_free_packages_import_torch_packages_only_inside_functions():
    rows = [
        f"{name} imports {target}"
        for name, path in modules().items()
        if room_of(name) in TORCH_FREE
        for target in imports_at_start(path.read_text())
        if target.startswith("dtrain.") and room_of(target.removeprefix("dtrain.")) in set(ORDER) - TORCH_FREE
    ]
    assert rows == []


def test_imports_at_start_lists_imports_outside_functions():
    source = """
from dtrain.shard import a
if TYPE_CHECKING:
    from dtrain.shard import b
else:
    from dtrain.shard import c
def f():
    from dtrain.shard import d
"""
    assert imports_at_start(source) == {"dtrain.shard.a", "dtrain.shard.c"}


def test_only_the_dtensor_module_imports_torch_dtensor():
    applied = ("torch.distributed.tensor.parallel", "torch.distributed.tensor.experimental")  # torch's changes of modules
    rows = [
        name
        for name, path in modules().items()
        if any(
            imported.startswith("torch.distributed.tensor") and not imported.startswith(applied) for imported in imports(path)
        )
    ]
    assert rows == ["dist.dtensor"]


def test_architecture_page_names_every_package():
    page = (SOURCE.parent.parent / "docs" / "architecture.md").read_text()
    assert [room for room in ORDER if f"`{room}" not in page] == []


def code_lines(source: str) -> int:
    """Count the lines that hold code: no blank lines, comments or docstrings."""
    docs: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docs.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = enumerate(source.splitlines(), 1)
    return sum(bool(text := line.strip()) and not text.startswith("#") and number not in docs for number, line in lines)


def test_modules_hold_at_most_450_lines_of_code():
    long = {name: count for name, path in modules().items() if (count := code_lines(path.read_text())) > 450}
    assert long == {}, f"split by thought: {long}"


def test_lines_of_code_leave_out_docstrings_and_comments():
    assert code_lines('"""One\ntwo."""\n\n# three\nfour = 4  # five\n') == 1
