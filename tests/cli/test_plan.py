"""``dtrain plan``: its output, and one line for each mistake."""

import json
import shlex
import subprocess
import sys

import pytest

from dtrain.cli.plan import _Progress, format_seconds, parse_factory_arguments, parse_memory, parse_network
from dtrain.errors import ConfigError
from dtrain.planning.device_facts import DeviceFacts
from dtrain.planning.estimate import PlanProgress
from dtrain.planning.simulate import ParallelismConfig
from dtrain.planning.step_time import NETWORKS

MODEL = """
import torch
from dtrain.planning.workload import Workload
from dtrain.typing import LossSum

def workload(*, width: int = 8, seq: int = 4):
    def loss(model, batch):
        return LossSum(total=model(batch).sum(), weight=len(batch))
    layers = lambda: torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Linear(width, width))
    return Workload(model=layers, loss_fn=loss, batch=lambda n: torch.zeros(n, seq, width), blocks=(torch.nn.Linear,))
"""


@pytest.fixture
def plan(command_line, monkeypatch, tmp_path):
    """``plan(*args)``, as of ``command_line``, in a folder with ``cli_model.py``."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cli_model.py").write_text(MODEL)
    yield command_line("plan")
    sys.modules.pop("cli_model", None)


def test_comparison_prints_one_line_per_strategy(plan):
    code, out, err = plan("cli_model.py:workload", "--world", "8", "--memory", "64KiB", "--checkpoint", "none")
    assert code == 0
    assert err.splitlines()[-1].split(" in ")[0] == "plan: 3 of 3 layouts"
    lines = out.splitlines()
    assert lines[0].startswith("cli_model.py:workload: 144 parameters on 8 ranks (dp_replicate 1 x dp_shard 8), 64 KiB each")
    assert lines[2].split()[:5] == ["strategy", "checkpoint", "fits", "peak", "in"]
    assert [line.split()[0] for line in lines[3:6]] == ["replicate", "shard_grad_op", "full_shard"]


def test_progress_has_a_line_every_few_seconds(capsys):
    times = iter([0, 1, 5, 6, 7])
    progress = _Progress(lambda: next(times))
    config = ParallelismConfig(world_size=8, strategy="full_shard", checkpoint="nothing")
    for size, done in ((1, 0), (4, 0), (None, 1), (None, 2)):
        progress.show(PlanProgress(config=config, microbatch_size=size, done=done, total=2))
    progress.close()
    assert capsys.readouterr().err.splitlines() == [
        "plan: 0 of 2 layouts in 5 s: full_shard, checkpoint nothing, microbatches of 4",
        "plan: 2 of 2 layouts in 7 s",
    ]


def test_progress_is_one_live_line_in_a_terminal(capsys, monkeypatch):
    progress = _Progress(lambda: 0)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    for size in (1, 4):
        config = ParallelismConfig(world_size=8)
        progress.show(PlanProgress(config=config, microbatch_size=size, done=0, total=1))
    progress.close()
    live, last = "\r\x1b[Kplan: 0 of 1 layout in 0 s: full_shard, no checkpointing, microbatches of ", "\r\x1b[K"
    assert capsys.readouterr().err == f"{live}1{live}4{last}"


def test_single_strategy_is_printed_in_detail(plan):
    code, out, _ = plan("cli_model.py:workload", "--world", "512", "--strategy", "full_shard", "--memory", "64KiB")
    assert code == 0
    for begin in (
        "part ",
        "parameters ",
        "together ",
        "The peak is in ",
        "collective ",
        "reduce_scatter ",
        "The largest micro",
    ):
        assert any(line.startswith(begin) for line in out.splitlines()), begin


def test_json_uses_bytes_and_sums_match(plan):
    code, out, _ = plan(
        "cli_model:workload", "--world", "2", "--strategy", "replicate", "--json", "--seq", "16", "--arg", "width=32"
    )
    report = json.loads(out)
    (only,) = report["plans"]
    assert (code, report["memory"], only["largest"]) == (0, None, None)
    assert only["parameters"] == 2 * (32 * 32 + 32)
    assert only["at_peak"]["parameters"] == only["parameters"] * 4
    assert sum(only["at_peak"].values()) == only["peak"] == only["peaks"][only["peak_in"]]
    assert only["sent"] == sum(call["sent"] for call in only["traffic"])


def test_insufficient_memory_for_one_sample_exits_1(plan):
    code, out, _ = plan("cli_model.py:workload", "--world", "2", "--strategy", "replicate", "--memory", "1KiB")
    assert code == 1
    assert "Not one sample fits: it takes" in out


def test_facts_of_a_device_are_rows_of_the_plan(plan, tmp_path):
    DeviceFacts(device="Test 1", torch="2.13.0", workspaces=3 * 2**20, bytes_per_group=2**20).save(tmp_path / "facts.json")
    arguments = ("cli_model.py:workload", "--world", "2", "--strategy", "replicate")
    for options, size, source in (
        ((), "64 MiB", "assumed, not measured."),
        (("--facts", "facts.json"), "3 MiB", "measured on Test 1, torch 2.13.0."),
    ):
        code, out, _ = plan(*arguments, *options)
        assert code == 0
        assert f"The workspaces of matrix products are {source}" in out
        (row,) = (line for line in out.splitlines() if line.startswith("device: workspaces"))
        assert row.endswith(f"  {size}")
    code, out, _ = plan(*arguments, "--facts", "facts.json", "--json")
    library = json.loads(out)["plans"][0]["library"]
    assert (library["device_workspaces"], library["device_collectives"]) == (3 * 2**20, 2**20)
    assert library["device"] == sum(library[f"device_{name}"] for name in ("batches", "workspaces", "rounding", "collectives"))


MISTAKES = {
    "no target": ("", "missing argument 'TARGET'"),
    "no ranks": ("m.py:f", "missing option '--world'"),
    "ranks in letters": ("m.py:f --world many", "--world must be an integer of at least 1, got 'many'"),
    "unit": ("m.py:f --world 8 --memory 80", "--memory must have a unit, got '80'. Pass 80GiB or 80GB, for example."),
    "no memory": ("m.py:f --world 8 --memory 0GiB", "--memory must be a size such as 512MiB or 5GB, got '0GiB'"),
    "headroom": ("m.py:f --world 8 --headroom 5%", "--headroom must be a finite number at least 0 and below 1, got '5%'"),
    "precision": (
        "m.py:f --world 8 --precision fp64",
        "--precision must be 'fp32', 'bf16', 'fp16', 'pure-bf16' or 'pure-fp16', got 'fp64'",
    ),
    "checkpoint": ("m.py:f --world 8 --checkpoint all", "--checkpoint must be 'none', 'nothing' or 'matmuls', got 'all'"),
    "argument": ("m.py:f --world 8 --arg layers", "--arg must be name=value, got 'layers'"),
    "argument twice": ("m.py:f --world 8 --arg seq=1 --seq 2", "the argument 'seq' is repeated"),
    "accumulate": (
        "cli_model.py:workload --world 2 --accumulate never",
        "accumulate must be 'local' or 'sharded', got 'never'",
    ),
    "device": (
        "m.py:f --world 8 --device tpu",
        "--device must be cuda, cpu, a100, h100, h200, b200, l40s, mi300x or rates, got 'tpu'",
    ),
    "efficiency without a device": (
        "cli_model.py:workload --world 2 --strategy full_shard --efficiency 0.5",
        "--efficiency must come with rates of a device, got 0.5. Add --device h100.",
    ),
    "no facts": ("m.py:f --world 2 --facts nope.json", "DeviceFacts.load: cannot read 'nope.json'"),
    "no file": ("nope.py:workload --world 2", "no such file: 'nope.py'"),
}


@pytest.mark.parametrize(("args", "expected"), MISTAKES.values(), ids=MISTAKES)
def test_invalid_arguments_print_one_line(plan, args, expected):
    code, out, err = plan(*shlex.split(args))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("dtrain: ")
    assert expected in err


SIZES = {"80GiB": 80 * 2**30, "80 GB": 80 * 10**9, "1.5KiB": 1536, "512MiB": 2**29, "7B": 7, "2TiB": 2**41}


@pytest.mark.parametrize(("text", "size"), SIZES.items(), ids=SIZES)
def test_memory_option_accepts_units(text, size):
    assert parse_memory("plan", "--memory", text) == size


@pytest.mark.parametrize("text", ["", "80", "1.5", "GiB", "0GiB", "-1GiB", "80 G", "1e3GiB", "nanGiB"])
def test_memory_option_without_unit_is_refused(text):
    with pytest.raises(ConfigError, match=r"plan: --memory must (be a size such as|have a unit, got)"):
        parse_memory("plan", "--memory", text)


def test_factory_arguments_are_parsed_as_literals_or_strings():
    assert parse_factory_arguments(["a=1", "b=0.5", "c=relu", "d=(1, 2)", "e=None", "f="]) == {
        "a": 1,
        "b": 0.5,
        "c": "relu",
        "d": (1, 2),
        "e": None,
        "f": "",
    }


def test_network_adds_seconds(plan):
    arguments = ("cli_model.py:workload", "--world", "16", "--network", "h100-ndr400", "--json")
    code, out, _ = plan(*arguments)
    rows = json.loads(out)["plans"]
    assert code == 0
    assert all(row["seconds"]["links"] > 0 for row in rows)
    assert [row["seconds"]["control"] for row in rows] == pytest.approx([2 * (6 * 40e-6 + 55e-6)] * len(rows))
    for strategy, expected in (((), "on the links: collectives"), (("--strategy", "full_shard"), "A step spends ")):
        code, out, _ = plan(*arguments[:-1], *strategy)
        assert code == 0
        assert expected in out
        assert "on the links" in out.splitlines()[2] or strategy


def test_device_adds_estimated_seconds_and_sorts_by_them(plan):
    arguments = (
        "cli_model.py:workload",
        "--world",
        "16",
        "--network",
        "h100-ndr400",
        "--device",
        "h100",
        "--checkpoint",
        "none",
    )
    code, out, _ = plan(*arguments, "--workers", "2", "--json")
    rows = json.loads(out)["plans"]
    speeds = [row["step_seconds"]["samples_per_second"] for row in rows]
    assert code == 0
    assert speeds == sorted(speeds, reverse=True)
    assert all(row["work"]["flops"] == {"float32": 3 * 2 * 4 * 2 * 8 * 8 - 2 * 4 * 8 * 8} for row in rows)
    assert all(row["library"]["host_staging"] == row["staged"] for row in rows)
    assert all(row["library"]["host_batches"] == 2 * 3 * 4 * 8 * 4 for row in rows)
    code, out, _ = plan(*arguments, "--strategy", "full_shard", "--efficiency", "0.5")
    assert code == 0
    assert "an estimate, not measured, which assumes 50% of the peak operations" in out
    assert [line.split("  ")[0] for line in out.splitlines() if "library" in line] == ["device: library", "host: library"]


@pytest.mark.costly
@pytest.mark.usefixtures("plan")
def test_processes_do_not_change_the_plan():
    """In a process of its own: a fork of the tests' process could inherit a lock."""
    command = (sys.executable, "-m", "dtrain", "plan", "cli_model.py:workload", "--world", "4", "--json", "--processes")
    one, two = (subprocess.run([*command, n], capture_output=True, timeout=300, check=True).stdout for n in ("1", "2"))
    assert one == two


def test_network_is_parsed_by_name_and_by_hand():
    assert parse_network("plan", "--network", "a100-hdr200") is NETWORKS["a100-hdr200"]
    network = parse_network("plan", "--network", "node=4,within=32GB/s,between=100Gb/s,latency=5us,control=0.1ms")
    assert (network.local_world_size, network.within, network.between) == (4, 32e9, 12.5e9)
    latencies = (network.within_latency_s, network.between_latency_s, network.control_latency_s)
    assert latencies == pytest.approx((5e-6, 5e-6, 1e-4))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("nvlink", "--network must be one of a100-hdr200, .* or a list of values, got 'nvlink'"),
        ("node=8,within=450", "must be one of .*got 'node=8,within=450'"),
        ("node=8,within=450GB/s", "--network must have between=, got"),
    ],
)
def test_unknown_network_is_refused(text, expected):
    with pytest.raises(ConfigError, match=expected):
        parse_network("plan", "--network", text)


@pytest.mark.parametrize(("seconds", "text"), [(2, "2 s"), (0.0511, "51.1 ms"), (3e-6, "3 us"), (0, "0 us")])
def test_seconds_have_three_digits(seconds, text):
    assert format_seconds(seconds) == text
