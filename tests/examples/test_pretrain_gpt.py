"""The main job, end to end and short: trained, killed in every way, resumed bit for bit, then on other ranks and strategies."""

import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import fsspec.config
import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner

from dtrain.checkpoint.checkpoint_info import latest_checkpoint, list_steps
from dtrain.cli.main import app
from dtrain.data.stream.write_shards import write_shards
from dtrain.loggers.records import read_jsonl
from dtrain.report.read_run import read_run
from dtrain.storage.remote import disconnect
from example_runs import ended, environment, here, job, last_tensors, launched, processes_of, ranks_of, wait_until
from helpers.text import read_text, train_and_held_out
from places import servers

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "pretrain_gpt.py"
TEXT = str(Path(sysconfig.get_path("stdlib")) / "asyncio" / "*.py")
STEPS, MIDDLE = 20, 8  # 12 steps after the middle
PATIENCE_S = 300  # for a task of seconds: the machine may be busy

# Other ranks add the same numbers in another order: at most 1e-7 was measured over 20 steps. Another batch differs by 1e-2.
TOLERANCE = 1e-4

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds the job's processes in /proc")


def command(
    *launcher: str,
    out: Path,
    steps: int = STEPS,
    save_every: int = MIDDLE,
    strategy: str = "full_shard",
    data: tuple[str, str] = ("--text", TEXT),
) -> list[str]:
    script = [str(SCRIPT), "--out", str(out), *data, "--steps", str(steps), "--save-every", str(save_every)]
    return [sys.executable, *launcher, *script, "--strategy", strategy]


def launch(n: int) -> list[str]:
    return ["-m", "dtrain", "launch", "-n", str(n)]


def run(arguments: list[str], cwd: Path) -> str:
    """Run to the end and return the output."""
    done = subprocess.run(arguments, cwd=cwd, capture_output=True, text=True, timeout=PATIENCE_S, env=environment())
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def losses(out: Path) -> dict[int, float]:
    return {step: record["loss"] for step, record in read_jsonl(out / "metrics.jsonl").items()}


def kill(how: str, process: subprocess.Popen[bytes], mark: str, chance: random.Random) -> None:
    ranks = ranks_of(mark)
    victims = {
        "rank": [chance.choice(ranks)],
        "all ranks": ranks,
        "launcher": [process.pid],
        "ctrl-c": [process.pid],
        "preempted": [process.pid],
    }[how]
    number = {"ctrl-c": signal.SIGINT, "preempted": signal.SIGTERM}.get(how, signal.SIGKILL)
    for pid in victims:
        try:
            os.kill(pid, number)
        except ProcessLookupError:  # the launcher was faster: it ends the other ranks when one is gone
            assert how == "all ranks"


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> Path:
    """The folder of a run that nothing interrupts. It keeps the checkpoint in the middle."""
    cwd = tmp_path_factory.mktemp("straight")
    text = run(command(*launch(2), out=cwd / "out"), cwd)
    assert "held-out loss" in ended(text).what  # its value says nothing after steps that are all warm-up: see the next test
    assert "[rank 1]" not in text
    assert [checkpoint.step for checkpoint in list_steps(cwd / "out" / "checkpoints")] == [MIDDLE, 2 * MIDDLE, STEPS]
    return cwd / "out"


@pytest.mark.slow
def test_training_on_the_default_text_ends_below_the_baseline(tmp_path):
    end = ended(launched("pretrain_gpt.py", "--steps", "60", out=tmp_path / "out"))
    assert end.value < 0.9 * end.baseline


KILLS = ("rank", "all ranks", "launcher", "ctrl-c", "preempted")


@pytest.mark.parametrize("kills", [("rank", "launcher", "preempted"), pytest.param(KILLS, marks=pytest.mark.slow)], ids=len)
def test_killed_run_resumes_bit_for_bit(straight, tmp_path, kills):
    seed = random.randrange(2**32)
    print(f"kill seed: {seed}")
    chance = random.Random(seed)
    out = tmp_path / "out"
    arguments = command(*launch(2), out=out, save_every=4)
    hows = list(kills)
    chance.shuffle(hows)
    for turn, how in enumerate(hows):
        goal = chance.randint(1 + turn * STEPS // (len(hows) + 1), (turn + 1) * STEPS // (len(hows) + 1))
        with job(arguments, tmp_path) as (process, mark):
            # The goal may be behind the end of the last leg: then this leg is killed while it starts.
            wait_until(lambda goal=goal: last_step(out) >= goal or process.poll() is not None, f"step {goal}")
            wait_until(lambda mark=mark: len(ranks_of(mark)) == 2 or process.poll() is not None, "both ranks run")
            time.sleep(chance.random() / 4)
            assert process.poll() is None, "the job ended before it was killed"
            kill(how, process, mark, chance)
            code = process.wait(timeout=PATIENCE_S)
            wait_until(lambda mark=mark: not processes_of(mark), f"all processes are gone after: {how}")
        if how == "preempted":
            saved = latest_checkpoint(out / "checkpoints")
            # 143: the stop came before there was a state to save, while it started.
            assert code == 143 or (code == 75 and saved is not None and saved.name == f"step-{last_step(out):08d}")
        else:
            assert code == {"rank": 137, "all ranks": 137, "launcher": -signal.SIGKILL, "ctrl-c": 130}[how]
    text = run(arguments, tmp_path)
    assert "resuming after step" in text
    assert list(losses(out)) == list(range(1, STEPS + 1))
    assert losses(out) == losses(straight)
    assert len(last_tensors(out)) > 50
    assert last_tensors(out) == last_tensors(straight)
    told = read_run(out, now=time.time())
    assert [attempt.outcome for attempt in told.attempts][-1] == "done"
    assert {attempt.outcome for attempt in told.attempts[:-1]} <= {
        "killed",
        "failed",
        "stopped",
    }  # one may die before it opens the run
    assert len(told.attempts) >= 3
    assert told.attempts[-1].last_step == STEPS
    assert told.goodput.by_cause["restart"] > 0
    assert sum(told.goodput.by_cause.values()) == pytest.approx(told.goodput.total_s)
    assert {save["step"] for save in told.checkpoints} >= {STEPS}
    assert all(save["blocked_s"] is not None and save["bytes"] for save in told.checkpoints if save["step"] == STEPS)


@pytest.mark.parametrize(
    ("n", "strategy"),
    [
        *((n, "full_shard") for n in (1, 3, 4)),
        *((n, "replicate") for n in (2, 3)),
    ],
)
@pytest.mark.slow
def test_run_resumes_on_different_ranks_and_strategies(straight, tmp_path, n, strategy):
    out = only_the_middle(straight, tmp_path / "out")
    text = run(command(*launch(n), out=out, strategy=strategy), tmp_path)
    assert f"resuming after step {MIDDLE}" in text
    resumed, expected = losses(out), losses(straight)
    assert list(resumed) == list(expected)
    worst = max(abs(resumed[step] / expected[step] - 1) for step in expected)
    print(f"{n} ranks, {strategy}: largest relative difference of a loss over {STEPS - MIDDLE} steps: {worst:.1e}")
    assert worst <= TOLERANCE


def test_finished_run_reports_completion(straight):
    before = losses(straight)
    data = ["--text", TEXT, "--steps", str(STEPS), "--save-every", str(MIDDLE)]
    text = here("pretrain_gpt.py", *data, out=straight)  # in one process, without a launcher
    assert f"resuming after step {STEPS}" in text
    assert "held-out loss" in text
    assert losses(straight) == before


def test_commands_of_the_first_page_work_on_a_run(straight, tmp_path, monkeypatch):
    """Its commands behind the run, in a folder where the run is at the example's default place."""
    (tmp_path / "ckpt").mkdir()
    shutil.copytree(straight, tmp_path / "ckpt" / "pretrain_gpt")
    monkeypatch.chdir(tmp_path)
    (block,) = (
        text for text in re.findall(r"```bash\n(.*?)```", (ROOT / "docs" / "index.md").read_text(), re.S) if "convert" in text
    )
    lines = block.splitlines()
    assert len(lines) == 3
    for line in lines:
        program, *words = shlex.split(line, comments=True)
        result = CliRunner().invoke(app, words)
        assert (program, result.exit_code) == ("dtrain", 0), result.output
    weights = load_file("exported/model.safetensors")
    assert sum(value.numel() for value in weights.values()) > 400_000
    assert Path("ckpt/pretrain_gpt/report.html").exists()


# Nodes that come and go are torchrun's own: the first one starts alone, a second after the smallest number has joined.
ELASTIC = ["--nnodes", "1:4", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--rdzv-conf", "last_call_timeout=1"]


@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param([], id="python", marks=pytest.mark.slow),
        pytest.param(["-m", "torch.distributed.run", "--nproc-per-node", "3", *ELASTIC], id="torchrun"),
    ],
)
def test_run_resumes_without_dtrain_launch_on_different_ranks(straight, tmp_path, monkeypatch, launcher):
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # torchrun leaves a folder behind
    out = only_the_middle(straight, tmp_path / "out")
    text = run(command(*launcher, out=out, strategy="replicate"), tmp_path)
    assert f"resuming after step {MIDDLE}" in text
    assert text.count("held-out loss") == 1
    assert list(losses(out).values()) == pytest.approx(list(losses(straight).values()), rel=TOLERANCE)


@pytest.fixture(scope="module")
def corpus() -> Iterator[tuple[str, str]]:
    """The option for the same text in shards on a server of S3, with this process set up to reach it."""
    with servers.s3() as server, pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as caches:
        patch.setitem(fsspec.config.conf, "s3", server.options)
        for name, value in {**server.environment, "TMPDIR": caches}.items():
            patch.setenv(name, value)
        url = f"{server.root()}/corpus"
        for split, windows in zip(("train", "val"), train_and_held_out(read_text(TEXT), 128, held_out_windows=64), strict=True):
            samples = ({"tokens": window} for window in windows.windows.numpy())
            columns = {"tokens": "ndarray:uint8:129"}
            write_shards(samples, f"{url}/{split}", format="mds", columns=columns, compression="zstd", max_shard_bytes=2**16)
        yield "--data", url
        disconnect()


@pytest.mark.slow
def test_killed_streaming_run_resumes_bit_for_bit(corpus, tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    text = run(command(*launch(2), out=whole, steps=20, save_every=3, data=corpus), tmp_path)
    assert "[rank 0] held-out loss" in text
    arguments = command(*launch(2), out=broken, steps=20, save_every=3, data=corpus)
    with job(arguments, tmp_path) as (process, mark):
        wait_until(lambda: last_step(broken) >= 4 or process.poll() is not None, "step 4")
        kill("all ranks", process, mark, random.Random(0))
        assert process.wait(timeout=PATIENCE_S) == 137
        wait_until(lambda: not processes_of(mark), "all processes are gone")
    text = run(arguments, tmp_path)
    assert "resuming after step" in text
    assert list(losses(broken)) == list(range(1, 21))
    assert losses(broken) == losses(whole)
    assert last_tensors(broken) == last_tensors(whole)


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 3])
def test_streaming_run_resumes_on_different_ranks(corpus, tmp_path, n):
    whole = tmp_path / "whole"
    run(command(*launch(2), out=whole, data=corpus), tmp_path)
    other = only_the_middle(whole, tmp_path / "other")
    text = run(command(*launch(n), out=other, data=corpus), tmp_path)
    assert f"resuming after step {MIDDLE}" in text
    assert list(losses(other).values()) == pytest.approx(list(losses(whole).values()), rel=TOLERANCE)


def last_step(out: Path) -> int:
    path = out / "metrics.jsonl"
    return max(losses(out), default=0) if path.exists() else 0


def only_the_middle(straight: Path, out: Path) -> Path:
    """A copy of the run as it was right after the checkpoint in the middle."""
    folder = f"checkpoints/step-{MIDDLE:08d}"
    shutil.copytree(straight / folder, out / folder)
    lines = (straight / "metrics.jsonl").read_text().splitlines(keepends=True)
    (out / "metrics.jsonl").write_text("".join(lines[:MIDDLE]))
    return out
