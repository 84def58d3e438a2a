"""inject_fault: each action at each named point, on the rank it is meant for; never silently nowhere; undone afterwards."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dtrain import storage
from dtrain.checkpoint.save import save_sharded
from dtrain.dist.collectives import all_gather_json
from dtrain.dist.init import get_dist_info
from dtrain.dist.mesh import build_mesh
from dtrain.errors import ConfigError, RankError
from dtrain.shard.fsdp import shard_model
from dtrain.state import init_state
from dtrain.step.microbatch_step import microbatch_step
from dtrain.step.optimizer import optimizer_step
from dtrain.testing import inject_fault, run_ranks
from dtrain.testing.fault_injection import FAULT_POINTS, find_function
from dtrain.typing import LossSum

NAMES = [*FAULT_POINTS, "optimizer"]


class Loads:
    """A class whose methods are of every kind."""

    factor = 2

    def plain(self, x: int) -> int:
        return x * self.factor

    @classmethod
    def of_class(cls, x: int) -> int:
        return x * cls.factor

    @staticmethod
    def static(x: int) -> int:
        return x * 2


class Child(Loads):
    factor = 3


def double(x: int) -> int:
    return x * 2


HERE = __name__


def step_and_save(root: str) -> None:
    """Run one training step and one save, which pass every named point."""
    torch.manual_seed(0)
    net = shard_model(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), build_mesh(), blocks=(nn.Linear,))
    replica = shard_model(nn.Linear(4, 4), build_mesh(), strategy="replicate")

    def loss_fn(model: nn.Module, batch: torch.Tensor) -> LossSum:
        return LossSum(total=model(batch).sum(), weight=len(batch))

    for model in (replica, net):
        state = init_state(model, torch.optim.SGD(model.parameters(), lr=0.1))
        state, metrics = microbatch_step(state, torch.ones(2, 4), loss_fn=loss_fn)
    state, metrics = optimizer_step(state, metrics)
    save_sharded(root, state)


def delays(root: str, when: str) -> dict[str, int]:
    """A delay of nothing at every call of every point on rank 0: how often it fired."""
    fired = {}
    for name in NAMES:
        with inject_fault("delay", at=name, rank=0, call=None, when=when, seconds=0.0) as point:
            step_and_save(f"{root}/{when}-{name}")
        assert point.fired == point.calls
        fired[name] = point.fired
    return fired


@pytest.mark.parametrize("when", ["before", "after"])
def test_step_and_save_reach_every_fault_point(ranks, tmp_path, when):
    here, other = ranks(2).run(delays, str(tmp_path), when)
    assert {name: count > 0 for name, count in here.items()} == dict.fromkeys(NAMES, True)
    assert (here["gather"], here["reduce"], here["backward"], here["optimizer"]) == (4, 2, 2, 1)
    assert here["reduce_bucket"] == 1
    assert other == dict.fromkeys(NAMES, 0)


def raise_at(name: str, root: str) -> None:
    with inject_fault("raise", at=name, rank=1, error=RuntimeError("broken on purpose")):
        step_and_save(root)


@pytest.mark.parametrize("name", ["gather", "reduce", "step_sync", "optimizer"])
def test_injected_error_is_raised_on_the_selected_rank(name, tmp_path):
    with pytest.raises(RankError, match=r"(?s)rank 1 of 2 raised\n.*RuntimeError: broken on purpose"):
        run_ranks(raise_at, 2, name, str(tmp_path))


def kill_at_second_sync(root: str) -> None:
    with inject_fault("kill", at="dtrain.storage.local.os.fsync", rank=1, call=2):
        storage.write_file(Path(root, f"{get_dist_info().rank}-a"), b"1")
        storage.write_file(Path(root, f"{get_dist_info().rank}-b"), b"2")
        storage.write_file(Path(root, f"{get_dist_info().rank}-c"), b"3")
        dist.barrier()


def test_kill_happens_at_the_selected_call(tmp_path):
    with pytest.raises(RankError, match="rank 1 of 2 died with exit code -9"):
        run_ranks(kill_at_second_sync, 2, str(tmp_path))
    assert sorted(path.name for path in tmp_path.glob("1-*")) == ["1-a", "1-b"]


def stop_and_go_on(folder: str) -> str:
    """A stopped process continues with the call when another process sends SIGCONT; here a sibling does."""
    if get_dist_info().rank == 0:
        with inject_fault("stop", at="dtrain.dist.collectives.get_dist_info"):
            Path(folder, "pid").write_text(str(os.getpid()))
            all_gather_json(None)
    else:
        while not (Path(folder, "pid").exists() and (pid := Path(folder, "pid").read_text())):
            time.sleep(0.01)
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.01)
        os.kill(int(pid), signal.SIGCONT)
        all_gather_json(None)
    return "went on"


def test_stop_action_suspends_the_process_until_continued(ranks, tmp_path):
    assert ranks(2).run(stop_and_go_on, str(tmp_path)) == ["went on"] * 2


def test_default_error_is_oserror_with_the_file_name(tmp_path):
    with pytest.raises(OSError, match="injected fault at write, call 1") as caught, inject_fault("raise", at="write"):
        storage.write_file(tmp_path / "a", b"1")
    assert caught.value.filename == str(tmp_path / "a")


def test_fault_affects_only_the_module_on_the_path(tmp_path):
    with inject_fault("raise", at="dtrain.storage.local.os.mkdir", call=2) as point:
        storage.make_folder(tmp_path / "a")
        os.mkdir(tmp_path / "b")
        with pytest.raises(OSError, match="call 2"):
            storage.make_folder(tmp_path / "c")
        storage.make_folder(tmp_path / "d")
    assert (point.calls, point.fired) == (3, 1)
    assert sorted(os.listdir(tmp_path)) == ["a", "b", "d"]
    assert storage.local.os is os


def test_when_after_raises_after_the_call(tmp_path):
    with pytest.raises(OSError, match="injected"), inject_fault("raise", at="dtrain.storage.local.os.mkdir", when="after"):
        storage.make_folder(tmp_path / "a")
    assert os.listdir(tmp_path) == ["a"]


def test_delay_action_sleeps_then_calls_the_function(monkeypatch):
    slept = []
    monkeypatch.setattr("dtrain.testing.fault_injection.time.sleep", slept.append)
    with inject_fault("delay", at=f"{HERE}.double", seconds=3.5):
        assert find_function(f"{HERE}.double")(4) == 8
    assert slept == [3.5]


@pytest.mark.parametrize(
    ("path", "call", "result"),
    [
        ("double", lambda: find_function(f"{HERE}.double")(2), 4),
        ("Loads.plain", lambda: Loads().plain(2), 4),
        ("Loads.plain", lambda: Child().plain(2), 6),
        ("Child.plain", lambda: Child().plain(2), 6),
        ("Loads.of_class", lambda: Child.of_class(2), 6),
        ("Loads.static", lambda: Loads.static(2), 4),
        ("Loads.static", lambda: Loads().static(2), 4),
    ],
)
def test_functions_and_methods_are_wrapped_and_restored(path, call, result):
    before = [dict(vars(Loads)), dict(vars(Child)), double]
    with inject_fault("raise", at=f"{HERE}.{path}", call=2, error=KeyError("on purpose")):
        assert call() == result
        with pytest.raises(KeyError, match="on purpose"):
            call()
        assert call() == result
    assert [dict(vars(Loads)), dict(vars(Child)), double] == before


def test_inherited_method_is_wrapped_only_on_the_named_class():
    with pytest.raises(ConfigError, match="never fired"), inject_fault("raise", at=f"{HERE}.Child.plain"):
        assert Loads().plain(2) == 4


def test_patches_are_removed_after_an_error_in_the_body():
    kept = (nn.Module.__call__, torch.Tensor.backward, storage.local.os)
    with (
        pytest.raises(KeyError, match="mine"),
        inject_fault("raise", at="forward"),
        inject_fault("raise", at="backward"),
        inject_fault("raise", at="write"),
        inject_fault("raise", at="fsync"),
        inject_fault("raise", at="optimizer"),
    ):
        raise KeyError("mine")
    assert (nn.Module.__call__, torch.Tensor.backward, storage.local.os) == kept
    param = nn.Parameter(torch.ones(1))
    param.grad = torch.ones(1)
    torch.optim.SGD([param], lr=1.0).step()
    assert param.item() == 0.0


def test_a_fault_that_never_fired_is_an_error():
    message = r"inject_fault: .*double was called 1 times on rank 0, so call=2 never fired. .*from x import f"
    with pytest.raises(ConfigError, match=message), inject_fault("raise", at=f"{HERE}.double", call=2):
        find_function(f"{HERE}.double")(2)


def test_calls_from_several_threads_are_each_counted_once():
    with inject_fault("raise", at=f"{HERE}.double", call=400) as point:
        threads = [threading.Thread(target=lambda: [find_function(f"{HERE}.double")(1) for _ in range(99)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert point.calls == 396
        find_function(f"{HERE}.double")(1)
        point.calls = 399
        with pytest.raises(OSError, match="call 400"):
            find_function(f"{HERE}.double")(1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"at": "nope.f"}, "inject_fault: there is nothing at 'nope.f': no module begins the path"),
        ({"at": "gathr"}, "inject_fault: there is nothing at 'gathr': no module begins the path. Pass a short name"),
        ({"at": "dtrain.storage.local.os.nope"}, r"'dtrain.storage.local.os.nope': os has no 'nope'\. .*from x import f"),
        ({"at": "dtrain.nope.f"}, "'dtrain.nope.f': dtrain has no 'nope'"),
        (
            {"at": "dtrain.storage.local.os"},
            "inject_fault: 'dtrain.storage.local.os' must be a function, got module. Only calls can fail",
        ),
        ({"at": "builtins.int.bit_length"}, "inject_fault: 'builtins.int.bit_length' belongs to int, which is built in"),
        ({"at": ".f"}, r"inject_fault: at must be a short name or an import path such as 'my_loop.load_batch', got '\.f'"),
        ({"at": "torch..f"}, r"inject_fault: at must be a short name or an import path .*, got 'torch\.\.f'"),
        ({"at": 3}, "inject_fault: at must be a short name or an import path .*, got 3"),
        ({"at": "torch.nn.Linear"}, r"'torch.nn.Linear' is a class .* Use 'torch.nn.Linear.__init__'"),
        ({"action": "explode"}, "inject_fault: action must be 'raise', 'kill', 'stop' or 'delay', got 'explode'"),
        ({"when": "during"}, "inject_fault: when must be 'before' or 'after', got 'during'"),
        ({"rank": 1}, "inject_fault: rank must be an integer from 0 to 0, got 1"),
        ({"rank": "0"}, "inject_fault: rank must be an integer from 0 to 0, got '0'"),
        ({"call": 0}, "inject_fault: call must be an integer of at least 1, got 0. Or pass call=None"),
        ({"call": 1.5}, r"inject_fault: call must be an integer of at least 1, got 1\.5"),
        ({"error": "disk full"}, "inject_fault: error must be an exception, got 'disk full'. Write error=OSError"),
        ({"action": "delay", "error": OSError()}, "inject_fault: error needs action='raise', got action='delay'"),
        ({"seconds": -1.0}, "inject_fault: seconds must be a finite number at least 0, got -1.0"),
        ({"seconds": float("inf")}, "inject_fault: seconds must be a finite number at least 0, got inf. Or use 'stop'"),
    ],
)
def test_invalid_arguments_are_refused_in_one_line(arguments, message):
    with pytest.raises(ConfigError, match=message) as caught, inject_fault(**{"action": "raise", "at": "write", **arguments}):
        pass
    assert "\n" not in str(caught.value)


def test_import_error_inside_the_target_module_is_raised(tmp_path, monkeypatch):
    (tmp_path / "dtrain_test_broken.py").write_text("import not_there_at_all\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="not_there_at_all"), inject_fault("raise", at="dtrain_test_broken.f"):
        pass
