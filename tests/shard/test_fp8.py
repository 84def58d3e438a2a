"""fp8 layers: converted and trained in emulation; refused in one line where they cannot be."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from dtrain.dist.mesh import build_mesh
from dtrain.errors import ConfigError
from dtrain.shard.fsdp import shard_model
from dtrain.shard.materialize import materialize
from dtrain.shard.precision import convert_to_fp8
from dtrain.state import init_state
from dtrain.step.microbatch_step import microbatch_step
from dtrain.typing import LossSum

DIM = 32


class Doubled(nn.Linear):
    """A subclass, with a forward of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2.0 * super().forward(x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()) for _ in range(2))
        self.own, self.head, self.odd = Doubled(DIM, DIM), nn.Linear(DIM, 48), nn.Linear(48, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.odd(self.head(self.own(x)))


def loss(net: nn.Module, x: torch.Tensor) -> LossSum:
    return LossSum(total=net(x).square().sum(), weight=len(x))


def converted_names(net: nn.Module) -> list[str]:
    return [name for name, module in net.named_modules() if "Float8" in type(module).__name__]


def trained(emulated: bool) -> dict[str, Any]:
    """One step's gradient, from meta on."""
    with torch.device("meta"):
        net = Net()
    if emulated:
        net = convert_to_fp8(net, ignore="head", emulate=True)
    names = converted_names(net)
    net = shard_model(net, build_mesh(), blocks="blocks.*")
    net = materialize(net, seed=0)
    state = init_state(net, torch.optim.SGD(net.parameters(), lr=0.1))
    x = torch.randn(16, DIM, generator=torch.Generator().manual_seed(0))
    microbatch_step(state, x, loss_fn=loss, microbatch_size=16)
    grads = {name: p.grad.full_tensor().flatten().tolist() for name, p in state.params.items()}
    return {"names": names, "grads": grads, "dtypes": sorted({str(p.dtype) for p in net.parameters()})}


def test_fp8_sharded_gradients_are_close_to_the_original_model(ranks):
    pytest.importorskip("torchao")
    plain, low = (ranks(2).run(trained, emulated)[0] for emulated in (False, True))
    assert low["names"] == ["blocks.0.0", "blocks.1.0"]
    assert low["dtypes"] == ["torch.float32"]
    assert list(low["grads"]) == list(plain["grads"])
    here, there = (torch.cat([torch.tensor(values) for values in run["grads"].values()]) for run in (low, plain))
    apart = ((here - there).norm() / there.norm()).item()
    assert 1e-4 < apart < 0.2  # 3 bits of mantissa: it must differ, and not by much


def test_parameters_keep_their_identity():
    pytest.importorskip("torchao")
    net = Net()
    before = {name: id(param) for name, param in net.named_parameters()}
    convert_to_fp8(net, recipe="rowwise", emulate=True)
    assert converted_names(net) == ["blocks.0.0", "blocks.1.0", "head"]
    assert {name: id(param) for name, param in net.named_parameters()} == before


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: convert_to_fp8("net"), "convert_to_fp8: model must be a torch.nn.Module, got str"),
        (
            lambda: convert_to_fp8(Net(), recipe="fast"),
            "convert_to_fp8: recipe must be 'tensorwise', 'rowwise' or .* got 'fast'",
        ),
        (lambda: convert_to_fp8(Net(), ignore="haed"), "convert_to_fp8: ignore names 'haed', but no linear layer matches"),
        (
            lambda: convert_to_fp8(nn.Sequential(nn.Linear(8, 8), nn.Linear(32, 7))),
            "convert_to_fp8: none of 2 linear layers can be converted. Use sizes that are multiples of 16",
        ),
    ],
)
def test_invalid_arguments_are_refused_on_any_device(call: Callable[[], Any], message):
    with pytest.raises(ConfigError, match=message):
        call()


@pytest.mark.parametrize(
    ("available", "capability", "what"),
    [(False, (0, 0), "no CUDA device"), (True, (8, 0), "8.0"), (True, (7, 5), "7.5")],
)
def test_devices_without_fp8_are_refused_without_changes(monkeypatch, available, capability, what):
    monkeypatch.setattr("torch.cuda.is_available", lambda: available)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: capability)
    net = Net()
    with pytest.raises(ConfigError, match=f"convert_to_fp8: compute capability must be 8.9 or higher, got {what}. Leave"):
        convert_to_fp8(net)
    assert converted_names(net) == []


def test_missing_torchao_error_names_the_fp8_extra(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (8, 9))
    monkeypatch.setitem(sys.modules, "torchao.float8", None)  # an import of it fails
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(
        ConfigError, match=r'convert_to_fp8: needs torchao, which cannot be imported \(.*\): pip install "dtrain\[fp8\]"'
    ):
        convert_to_fp8(Net())


def convert_sharded() -> str:
    net = shard_model(Net(), build_mesh(), blocks="blocks.*")
    try:
        convert_to_fp8(net, emulate=True)
    except ConfigError as error:
        return str(error)
    return "no error"


def test_a_sharded_model_is_refused(ranks):
    assert (
        ranks(2).run(convert_sharded)[0]
        == "convert_to_fp8: the model is sharded already. Convert the model before shard_model."
    )


@pytest.mark.costly
def test_torchao_is_imported_lazily():
    code = "import sys, dtrain.shard.precision; print([name for name in sys.modules if name.startswith('torchao')])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=90).stdout == "[]\n"
