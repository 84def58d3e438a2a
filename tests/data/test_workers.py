"""Loader processes: an error in a worker is one line; workers leave signals to their rank, and die with it."""

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import dtrain as dt
import samples
from dtrain.data.workers import workers_for_rank
from dtrain.dist.rng import seed_all
from samples import Drawing, Numbers, Reporting, Troubled, die, die_when, die_with_lock, fail, hang, leave, lock


def build(dataset, **options) -> dt.data.Loader:
    return dt.build_loader(dataset, **{"global_batch_size": 4, "seed": 0, "shuffle": False, "num_workers": 2, **options})


def workers_here() -> list[multiprocessing.Process]:
    """Processes of loaders; those of ``run_ranks`` may be there too."""
    return [child for child in multiprocessing.active_children() if child.daemon and child.name.startswith("Process-")]


def first_sample(samples):
    return samples[0]


@pytest.mark.parametrize(
    ("trouble", "options", "message"),
    [
        (fail, {"num_workers": 0}, r"loader: sample 9: ValueError: cannot be decoded: no such codec"),
        (fail, {}, r"loader: sample 9: ValueError: cannot be decoded: no such codec"),
        (lock, {"collate": first_sample}, r"loader: batch\['meta'\]\[1\] cannot be pickled \(TypeError: .*; return it as data"),
        (die, {}, r"loader: worker process \d+ was killed by SIGKILL\. Check the memory"),
        (die_with_lock, {}, r"loader: worker process \d+ was killed by SIGKILL\. Check the memory"),
        (leave, {}, r"loader: worker process \d+ ended with exit code 3"),
        (hang, {"timeout_s": 1.5}, r"loader: no batch from 2 workers in 1.5 s, because a sample hangs or is slow"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_worker_failure_raises_a_one_line_error(trouble, options, message):
    failing = 8 if trouble is lock else 9  # collate of that case looks at the first sample of a batch
    loader = build(Troubled(32, failing, trouble), **options)
    with pytest.raises(dt.errors.DataError, match=message) as caught:
        list(loader.until("1ep"))
    assert "\n" not in str(caught.value)
    assert loader.position.samples <= 8, "what comes after it was not handed out"
    assert not workers_here()


class Wide(torch.utils.data.Dataset):
    """Samples whose batches are too large for a pipe, so workers send them through shared memory."""

    def __init__(self, kind) -> None:
        self.kind = kind

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index):
        return self.kind(torch.full((2**16,), float(index)))


class WideStream(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield from (torch.full((2**16,), float(number)) for number in range(8))


def as_mapping(sample):
    return {"x": sample, "name": "a"}


def add_all(samples):
    return [sum(samples)]


@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        (Wide(torch.clone), {}),
        (Wide(as_mapping), {}),
        (Wide(torch.clone), {"collate": add_all}),
        (torch.zeros(8, 2**16), {}),
        (WideStream(), {}),
    ],
    ids=["tensors", "mappings", "own collate", "columns", "iterable"],
)
@pytest.mark.parametrize(
    ("reason", "message"),
    [
        (
            "No space left on device (28)",
            r"shared memory is too small: /dev/shm has \d+ MiB, \d+ MiB free.*prefetch_factor.*--shm-size",
        ),
        ("Too many open files (24)", r"a tensor cannot be put into shared memory .*Too many open files.*ulimit -n"),
    ],
    ids=["full", "open files"],
)
def test_full_shared_memory_is_not_blamed_on_the_batch(monkeypatch, dataset, options, reason, message):
    def fail(*_, **__):
        raise RuntimeError(f"unable to allocate shared memory(shm) for file </torch_1_2_0>: {reason}")

    for name in ("_new_using_fd_cpu", "_share_fd_cpu_"):
        monkeypatch.setattr(torch.UntypedStorage, name, fail)
    with pytest.raises(dt.errors.DataError, match=rf"^loader: {message}") as caught:
        list(build(dataset, num_workers=1, start_method="fork", **options).until("1ep"))
    told = " ".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
    assert "collate=" not in told
    assert "pickled" not in told
    assert "\n" not in told


def test_full_shared_memory_is_not_blamed_on_a_dataset_that_is_sent_to_workers(monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("unable to allocate shared memory(shm) for file </torch_1_2_0>: No space left on device (28)")

    monkeypatch.setattr(torch.UntypedStorage, "_share_fd_cpu_", fail)
    with pytest.raises(dt.errors.ConfigError, match=r"^loader: shared memory is too small: .*--shm-size"):
        list(build(torch.zeros(8, 2**16), num_workers=1, start_method="spawn").until("1ep"))


def test_sample_traceback_is_attached_as_an_exception_note():
    with pytest.raises(dt.errors.DataError) as caught:
        list(build(Troubled(32, 9, fail)).until("1ep"))
    assert any("in fail" in note for note in caught.value.__notes__)


def test_worker_death_is_not_raised_inside_the_loop_body(tmp_path):
    now = tmp_path / "now"
    loader = build(Troubled(32, 9, partial(die_when, now)), prefetch_factor=1)
    stream, ends = loader.until("1ep"), time.monotonic() + 90
    next(stream)
    children = workers_here()
    now.touch()
    while all(child.exitcode is None for child in children) and time.monotonic() < ends:
        time.sleep(0.01)  # the body of the loop: nothing is raised here
    with pytest.raises(dt.errors.DataError, match="was killed by SIGKILL"):
        list(stream)


def test_users_handler_of_sigchld_runs_and_is_kept():
    calls = []

    def handler(number, frame):
        calls.append(number)

    before = signal.signal(signal.SIGCHLD, handler)
    try:
        for _ in build(Numbers(8)).until("1ep"):
            calls.clear()
            subprocess.run([sys.executable, "-c", ""], check=True)
            assert calls
        assert signal.getsignal(signal.SIGCHLD) is handler
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_workers_ignore_signals_handled_by_the_rank(tmp_path):
    list(build(Reporting(16, tmp_path)).until("1ep"))
    reports = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert len(reports) == 2
    assert set(reports.values()) == {"SIGINT SIGTERM"}
    assert str(os.getpid()) not in reports


@pytest.mark.costly
def test_workers_exit_when_their_rank_dies(tmp_path):
    program = f"""
        import sys, time
        from pathlib import Path
        sys.path.insert(0, {str(Path(samples.__file__).parent)!r})
        import dtrain as dt
        from samples import Reporting
        loader = dt.build_loader(Reporting(10**6, Path({str(tmp_path)!r})), global_batch_size=1, seed=0, num_workers=2)
        for batch in loader.until("1ep"):
            print("first", flush=True)
            time.sleep(600)
    """
    environment = {**os.environ, "TMPDIR": str(tmp_path.parent)}  # files of a killed rank go with the test's folder
    rank = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert rank.stdout.readline() == "first\n"
    rank.kill()
    rank.wait(90)
    rank.stdout.close()
    workers, ends = [int(path.name) for path in tmp_path.iterdir()], time.monotonic() + 90
    while any(os.path.exists(f"/proc/{pid}") for pid in workers) and time.monotonic() < ends:
        time.sleep(0.05)
    assert workers
    assert not [pid for pid in workers if os.path.exists(f"/proc/{pid}")]


@pytest.mark.costly
def test_program_with_an_open_loop_exits_at_once(tmp_path):
    program = f"""
        import sys
        sys.path.insert(0, {str(Path(samples.__file__).parent)!r})
        import dtrain as dt
        from samples import Troubled, hang
        loader = dt.build_loader(Troubled(64, 5, hang), global_batch_size=4, seed=0, shuffle=False, num_workers=2)
        stream = loader.until("1ep")
        next(stream)
        print("done")
    """
    command, environment = [sys.executable, "-c", textwrap.dedent(program)], {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


def test_busy_worker_is_terminated_at_loop_end():
    loader = build(Troubled(32, 4, hang), prefetch_factor=1)
    stream = loader.until("1ep")
    next(stream)
    stream.close()
    assert not workers_here()


def test_random_numbers_depend_on_the_position_only():
    def drawn(workers):
        loader = build(Drawing(24), num_workers=workers, shuffle=True)
        return torch.cat(list(loader.until("2ep")))

    assert drawn(0).equal(drawn(1))
    assert drawn(0).equal(drawn(3))
    assert len(drawn(0)[:, 1].unique()) == 48, "each sample has random numbers of its own"


def test_resume_reproduces_the_random_numbers_of_an_uninterrupted_run():
    whole = list(build(Drawing(24), num_workers=0).until("2ep"))
    first, second = build(Drawing(24), num_workers=0), build(Drawing(24), num_workers=2)
    head = list(first.until(4))
    second.load_state_dict(first.state_dict())
    assert torch.cat(head + list(second.until("2ep"))).equal(torch.cat(whole))


def test_spawned_workers_error_names_an_unpicklable_dataset_attribute():
    dataset = Numbers(8)
    dataset.files = {"index": [threading.Lock()]}
    with pytest.raises(
        dt.errors.ConfigError, match=r"loader: dataset\.files\['index'\]\[0\] cannot be sent to a worker \(TypeError"
    ):
        list(build(dataset, start_method="spawn", num_workers=1).until("1ep"))


@pytest.mark.costly
def test_spawned_workers_give_the_same_batches():
    assert torch.cat(list(build(Numbers(8), start_method="spawn", num_workers=1).until("1ep"))).tolist() == list(range(8))


@pytest.mark.parametrize(
    ("total", "ranks", "shares"), [(8, 2, [4, 4]), (8, 3, [3, 3, 2]), (2, 4, [1, 1, 1, 1]), (0, 4, [0, 0, 0, 0]), (1, 1, [1])]
)
def test_node_workers_are_divided_over_its_ranks(total, ranks, shares):
    assert [workers_for_rank(total, rank, ranks) for rank in range(ranks)] == shares


def workers_of_each_rank() -> int:
    loader = dt.build_loader(Numbers(8), mesh=dt.build_mesh(), global_batch_size=4, seed=0, num_workers=3)
    return loader._source.options.workers.count


def test_worker_division_uses_the_rank_count_of_the_node(ranks):
    assert ranks(2).run(workers_of_each_rank) == [2, 1]


class DrawingLate(Drawing):
    """Draws from the 400th sample on, one number of each pair that ``gauss`` and ``randn`` make."""

    def __getitem__(self, index):
        drawn = [random.gauss(0, 1), np.random.randn(), torch.randn(()).item()] if index >= 400 else [0.0] * 3
        return torch.tensor([index, *drawn], dtype=torch.float64)


def test_dataset_that_draws_late_draws_the_same_numbers_without_a_change_of_the_loop():
    def drawn(disturb, **options):
        batches = []
        for batch in build(DrawingLate(420), **{"num_workers": 0, **options}).until("1ep"):
            batches.append(batch)
            disturb()
        return torch.cat(batches)

    def draw():
        return random.gauss(0, 1), np.random.randn(), torch.randn(()).item()

    expected = drawn(lambda: None)
    assert expected[:400, 1:].eq(0).all()
    assert len(expected[400:, 1].unique()) == len(expected[400:, 2].unique()) == 20
    assert drawn(draw).equal(expected)
    assert drawn(lambda: None, num_workers=2).equal(expected)
    seed_all(1)
    alone = [draw() for _ in range(105)]
    seed_all(1)
    beside = []
    drawn(lambda: beside.append(draw()))
    assert beside == alone


@pytest.mark.parametrize("options", ["", ", num_workers=1"])
def test_script_may_end_within_a_loop(options):
    program = f"""
        import torch, dtrain as dt
        loader = dt.build_loader(torch.arange(9.), global_batch_size=4, seed=0{options})
        batches = iter(loader)
        print(len(next(batches)))
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "4\n", "")
