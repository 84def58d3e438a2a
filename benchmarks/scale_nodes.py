"""Measure the store of the nodes: the agent of node 0 as a process of its own, and all other nodes as sessions in threads.

    python benchmarks/scale_nodes.py                 # 2, 64 and 512 nodes
    python benchmarks/scale_nodes.py --nodes 512 --seconds 30

The sessions run the library's own code in four processes, and make the requests of real nodes: a poll five times and a
heartbeat once per second. The columns: processor time of node 0's agent until it serves, which is the import of torch; seconds
in which all nodes join, and processor time of the agent for them; processor time for each second in which nothing happens;
seconds until all nodes know all exit codes; memory of the agent.
"""

import argparse
import contextlib
import json
import os
import queue
import resource
import select
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TypeAlias

from dtrain.launch.agent import Agent, start_agent
from dtrain.launch.agent_main import NodeSession, SessionEnded, make_hello
from dtrain.launch.launch_plan import NodeRendezvous
from dtrain.launch.local_ranks import reserve_port
from dtrain.launch.node_messages import JobFinished, JoinAccepted, Message, NodeStore, RanksExited

DRIVERS = 4
RANKS = 8
TIMEOUT_S = 900.0

Events: TypeAlias = "queue.SimpleQueue[tuple[int, Message | SessionEnded]]"


def run_sessions(port: int, nodes: int, ranks: range) -> None:
    """Run the sessions of some nodes: join, exit, leave. Each step waits for a line on stdin, and writes one to stdout."""
    from torch.distributed import TCPStore

    print("ready", flush=True)
    sys.stdin.readline()
    events: Events = queue.SimpleQueue()
    sessions: dict[int, NodeSession] = {}

    def start(rank: int) -> None:
        config = NodeRendezvous(node_rank=rank, nodes=nodes, nproc=RANKS, addr="127.0.0.1", port=port, timeout_s=TIMEOUT_S)
        store = NodeStore(TCPStore)
        sessions[rank] = NodeSession(
            config, make_hello(config), store, serves=False, notify=lambda _, event: events.put((rank, event))
        )
        sessions[rank].start()

    for rank in ranks:
        start(rank)
    missing = len(ranks)
    while missing:
        rank, event = events.get(timeout=TIMEOUT_S)
        missing -= isinstance(event, JoinAccepted)
        if isinstance(event, SessionEnded):
            # A real agent tries again as well.
            start(rank)
    print("joined", flush=True)
    sys.stdin.readline()
    for rank, session in sessions.items():
        session.send(RanksExited(exit_codes=dict.fromkeys(range(rank * RANKS, (rank + 1) * RANKS), 0)))
    wait_for(events, JobFinished, len(sessions))
    print("finished", flush=True)
    for session in sessions.values():
        session.leave()
    wait_for(events, SessionEnded, len(sessions))


def wait_for(events: Events, kind: type, count: int) -> None:
    while count:
        _, event = events.get(timeout=TIMEOUT_S)
        assert isinstance(event, kind) or not isinstance(event, SessionEnded), event
        count -= isinstance(event, kind)


def read_agent(agent: Agent, kind: type) -> None:
    """Wait for a message of node 0's agent."""
    while True:
        assert select.select([agent], [], [], TIMEOUT_S)[0]
        messages = agent.read()
        assert not agent.has_exited, messages
        if any(isinstance(message, kind) for message in messages):
            return


def processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_mib(pid: int) -> dict[str, int]:
    rows = (row.split() for row in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {row[0].rstrip(":"): int(row[1]) // 1024 for row in rows if row and row[0] in ("VmRSS:", "RssAnon:")}


def expect(drivers: list[subprocess.Popen[str]], line: str) -> None:
    for driver in drivers:
        assert driver.stdout is not None
        assert driver.stdout.readline() == f"{line}\n"


def tell(drivers: list[subprocess.Popen[str]]) -> None:
    for driver in drivers:
        assert driver.stdin is not None
        driver.stdin.write("\n")
        driver.stdin.flush()


def measure(nodes: int, seconds: float) -> None:
    with reserve_port() as held:
        port = held.getsockname()[1]
    agent = start_agent(
        NodeRendezvous(node_rank=0, nodes=nodes, nproc=RANKS, addr="127.0.0.1", port=port, timeout_s=TIMEOUT_S, run_name="x")
    )
    begun = time.monotonic()
    while True:
        with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
            break
        assert time.monotonic() < begun + TIMEOUT_S
        time.sleep(0.1)
    others = range(1, nodes)
    drivers = []
    for number in range(min(DRIVERS, len(others))):
        given = json.dumps({"port": port, "nodes": nodes, "ranks": list(others[number::DRIVERS])})
        drivers.append(
            subprocess.Popen(
                [sys.executable, __file__, "--driver", given],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        )
    expect(drivers, "ready")
    begun, imported_cpu = time.monotonic(), processor_s(agent.pid)
    tell(drivers)
    read_agent(agent, JoinAccepted)
    expect(drivers, "joined")
    joined_s, joined_cpu = time.monotonic() - begun, processor_s(agent.pid)
    time.sleep(seconds)
    idle_cpu = (processor_s(agent.pid) - joined_cpu) / seconds
    memory = memory_mib(agent.pid)
    begun = time.monotonic()
    agent.send(RanksExited(exit_codes=dict.fromkeys(range(RANKS), 0)))
    tell(drivers)
    read_agent(agent, JobFinished)
    expect(drivers, "finished")
    finished_s = time.monotonic() - begun
    agent.close()
    for driver in drivers:
        driver.wait(timeout=TIMEOUT_S)
    os.waitpid(agent.pid, 0)
    print(
        f"  {nodes:5d}  {imported_cpu:6.2f} s  {joined_s:6.1f} s  {joined_cpu - imported_cpu:9.2f} s  "
        f"{idle_cpu * 1e3:10.1f} ms/s  {finished_s:9.2f} s  {memory['VmRSS']:5d} MiB, {memory['RssAnon']} of its own",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 64, 512])
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--driver", help=argparse.SUPPRESS)
    args = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if args.driver:
        given = json.loads(args.driver)
        run_sessions(given["port"], given["nodes"], given["ranks"])
        return
    print("  nodes    import  joined in  processor  in a second  exits known  memory of the agent")
    for nodes in args.nodes:
        measure(nodes, args.seconds)


if __name__ == "__main__":
    main()
