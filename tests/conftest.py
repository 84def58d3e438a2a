"""Fixtures for all tests: real ranks, started once per world size and kept for the session."""

import multiprocessing.forkserver
import multiprocessing.util
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: ranks share two cores, and the fork server needs one thread
# Before gcsfs is imported: it looks for Google's network for a minute, in a thread that draws from the global generator of
# ``random``. No emulator has what it looks for.
os.environ |= {"GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false", "NO_GCE_CHECK": "true"}
import hypothesis
import pytest
import torch

import leftovers
import on_device
import sampling
from dtrain.launch.local_ranks import PRELOADED, reserve_port
from dtrain.testing import Ranks

torch.set_num_threads(1)

LEFT_BEHIND = 9  # the exit code of a run that leaves processes or files behind
BEFORE = pytest.StashKey[leftovers.Before]()
LEFT = pytest.StashKey[bool]()

# A shell starts jobs in the background deaf to Ctrl-C, and nohup to a lost terminal, with all that they start: tests send both.
USUAL = ((signal.SIGINT, signal.default_int_handler), (signal.SIGQUIT, signal.SIG_DFL), (signal.SIGHUP, signal.SIG_DFL))
for number, usual in USUAL:
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, usual)


hypothesis.settings.register_profile("every change", derandomize=True)  # a newly found fault is not the change's


def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("--slow"):
        hypothesis.settings.load_profile("every change")
    config.stash[BEFORE] = leftovers.look()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the run when it leaves processes or files behind; no test sees that. Workers of pytest-xdist end before."""
    multiprocessing.util._run_finalizers()  # its temporary folder would be there until this process ends
    is_worker = hasattr(session.config, "workeroutput")
    left = leftovers.left_since(session.config.stash[BEFORE], shared_memory=not is_worker)
    if is_worker:
        # A worker of pytest-xdist: the process that started it reports.
        session.config.workeroutput["left"] = left
    else:
        report_left_behind(session.config, left)
    if session.config.stash.get(LEFT, False):
        session.exitstatus = LEFT_BEHIND
    leftovers.end(session.config.stash[BEFORE])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Report processes and files that a worker of pytest-xdist left behind."""
    report_left_behind(node.config, getattr(node, "workeroutput", {}).get("left", ()))


def report_left_behind(config: pytest.Config, left: Iterable[str]) -> None:
    for line in left:
        config.stash[LEFT] = True
        config.get_terminal_writer().line(f"\nLEFT BEHIND: {line}", red=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests that take too long for every change, too")
    parser.addoption("--sample", action="store_true", help="run a few rows of costly families, by turn (tests/sampling.py)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    on_device.skip_tests_of_the_host(items)
    if not config.getoption("--slow"):
        for item in items:
            if item.get_closest_marker("slow") is not None:  # a folder of this name is a keyword of every test in it
                item.add_marker(pytest.mark.skip(reason="needs --slow"))
    if config.getoption("--sample"):
        sampling.deselect(config, items, sampling.read_turn())
    # A run in one process keeps the order of the files.
    if hasattr(config, "workerinput"):
        places = sampling.spread(items)
        items.sort(key=lambda item: places[str(item.path)])


# Files of tests make tensors when they are imported, too.
if on_device.DEVICE:
    on_device.use_device(on_device.DEVICE)


@pytest.fixture(scope="module", autouse=True)
def shared_functions() -> Iterator[None]:
    """Fail the file of tests that leaves a function of a library replaced, and restore the function for the next file."""
    before = leftovers.functions_of_libraries()
    yield
    replaced = leftovers.restore_functions(before)
    assert not replaced, f"the tests of this file left replaced: {', '.join(replaced)}"


@pytest.fixture
def port() -> Iterator[int]:
    """Yield a port of loopback without a listener, which the system gives to no other socket as long as the test runs.

    Programs of the test may listen there, if they set ``SO_REUSEADDR``.
    """
    with reserve_port() as held:
        yield held.getsockname()[1]


class PatientRanks(Ranks):
    """Ranks on a machine that may be busy with other tests. A hang would last for the groups' timeout, of 600 s."""

    def run(self, fn: Callable[..., Any], *args: Any, timeout_s: float = 300) -> list[Any]:
        return super().run(fn, *args, timeout_s=timeout_s)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """``ranks(n)``: ``n`` processes with an open process group; ``ranks(n).run(fn, *args)`` runs a test's part on each."""
    multiprocessing.forkserver.set_forkserver_preload([*PRELOADED, "dtrain.testing.ranks"])
    multiprocessing.forkserver.ensure_running()
    pools: dict[int, Ranks] = {}
    yield lambda world_size: pools.setdefault(world_size, PatientRanks(world_size, device=on_device.DEVICE))
    for pool in pools.values():
        pool.close()
