"""Scripts of other libraries run as the pages show them, and the lists of names in ways_in.py are those of the releases.

``nox -s ways_in`` installs the libraries and runs this. Composer, which needs another torch, is read and not imported.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pages import ways_in
from pages.theirs import SAMPLES

PACKAGES = {"from_accelerate.md": "accelerate", "from_deepspeed.md": "deepspeed", "from_fabric.md": "lightning"}

# Of each of two processes in three epochs, with the batch sizes of the pages.
BATCHES = {
    page: 3 * SAMPLES // size // 2
    for page, size in (("from_accelerate.md", 8), ("from_deepspeed.md", 4), ("from_fabric.md", 8))
}


def folder_of(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{package} is not installed; nox -s ways_in runs this")
    return Path(next(iter(spec.submodule_search_locations)))


@pytest.mark.costly
@pytest.mark.parametrize("page", PACKAGES)
def test_other_library_script_runs_on_two_processes(page: str, tmp_path: Path) -> None:
    folder_of(PACKAGES[page])
    script, on_cpus = Path(__file__).with_name("theirs.py"), {"DS_ACCELERATOR": "cpu", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script), page],
        capture_output=True, text=True, timeout=600, cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path), **on_cpus},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert re.findall(r"batches (\d+)", done.stdout) == [str(BATCHES[page])] * 2, done.stdout
    assert (tmp_path / "ckpt").exists()


# ---- names -------------------------------------------------------------------------------------------------------------------


def class_of(package: str, path: str, name: str) -> ast.ClassDef:
    tree = ast.parse((folder_of(package) / path).read_text())
    return next(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == name)


def methods(of: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in of.body if isinstance(node, ast.FunctionDef)}


def arguments(of: ast.ClassDef, method: str = "__init__") -> set[str]:
    taken = methods(of)[method].args
    return {argument.arg for argument in (*taken.args, *taken.kwonlyargs)} - {"self"}


def public(of: ast.ClassDef) -> set[str]:
    return {name for name in methods(of) if not name.startswith("_")}


def fields(of: ast.ClassDef) -> Iterator[str]:
    """Return the fields of a dataclass, or of a pydantic model by their names in a file, without deprecated fields."""
    for node in of.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            source = ast.unparse(node.value) if node.value else ""
            alias = re.search(r"alias='(\w+)'", source)
            if "'deprecated'" not in source:
                yield alias[1] if alias else node.target.id


def listed(names: str) -> set[str]:
    return set(names.split())


def test_composer_tables_match_the_package_source() -> None:
    trainer = class_of("composer", "trainer/trainer.py", "Trainer")
    assert arguments(trainer) == listed(ways_in.COMPOSER_TRAINER)
    assert arguments(trainer, "fit") == listed(ways_in.COMPOSER_FIT)
    events = class_of("composer", "core/event.py", "Event").body
    assert {node.targets[0].id for node in events if isinstance(node, ast.Assign)} == listed(ways_in.COMPOSER_EVENTS)


def test_accelerate_tables_match_the_package_source() -> None:
    accelerator = class_of("accelerate", "accelerator.py", "Accelerator")
    assert arguments(accelerator) == listed(ways_in.ACCELERATOR)
    own = public(accelerator) - arguments(accelerator)
    assert own - listed(ways_in.ACCELERATE_METHODS) == listed(ways_in.ACCELERATE_REPEATED)
    assert listed(ways_in.ACCELERATE_METHODS) <= own
    plugin = class_of("accelerate", "utils/dataclasses.py", "FullyShardedDataParallelPlugin")
    assert set(fields(plugin)) == listed(ways_in.ACCELERATE_FSDP)


def test_fabric_tables_match_the_package_source() -> None:
    fabric = class_of("lightning", "fabric/fabric.py", "Fabric")
    assert arguments(fabric) == listed(ways_in.FABRIC)
    assert public(fabric) - arguments(fabric) - {"logger"} == listed(ways_in.FABRIC_METHODS)


def test_deepspeed_tables_match_the_package_source() -> None:
    assert set(fields(class_of("deepspeed", "runtime/zero/config.py", "DeepSpeedZeroConfig"))) == listed(ways_in.DEEPSPEED_ZERO)
