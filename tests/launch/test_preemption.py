"""SIGTERM at random moments: every rank saves and exits with 75, and the resumed run shows no trace of it.

12 moments, or ``TEST_MOMENTS``; each is in a phase of the loop that is chosen in turn, at a random time in it. One in six is
of a real launch.
"""

import json
import os
import random
import signal
import sys
import textwrap
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch

import dtrain as dt
import public
from step.ending import endings

MOMENTS = int(os.environ.get("TEST_MOMENTS", "12"))
LAUNCHES = MOMENTS // 6
Leg = Callable[[list[str], Callable[[Callable[[], bool]], None]], list[int]]  # runs the loop, and stops it; exit codes
PHASES = {"compile": 0.3, "data": 0.03, "step": 0.005, "evaluate": 0.06, "save": 0.01}  # each at least so long, in seconds
LONG_S = 300

LOOP = """
    import sys, time
    from pathlib import Path
    import torch, dtrain as dt
    from torch import nn

    folder, workers, goal, slow = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])

    class Slow:
        def __len__(self):
            return 8

        def __getitem__(self, index):
            time.sleep(0.03 * slow)
            return torch.full((4,), index / 8)

    class Net(nn.Sequential):
        def __init__(self):
            super().__init__(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))

    @torch.compile(backend="aot_eager")
    def squares(y):
        return (y - 1).square().sum()

    def loss_fn(model, batch):
        time.sleep(0.005 * slow)
        return dt.LossSum(total=squares(model(batch)), weight=len(batch))

    def main():
        with dt.init_dist() as dist:
            def phase(name):
                if dist.rank == 0:
                    (folder / "next").write_text(name)
                    (folder / "next").rename(folder / "phase")

            dt.seed_all(1, dist.rank)
            mesh = dt.build_mesh()
            model = dt.shard_model(Net(), mesh, blocks=(nn.Linear,))
            loader = dt.build_loader(Slow(), mesh=mesh, global_batch_size=4, seed=0, num_workers=workers)
            step = dt.compose_step(loss_fn)
            state = step.init(model, torch.optim.AdamW(model.parameters(), lr=0.01), seed=1, loader=loader)
            state = dt.load_sharded(folder / "ckpt", state, missing_ok=True)
            log = dt.loggers.jsonl(folder / "metrics.jsonl")
            torch.distributed.barrier()  # all ranks have a state now, which can be saved
            phase("compile")
            time.sleep(0.3 * slow)
            for batch in loader.until(goal):
                if (folder / "phase").read_text() != "compile":
                    phase("step")
                state, metrics = step(state, batch)
                log(state.step, dt.reduce_metrics(metrics))
                stop = dt.should_stop(state)
                if stop or state.crossed(2):
                    phase("save")
                    time.sleep(0.01 * slow)
                    dt.save_sharded(folder / "ckpt", state, keep_last=2)
                if stop:
                    return
                if state.crossed(3):
                    phase("evaluate")
                    test_loader = dt.build_loader(Slow(), mesh=mesh, global_batch_size=8, seed=0)
                    dt.evaluate(model, test_loader, loss_fn)
                phase("data")

    if __name__ == "__main__":
        main()
"""


def logged(folder) -> list[tuple[int, float]]:
    """The step and loss of each line, as they were written: a step that was done twice is there twice."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(record["step"], record["loss"]) for record in records]


@pytest.fixture(scope="module")
def warm() -> None:
    """Load the modules of the loop once: each fork of this process would load them for itself, which takes seconds."""
    public.load_all()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.compile(lambda x: (x - 1).square().sum(), backend="aot_eager")(torch.ones(3, requires_grad=True) * 2).backward()


def by_launcher(start, workers: int) -> Leg:
    def leg(arguments, wait_for_moment):
        options = ["--grace", "60"]
        job = start(textwrap.dedent(LOOP), *arguments, options=options, name=f"loop_{workers}.py")
        wait_for_moment(lambda: job.process.poll() is None)
        job.process.send_signal(signal.SIGTERM)
        result = job.wait()
        print(result.err)
        return [result.code]

    return leg


def by_forks(folder: Path) -> Leg:
    """The ranks alone, as the launcher forks them and passes the signal on; it takes a tenth of the time."""

    def leg(arguments, wait_for_moment):
        def meanwhile(pids):
            wait_for_moment(lambda: all(os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None for pid in pids))
            for pid in pids:
                os.kill(pid, signal.SIGTERM)

        return endings(partial(run_loop, arguments=arguments), 2, folder, meanwhile=meanwhile)[0]

    return leg


def run_loop(rank: int, *, arguments: list[str]) -> None:
    warnings.simplefilter("ignore")  # pytest makes errors of torch's own, too
    sys.argv[1:] = arguments
    exec(compile(textwrap.dedent(LOOP), "loop.py", "exec"), {"__name__": "__main__"})


def stop_again_and_again(leg: Leg, folder: Path, *, workers: int, seed: int, times: int) -> Counter[str]:
    """Start the loop, stop it at a random moment, and so on; in which phases that was."""
    chance = random.Random(seed)
    folder.mkdir()
    phases: Counter[str] = Counter()
    for turn in range(times):
        phase = list(PHASES)[turn % len(PHASES)]
        (folder / "phase").write_text("start")

        def wait_for_moment(alive: Callable[[], bool], phase: str = phase) -> None:
            deadline = time.monotonic() + LONG_S
            while (folder / "phase").read_text() != phase:
                assert alive(), f"it ended before phase {phase!r}"
                assert time.monotonic() < deadline, f"it never came to phase {phase!r}"
                time.sleep(0.001)
            time.sleep(chance.random() * PHASES[phase])
            phases[(folder / "phase").read_text()] += 1

        codes = leg([str(folder), str(workers), "100000", "1"], wait_for_moment)
        assert set(codes) == {75}, f"{workers=} {turn=} {phase=}: {codes}"
        saved = dt.latest_checkpoint(folder / "ckpt")
        assert saved is not None
        assert saved.name == f"step-{logged(folder)[-1][0]:08d}", f"{workers=} {turn=} {phase=}"
    print(f"{workers=}: stopped in {dict(phases)}")
    return phases


def check_against_an_undisturbed_run(folder: Path, chains: Iterable[Path]) -> None:
    """Every step was done once, with the losses of an uninterrupted run."""
    goal = max(logged(chain)[-1][0] for chain in chains)
    (folder / "straight").mkdir()
    (folder / "straight" / "phase").write_text("start")
    arguments = [str(folder / "straight"), "0", str(goal), "0"]
    assert endings(partial(run_loop, arguments=arguments), 2, folder)[0] == [0, 0]
    expected = logged(folder / "straight")
    assert [step for step, _ in expected] == list(range(1, goal + 1))
    for chain in chains:
        assert logged(chain) == expected[: len(logged(chain))]


@pytest.mark.costly
def test_ranks_preempted_at_random_steps_save_and_resume_exactly(warm, tmp_path):
    seed = random.randrange(2**32)
    print(f"{seed=}")
    chains = {workers: tmp_path / f"workers-{workers}" for workers in (0, 2)}
    for workers, folder in chains.items():
        times = MOMENTS // 2 - LAUNCHES // 2
        assert stop_again_and_again(by_forks(tmp_path), folder, workers=workers, seed=seed, times=times).total() == times
    check_against_an_undisturbed_run(tmp_path, chains.values())


def test_launch_preempted_at_random_times_saves_and_resumes_exactly(start, warm, tmp_path):
    seed = random.randrange(2**32)
    print(f"{seed=}")
    chains = {workers: tmp_path / f"workers-{workers}" for workers in (0, 2)}
    with ThreadPoolExecutor(len(chains)) as pool:
        running = [
            pool.submit(
                stop_again_and_again, by_launcher(start, workers), folder, workers=workers, seed=seed, times=LAUNCHES // 2
            )
            for workers, folder in chains.items()
        ]
        assert sum(chain.result().total() for chain in running) == LAUNCHES
    check_against_an_undisturbed_run(tmp_path, chains.values())


ENDS = {
    "never asks": "pass",
    "asks, and does not save": "stop = dt.should_stop(state)",
}
LEAVING = """
    import os, time, torch, dtrain as dt
    from torch import nn

    def loss_fn(model, batch):
        return dt.LossSum(total=model(batch).square().sum(), weight=len(batch))

    with dt.init_dist() as dist:
        model = dt.shard_model(nn.Linear(3, 1), dt.build_mesh(), blocks=(nn.Linear,))
        step = dt.compose_step(loss_fn)
        state, stop = step.init(model, torch.optim.SGD(model.parameters(), lr=0.01)), False
        while not stop:
            state, _ = step(state, torch.ones(2, 3))
            ASK
            if state.step == 1:
                with open(str(dist.rank), "w") as file:
                    file.write("in the loop")
            time.sleep(0.01)
"""


@pytest.mark.costly
@pytest.mark.parametrize("ask", ENDS.values(), ids=ENDS)
def test_launcher_exits_143_when_ranks_did_not_save(start, ask):
    job = start(LEAVING.replace("ASK", ask), options=["--grace", "60"])
    job.wait_for("0", "1")
    job.process.send_signal(signal.SIGTERM)
    assert job.wait().code == 143


def test_preempted_ranks_end_immediately_after_failure_of_another_rank(run):
    source = """
    import os, time, torch, dtrain as dt
    with dt.init_dist() as dist:
        model = torch.nn.Linear(1, 1)
        model = dt.shard_model(model, dt.build_mesh(), strategy="replicate")
        loss = lambda model, batch: dt.LossSum(total=model(batch).sum(), weight=torch.tensor(2.0))
        step = dt.compose_step(loss, [])
        state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1))
        state, _ = step(state, torch.ones(2, 1))
        if dist.rank == 1:
            raise ValueError("boo")
        time.sleep(600)
    """
    result = run(source, options=["--grace", "80"])
    assert result.code == 1
    assert "ValueError: boo" in result.summary[-1]


HANGS_AT_EXIT = """
    import atexit, os, signal, sys, time
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))  # as of a loop that has saved
    atexit.register(time.sleep, 600)
    with open(os.environ["RANK"], "w") as file:
        file.write(str(os.getpid()))
    time.sleep(600)
"""


@pytest.mark.parametrize("asked", ["ranks", "launcher"])
def test_saved_ranks_hanging_in_exit_handlers_are_ended_as_saved(start, asked):
    job = start(HANGS_AT_EXIT, options=["--grace", "1"])
    ranks = [int(pid) for pid in job.wait_for("0", "1")]
    for pid in ranks if asked == "ranks" else [job.pid]:
        os.kill(pid, signal.SIGTERM)
    result = job.wait()
    assert (result.code, result.summary) == (75, [])
