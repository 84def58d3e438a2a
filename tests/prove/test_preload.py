"""The packages of a script are imported once, before a proof replaces functions of torch in them."""

import os
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import dtrain as dt
from dtrain.prove.preload import replaced_functions, script_imports


def test_imports_of_a_script_are_those_of_installed_packages(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import os, torch\nimport numpy as np\nfrom part import net\nfrom package.sub import name\n")
    (tmp_path / "part.py").write_text("import einops\nimport dtrain\nfrom . import other\n")
    assert script_imports(script) == ("package.sub", "package.sub.name", "einops")
    # A package may read the variable when it is imported.
    script.write_text("import os\nos.environ['HF_HUB_OFFLINE'] = '1'\nimport transformers\n")
    assert script_imports(script) == ()


def test_function_that_a_package_has_imported_is_replaced_in_it(monkeypatch):
    package = ModuleType("package_of_a_script")
    package.draw, package.cat = torch.rand, torch.cat

    def noise(*, draw=torch.rand):
        return draw(2)

    package.noise = noise
    monkeypatch.setitem(sys.modules, package.__name__, package)
    original = torch.rand
    with replaced_functions():
        monkeypatch.setattr(torch, "rand", lambda *shape: torch.zeros(shape))
    assert package.draw is torch.rand is not original
    assert package.cat is torch.cat
    assert package.noise().tolist() == [0.0, 0.0]


@pytest.mark.costly
def test_package_is_imported_by_one_process_and_draws_even_random_numbers(tmp_path, monkeypatch):
    installed = tmp_path / "installed"
    installed.mkdir()
    (installed / "noisy.py").write_text(f"""
from torch import randn
open({str(tmp_path / "imports")!r}, "a").write("imported\\n")
def add_noise(x):
    return x + randn(x.shape)
""")
    monkeypatch.setenv("PYTHONPATH", str(installed), prepend=os.pathsep)
    folder = tmp_path / "script"
    folder.mkdir()
    monkeypatch.chdir(folder)
    Path("loop.py").write_text("""
import torch
from noisy import add_noise
import dtrain as dt

class Net(torch.nn.Linear):
    def forward(self, x):
        return super().forward(add_noise(x))

def loss_fn(model, batch):
    return dt.LossSum(total=model(batch[0]).square().sum(), weight=len(batch[0]))

with dt.init_dist() as info:
    dt.seed_all(0, info.rank)
    mesh = dt.build_mesh()
    x = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
    model = dt.shard_model(Net(4, 2), mesh, strategy="replicate")
    loader = dt.build_loader(torch.utils.data.TensorDataset(x), mesh=mesh, global_batch_size=6, seed=0)
    step = dt.compose_step(loss_fn)
    state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for batch in loader.until(2):
        state, metrics = step(state, batch)
""")
    report = dt.prove.prove("loop.py", fast=True, timeout_s=600.0)
    assert report.passed, report.text()
    assert (tmp_path / "imports").read_text() == "imported\n"
