"""``dt.prove.prove`` runs a script on real ranks; a correct loop passes, and a normal step calls no function of the proof."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import dtrain as dt

LOOP = Path(__file__).with_name("loop.py")
IN_BACKWARD = Path(__file__).with_name("in_backward.py")
AVERAGE = Path(__file__).with_name("average.py")
CONTRAST = Path(__file__).with_name("contrast.py")
BUGS = Path(__file__).parent / "bugs"


@pytest.mark.costly
def test_correct_loop_agrees_in_all_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    report = dt.prove.prove(LOOP, world_sizes=(2,), timeout_s=600.0)
    assert report.passed, report.text()
    verdicts = {row.name: row.verdict for row in report.rows}
    assert verdicts["1 rank, again"] == "bitwise"
    assert verdicts["2 ranks"] == verdicts["2 ranks, replicate"] == "tolerance"
    assert any(name.endswith("resumed") and verdict == "bitwise" for name, verdict in verdicts.items())
    assert "1 rank, as written" in verdicts
    assert "Updates of RMSprop and SGD outside of dtrain's step were not compared." in report.remarks()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.costly
def test_forwards_of_a_gradient_cache_and_of_recomputation_draw_alike_in_all_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    report = dt.prove.prove(CONTRAST, world_sizes=(2,), steps=2, timeout_s=600.0)
    assert report.passed, report.text()
    assert "Updates of" not in report.text()
    assert {"2 ranks", "activation checkpointing off"} <= {row.name for row in report.rows}


@pytest.mark.costly
def test_loop_of_steps_by_hand_that_exports_an_average_agrees(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save(torch.nn.Linear(8, 4).state_dict(), "pretrained.pt")
    torch.save({}, "average.pt")
    report = dt.prove.prove(AVERAGE, world_sizes=(2,), timeout_s=600.0)
    assert report.passed, report.text()
    assert {"killed after step 3, resumed", "killed after step 3, resumed on 2 ranks"} <= {row.name for row in report.rows}
    text = report.text()
    assert "The loop could not be shortened and was ended" in text
    assert "The script writes average.pt, which the current folder has already." in text
    assert "was not loaded again" not in text


STYLES = Path(__file__).parent / "styles"
ROWS = {
    "classify.py": ("", "--one-cycle", "--plateau --early-stop", "--restarts", "--sequence", "--torchmetrics"),
    "closures.py": ("", "--lbfgs", "--sam"),
    "codec.py": ("--fsdp", "--loader --checkpoint", "--checkpoint --file"),
    "data.py": ("--buckets", "--iterable", "--stateful", "--streaming", "--weighted", "--workers"),
    "ddp.py": ("", "--accumulate", "--autocast", "--compile", "--reduce", "--zero"),
    "fsdp.py": ("", "--accumulate", "--broadcast --own-checkpoint", "--own-checkpoint", "--tensor-parallel"),
    "gan.py": ("", "--penalty"),
    "gpt.py": ("", "--checkpoint", "--compile"),
    "maml.py": ("",),
    "noise.py": ("", "--generator", "--vae"),
    "policy.py": ("", "--dqn", "--grpo"),
    "teacher.py": ("", "--clip", "--momentum", "--phases"),
    "with_accelerate.py": ("", "--accumulate", "--dispatch", "--seedable --split-batches"),
    "with_fabric.py": ("", "--accumulate"),
    "with_trainer.py": ("", "--accumulate", "--lora"),
    "with_trl.py": ("",),
}
"""Correct scripts by file, with their arguments. None has dtrain's step. Each trains alike on 1, 2 and 3 ranks and resumed."""

QUICK = (
    "closures.py --lbfgs",
    "codec.py --checkpoint --file",
    "data.py --stateful",
    "ddp.py --zero",
    "fsdp.py --tensor-parallel",
    "gpt.py --checkpoint",
    "teacher.py --phases",
)
NOT_INSTALLED = {"with_fabric.py": "lightning", "with_trl.py": "trl"}


def by_row():
    for script, variants in ROWS.items():
        for arguments in variants:
            row = f"{script} {arguments}".strip()
            yield pytest.param(script, arguments.split(), id=row, marks=() if row in QUICK else pytest.mark.slow)


@pytest.mark.sample(2)
@pytest.mark.parametrize(("script", "arguments"), list(by_row()))
def test_correct_script_of_another_style_agrees(tmp_path, monkeypatch, script, arguments):
    # An import of Lightning replaces ``torch.compile``.
    if script in NOT_INSTALLED and importlib.util.find_spec(NOT_INSTALLED[script]) is None:
        pytest.skip(f"{NOT_INSTALLED[script]} is no dependency of the tests")
    monkeypatch.chdir(tmp_path)
    report = dt.prove.prove(STYLES / script, arguments, world_sizes=(2,), timeout_s=900.0)
    assert report.passed, report.text()


@pytest.mark.costly
def test_rollout_before_the_first_step_of_a_sharded_model_is_no_difference(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    report = dt.prove.prove(STYLES / "rollout.py", world_sizes=(2,), steps=6, timeout_s=600.0)
    assert report.passed, report.text()
    assert any(row.name.endswith("of 2 killed after step 5, resumed on 1 rank") for row in report.rows), report.text()
    assert "because they are numbers of the layout: world_size" in report.text()


@pytest.mark.costly
def test_loop_of_rank_0_alone_that_the_proof_has_to_end_shows_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    report = dt.prove.prove(STYLES / "codec.py", ["--long"], fast=True, world_sizes=(2,), steps=2, timeout_s=600.0)
    assert [row.verdict for row in report.rows] == ["ran", "nothing"], report.text()
    assert "a loop that only rank 0 runs was ended after 2 updates; raise --steps" in report.text()


@pytest.mark.costly
def test_loop_over_rollouts_ends_after_its_steps_and_agrees(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    report = dt.prove.prove(STYLES / "minibatches.py", fast=True, steps=3, timeout_s=600.0)
    assert report.passed, report.text()
    assert "The loop could not be shortened and was ended" in report.text()


@pytest.mark.costly
@pytest.mark.parametrize("argument", [[], ["--endless"]], ids=["loader of an epoch", "no loader"])
def test_loop_by_hand_is_shortened_and_agrees(tmp_path, monkeypatch, argument):
    monkeypatch.chdir(tmp_path)
    report = dt.prove.prove(STYLES / "plain.py", argument, world_sizes=(2,), steps=3, timeout_s=600.0)
    assert report.passed, report.text()
    verdicts = {row.name: row.verdict for row in report.rows}
    assert verdicts["1 rank, again"] == "bitwise"
    assert verdicts["2 ranks"] == "tolerance"
    assert "because they differ in two equal runs: printed: # s (1)" in report.text()


@pytest.mark.costly
@pytest.mark.parametrize("argument", [[], ["--next"]], ids=["zip", "next"])
def test_two_loaders_of_one_loop_are_two(tmp_path, monkeypatch, argument):
    monkeypatch.chdir(tmp_path)
    report = dt.prove.prove(STYLES / "loaders.py", argument, world_sizes=(2,), timeout_s=600.0)
    assert report.passed, report.text()
    assert [row.verdict for row in report.rows] == ["ran", "bitwise", "tolerance"]


def test_script_without_an_update_does_not_pass(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("nothing.py").write_text("print('hello')")
    report = dt.prove.prove("nothing.py", timeout_s=600.0)
    assert not report.passed
    assert "no update of an optimizer was seen; give the arguments with which the script trains" in report.text()


PLAIN = """
import sys
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.randn(24, 4, generator=torch.Generator().manual_seed(1)))
"""


GPU = """
import os
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("nccl")
rank, world = dist.get_rank(), dist.get_world_size()
local = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local)
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(4, 2).to(local), device_ids=[local])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler()
data = TensorDataset(torch.randn(24, 4, generator=torch.Generator().manual_seed(1)))
sampler = DistributedSampler(data)
for epoch in range(4):
    sampler.set_epoch(epoch)
    for (x,) in DataLoader(data, batch_size=12 // world, sampler=sampler, pin_memory=True):
        x = x.cuda(non_blocking=True)
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = (model(x) - torch.ones(1, device="cuda:0")).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        torch.cuda.synchronize()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if rank == 0:
            print(f"loss {mean.item() / world:.6f}")
        torch.save({"model": model.module.state_dict(), "epoch": epoch}, "last.pt")
dist.destroy_process_group()
"""


@pytest.mark.costly
def test_script_for_gpus_without_dtrain_runs_on_the_cpu_and_says_so(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(GPU)
    report = dt.prove.prove("train.py", world_sizes=(2,), timeout_s=600.0)
    rows = {row.name: row for row in report.rows}
    assert rows["2 ranks"].verdict == "tolerance", report.text()
    assert {module.dtype for module in report.modules} == {"bfloat16"}
    assert "The script names a GPU. All runs used the CPU, so kernels and memory of the GPU were not seen." in report.remarks()
    assert report.plain
    # It saves and never loads.
    resumed = next(row for name, row in rows.items() if name.endswith("resumed"))
    assert resumed.verdict == "differs"
    assert report.findings[resumed.findings[0]].cause.code == "state_begins_again"


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("change", "keep_precision", "reason"),
    [
        ('* float("nan")', False, "the loss of step 0 is nan"),
        ("* 0", False, "the loss is 0 in every step"),
        ("/ torch.ones(70_000).half().sum()", True, "the loss is 0 in every step"),
    ],
    ids=["nan", "0", "count that overflows"],
)
def test_loop_whose_loss_says_nothing_does_not_pass(tmp_path, monkeypatch, change, keep_precision, reason):
    monkeypatch.chdir(tmp_path)
    Path("loop.py").write_text(f"""{PLAIN}
for (x,) in torch.utils.data.DataLoader(data, batch_size=6):
    optimizer.zero_grad()
    (model(x).square().mean() {change}).backward()
    optimizer.step()
""")
    report = dt.prove.prove("loop.py", keep_precision=keep_precision, timeout_s=600.0)
    assert not report.passed
    assert [(row.name, row.verdict, row.text) for row in report.rows] == [("1 rank", "nothing", reason)]
    assert "0 differences, 0 failed runs, 1 run that shows nothing" in report.text()


HANG = """
import torch
from torch import nn
import dtrain as dt

def loss_fn(model, batch):
    return dt.LossSum(total=model(batch[0]).square().sum(), weight=len(batch[0]))

with dt.init_dist() as info:
    dt.seed_all(0, info.rank)
    mesh = dt.build_mesh()
    x = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
    model = dt.shard_model(nn.Linear(4, 2), mesh, strategy="full_shard")
    loader = dt.build_loader(torch.utils.data.TensorDataset(x), mesh=mesh, global_batch_size=6, seed=0)
    step = dt.compose_step(loss_fn)
    state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for batch in loader.until(2):
        state, metrics = step(state, batch)
        if state.spec.strategy == "replicate" and info.rank == 1:
            torch.distributed.all_reduce(torch.ones(7))
"""


@pytest.mark.costly
def test_run_that_hangs_is_a_failure_with_rank_and_collective(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("hang.py").write_text(HANG)
    report = dt.prove.prove("hang.py", steps=2, world_sizes=(2,), timeout_s=40.0)
    assert not report.passed
    assert not report.findings, report.text()
    (row,) = (row for row in report.rows if row.verdict != "bitwise" and row.text)
    assert (row.name, row.verdict) == ("2 ranks, replicate", "failed")
    assert re.search(r"rank 0 has not entered all_reduce #\d+ of group training, where rank 1 waits", row.text)
    assert "rank 1: " in row.text
    assert "hang.py:20 in <module>" in row.text


@pytest.mark.costly
def test_report_of_a_bug_names_step_cause_and_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    report = dt.prove.prove(BUGS / "mean_over_tokens.py", world_sizes=(2,), timeout_s=600.0)
    assert not report.passed
    finding = report.as_dict()["findings"][0]
    assert (finding["step"], finding["kind"], finding["cause"]) == (0, "loss", "loss_weighting")
    assert Path(__file__).parents[2].joinpath("docs", f"{finding['page']}.md").is_file()
    assert "DIFFERS (1)" in report.text()
    assert '   See the page "microbatch" of the documentation (loss_weighting).' in report.text().splitlines()


def test_gradients_of_an_update_in_backward_are_compared(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    report = dt.prove.prove(IN_BACKWARD, ["--bug"], world_sizes=(2,), steps=2, timeout_s=600.0)
    finding = report.as_dict()["findings"][0]
    assert (finding["step"], finding["kind"], finding["relative"]) == (0, "gradient", pytest.approx(0.5))
    assert [row.verdict for row in report.rows if row.name == "1 rank, again"] == ["bitwise"]


@pytest.mark.slow
@pytest.mark.parametrize("script", [LOOP, IN_BACKWARD, BUGS / "rotary_rounded.py"], ids=lambda path: path.stem)
def test_correct_loop_agrees_in_its_own_precision(tmp_path, monkeypatch, script):
    monkeypatch.chdir(tmp_path)
    arguments = ["--fixed"] if script.parent == BUGS else []
    report = dt.prove.prove(script, arguments, keep_precision=True, timeout_s=600.0)
    assert report.passed, report.text()
    assert report.rounding is not None
    assert all(not module.is_far for module in report.modules)


def test_rounded_frequencies_are_the_first_module_that_rounding_does_not_explain(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    report = dt.prove.prove(BUGS / "rotary_rounded.py", world_sizes=(), steps=2, keep_precision=True, timeout_s=600.0)
    assert [finding.cause.code for finding in report.findings] == ["rotary_rounded"]
    worst = max(report.modules, key=lambda module: module.output / module.rounding)
    assert (worst.name, worst.dtype, worst.is_far) == ("rotary", "bfloat16", True)
    assert worst.gradient is not None
    assert not any(module.is_far for module in report.modules[: report.modules.index(worst)])
    assert "The first module in the program whose error rounding does not explain: rotary" in report.text()


MEAN_OF_AN_EPOCH = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(torch.randn(24, 4), batch_size=4)
for epoch in range(3):
    losses = []
    for x in loader:
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    print(torch.stack(losses).mean().item())
"""


def test_epoch_without_batches_behind_the_last_step_is_no_failed_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("script.py").write_text(MEAN_OF_AN_EPOCH)
    report = dt.prove.prove("script.py", world_sizes=(), steps=3, timeout_s=600.0)
    assert [row.verdict for row in report.rows] == ["ran", "bitwise"], report.text()
    assert "After the last step, in an epoch without batches, the script raised RuntimeError: stack expects" in report.text()


def test_script_that_raises_is_a_failed_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "broken.py"
    script.write_text("raise RuntimeError('no data')\n")
    report = dt.prove.prove(script, world_sizes=(2,), timeout_s=600.0)
    assert not report.passed
    assert [row.verdict for row in report.rows] == ["failed"]
    assert "RuntimeError: no data (rank 0, broken.py:1)" in report.text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"script": "missing.py"}, r"prove: script must be a Python file, got '.*missing.py'"),
        ({"steps": 1}, "prove: steps must be an integer of at least 2, got 1"),
        ({"world_sizes": (1,)}, "prove: world_sizes must be an integer of at least 2, got 1"),
    ],
)
def test_options_are_checked(tmp_path, options, message):
    arguments = {"script": LOOP} | options
    with pytest.raises(dt.errors.ConfigError, match=message):
        dt.prove.prove(arguments.pop("script"), **arguments)


NORMAL_STEP = """
import sys
import runpy
calls = []
def profile(frame, event, argument):
    if event == "call" and "dtrain/prove" in frame.f_code.co_filename:
        calls.append(frame.f_code.co_name)
# The profiler would slow down these imports.
import torch._dynamo
import torch.distributed.fsdp
import dtrain
sys.argv = sys.argv[1:]
sys.setprofile(profile)
runpy.run_path(sys.argv[0], run_name="__main__")
sys.setprofile(None)
assert calls == [], calls
loaded = [name for name in sys.modules if name.startswith("dtrain.prove")]
assert loaded == [], loaded
"""


@pytest.mark.costly
def test_normal_run_calls_and_imports_nothing_of_the_proof(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", NORMAL_STEP, str(LOOP)], cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "held-out loss" in done.stdout


def test_command_refuses_ranks_that_are_no_numbers():
    done = subprocess.run(
        [sys.executable, "-m", "dtrain", "prove", "--ranks", "two", str(LOOP)],
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr == "dtrain: prove: --ranks must be numbers of at least 2, got 'two'. Pass 2,3, for example.\n"
