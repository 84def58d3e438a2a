"""A loop whose user has written ``torch.set_default_device``, on a simulated accelerator: it trains as on the CPU.

The accelerator belongs to a process for good, so each test has one of its own.
"""

import json
import shutil
import subprocess
import sys

import pytest
import torch

import dtrain as dt
import simulated_accelerator

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def mixture() -> list[str]:
    """Return the errors of calls that a GPU refuses, too."""
    errors = []
    here, host = torch.ones(3), torch.ones(3, device="cpu")
    calls = (
        lambda: torch.randn(3, generator=torch.Generator().manual_seed(0)),
        lambda: here + host,
        lambda: torch.nn.functional.linear(host, torch.ones(3, 3)),
        lambda: here.numpy(),
    )
    for call in calls:
        try:
            call()
        except (RuntimeError, TypeError) as error:
            errors.append(str(error).splitlines()[0])
    return [*errors, str((here + host[0]).device)]


def losses(device: str, folder: str) -> list[float]:
    """Train for two epochs with a save and a load between, and return the losses. The batches and draws are the CPU's."""
    cpu = torch.Generator("cpu").manual_seed(0)
    rows = {
        "x": torch.rand(24, 3, 8, 8, generator=cpu, device="cpu"),
        "y": torch.randint(4, (24,), generator=cpu, device="cpu"),
    }
    weights = [torch.randn(shape, generator=cpu, device="cpu") / 10 for shape in ((4, 192), (4,))]
    transforms = [dt.transforms.cutmix(num_classes=4), dt.transforms.clip_by_norm(1.0), dt.transforms.ema(0.9)]

    def loss_fn(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> dt.LossSum:
        return dt.LossSum(total=-(model(batch["x"]).log_softmax(-1) * batch["y"]).sum(), weight=len(batch["x"]))

    step = dt.compose_step(loss_fn, transforms)
    seen: list[float] = []
    for length in ("1ep", "2ep"):
        loader = dt.build_loader(rows, global_batch_size=8, seed=0, device=device, num_workers=1)
        model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 4)).to(device)
        with torch.no_grad():
            for param, value in zip(model.parameters(), weights, strict=True):
                param.copy_(value)
        state = step.init(model, torch.optim.AdamW(model.parameters(), lr=0.01), loader=loader)
        state = dt.load_sharded(folder, state, missing_ok=True) if seen else state
        for batch in loader.until(length):
            state, metrics = step(state, batch)
            seen.append(dt.reduce_metrics(metrics)["loss"])
        dt.save_sharded(folder, state)
    return seen


def run(name: str, *args: str) -> list:
    done = subprocess.run([sys.executable, __file__, name, *args], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result: list = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.costly
@needs_compiler
def test_simulated_accelerator_refuses_what_a_gpu_refuses():
    *errors, device = run("mixture")
    assert device == "simulated:0"
    for error, words in zip(errors, ("for generator", "same device", "same device", "to numpy"), strict=True):
        assert words in error


@pytest.mark.costly
@needs_compiler
def test_default_device_of_a_user_changes_no_number(tmp_path):
    expected = losses("cpu", str(tmp_path / "cpu"))
    assert len(expected) == 6
    assert run("losses", "simulated", str(tmp_path / "simulated")) == pytest.approx(expected, rel=1e-5)


if __name__ == "__main__":
    simulated_accelerator.start()
    torch.set_default_device(simulated_accelerator.NAME)
    name, *arguments = sys.argv[1:]
    print(json.dumps({"mixture": mixture, "losses": losses}[name](*arguments)))
