"""Nodes that come and go, on torch's agent: two or three of them on this machine, with real ranks."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from dtrain.launch.elastic.agent_request import ElasticRequest, build_agent_command
from dtrain.launch.launch_plan import Target
from dtrain.launch.topology import ElasticConfig

LONG_S = 300


@dataclass(kw_only=True)
class Nodes:
    folder: Path
    endpoint: str
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self, source: str, *, nodes: tuple[int, int], max_restarts: int = 0) -> subprocess.Popen[str]:
        """A node with one rank, which runs ``source`` in the test's folder."""
        run_dir = self.folder / f"run{len(self.started)}"
        (run_dir / "failures").mkdir(parents=True)
        script = self.folder / "script.py"
        script.write_text(textwrap.dedent(source))
        elastic = ElasticConfig(min_nodes=nodes[0], max_nodes=nodes[1], nproc=1, endpoint=self.endpoint, run_id="test")
        request = ElasticRequest(
            elastic=elastic,
            target=Target(kind="script", name=str(script), args=("a b", "$HOME")),
            run_dir=str(run_dir),
            max_restarts=max_restarts,
            grace_s=5,
            last_call_s=1,
        )
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            build_agent_command(request), stdout=pipe, stderr=pipe, text=True, cwd=self.folder, start_new_session=True
        )
        self.started.append(process)
        return process

    def wait_for(self, done: Callable[[], object]) -> None:
        deadline = time.monotonic() + LONG_S
        while not done():
            assert time.monotonic() < deadline, [path.name for path in self.folder.iterdir()]
            time.sleep(0.05)


@pytest.fixture
def nodes(tmp_path: Path, port: int) -> Iterator[Nodes]:
    started = Nodes(folder=tmp_path, endpoint=f"127.0.0.1:{port}")
    yield started
    for process in started.started:
        for pid in _session(process.pid):
            os.kill(pid, signal.SIGKILL)
        process.communicate(timeout=LONG_S)


def _session(leader: int) -> list[int]:
    """Return the running processes of a program that leads a session, including ranks with sessions of their own."""
    parents = {}
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            parents[int(name)] = int(Path(f"/proc/{name}/stat").read_text().rsplit(")", 1)[1].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
    found = [leader] if leader in parents else []
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found


def test_ranks_of_two_nodes_form_group_with_arguments_and_environment(nodes):
    source = """
    import os, sys
    import torch.distributed as dist
    dist.init_process_group("gloo")
    here = sys.path[0] == os.getcwd()
    line = f"{sys.argv[1:]} {dist.get_world_size()} {os.environ['GLOO_SOCKET_IFNAME']} {here}\\n"
    os.write(1, line.encode())  # at once: torch's agent puts its prefix before every piece that it reads
    """
    both = [nodes.start(source, nodes=(2, 2)) for _ in range(2)]
    ends = [process.communicate(timeout=LONG_S) for process in both]
    assert [process.returncode for process in both] == [0, 0], ends
    assert sorted(out for out, _ in ends) == [f"[rank {rank}] ['a b', '$HOME'] 2 lo True\n" for rank in range(2)]


@pytest.mark.parametrize(
    ("failure", "code", "words"),
    [
        ("raise ValueError('no data')", 1, "failed with exit code 1 (pid "),
        pytest.param("sys.exit(3)", 3, "failed with exit code 3 (pid ", marks=pytest.mark.slow),
        pytest.param("os.kill(os.getpid(), 9)", 137, "was killed by SIGKILL (pid ", marks=pytest.mark.slow),
    ],
    ids=["exception", "exit code", "killed"],
)
def test_launcher_returns_exit_code_of_failed_rank_and_names_it(nodes, failure, code, words):
    process = nodes.start(f"import os, sys\n{failure}\n", nodes=(1, 1))
    _, err = process.communicate(timeout=LONG_S)
    assert process.returncode == code, err
    (line,) = [line for line in err.splitlines() if not line.startswith("[rank 0] ")]
    assert line.startswith(f"dtrain: launch: rank 0 on {socket.gethostname()} {words}")
    assert ("ValueError: no data" in line) is (code == 1)


def test_exit_code_is_75_when_ranks_saved(nodes):
    process = nodes.start("raise SystemExit(75)", nodes=(1, 1))
    _, err = process.communicate(timeout=LONG_S)
    assert (process.returncode, err) == (75, "")


@pytest.mark.slow
def test_job_continues_with_one_node_fewer_after_node_death(nodes):
    source = """
    import os, pathlib, time
    import torch
    import torch.distributed as dist
    dist.init_process_group("gloo")
    step = pathlib.Path("step")
    pathlib.Path(f"world{dist.get_world_size()}-{os.environ['TORCHELASTIC_RESTART_COUNT']}-{os.getppid()}").touch()
    while dist.get_world_size() == 2 or int(step.read_text() or 0) < 1000:
        dist.all_reduce(torch.ones(1))
        if dist.get_rank() == 0:
            step.write_text("1000")
        time.sleep(0.05)
    """
    (nodes.folder / "step").write_text("0")
    first = nodes.start(source, nodes=(1, 2), max_restarts=3)
    nodes.wait_for(lambda: list(nodes.folder.glob("world1-*")) or _listens(nodes.endpoint))
    second = nodes.start(source, nodes=(1, 2), max_restarts=3)
    nodes.wait_for(lambda: len(list(nodes.folder.glob("world2-*"))) == 2 and (nodes.folder / "step").read_text() == "1000")
    for pid in _session(second.pid):
        os.kill(pid, signal.SIGKILL)
    _, err = first.communicate(timeout=LONG_S)
    assert first.returncode == 0, err
    assert list(nodes.folder.glob("world1-*"))


def _listens(endpoint: str) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", int(endpoint.rpartition(":")[2]))) == 0


def test_unresolvable_endpoint_prints_one_line(nodes):
    nodes.endpoint = "no-such-host.invalid:29500"
    process = nodes.start("", nodes=(1, 1))
    _, err = process.communicate(timeout=LONG_S)
    what = "the name 'no-such-host.invalid' does not resolve. Check the address and its node."
    assert (process.returncode, err) == (1, f"dtrain: launch: the rendezvous of nodes at {nodes.endpoint} failed: {what}\n")


def test_sigterm_prints_one_line_and_ends_ranks(nodes):
    process = nodes.start("import pathlib, time; pathlib.Path('up').touch(); time.sleep(1000)", nodes=(1, 1))
    nodes.wait_for((nodes.folder / "up").exists)
    ranks = [pid for pid in _session(process.pid) if pid != process.pid]
    process.terminate()
    _, err = process.communicate(timeout=LONG_S)
    assert (process.returncode, err) == (143, "dtrain: launch: ended by SIGTERM; ranks ended\n")
    assert not [pid for pid in ranks if Path(f"/proc/{pid}").exists()]
