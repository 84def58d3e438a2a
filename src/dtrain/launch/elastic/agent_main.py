"""Run torch's elastic agent of one node: ``python agent_main.py REQUEST``, started by the supervisor. Imports torch.

The exit code is the exit code of the rank that failed first on this node. If a signal killed that rank or ended this program,
the exit code is 128 + signal. The program prints one line about the failure.
"""

from __future__ import annotations

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    # Modules in this file's folder must not shadow modules of the program.
    del sys.path[0]

import contextlib
import json
import logging
import os
import signal
import socket
from dataclasses import fields
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from dtrain import launch_protocol
from dtrain.launch.elastic.agent_request import ElasticRequest
from dtrain.launch.failure import shell_exit_code, signal_name
from dtrain.launch.nodes.addresses import find_interface, resolve_address
from dtrain.machine import core_count

# seconds until all nodes have joined the rendezvous, as in torchrun
_JOIN_TIMEOUT_S = 900
# seconds between keep-alives of a node; torch drops the node after three missing keep-alives
_KEEP_ALIVE_S = 2


def main() -> int:
    """Run the ranks of this node until the job ends, and return the exit code."""
    request = ElasticRequest.parse(sys.argv[1])
    for variable in (launch_protocol.HEARTBEAT_FD, launch_protocol.DUMP_REQUEST_FD):
        # The pipes belong to this program. Ranks do not inherit them.
        os.environ.pop(variable, None)
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            # This program prints one line about a failure itself.
            logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        own = _local_address(request.elastic.endpoint)
        os.environ.update(_environment(request, own))
        elastic_launch(_launch_config(request, own), sys.executable)(*_worker_command(request))
    except ChildFailedError as error:
        return _report_failure(error.failures, Path(request.run_dir))
    except SignalException as error:
        _print_line(f"ended by {signal_name(error.sigval)}; ranks ended")
        return 128 + int(error.sigval)
    except (RendezvousError, OSError, TimeoutError, RuntimeError) as error:
        # torch's own error does not contain the cause.
        cause = error.__cause__ or error
        text = error.strerror if isinstance(error, OSError) and error.strerror else str(cause)
        reason = " ".join(text.split("\n")[0].split()) or type(cause).__name__
        _print_line(f"the rendezvous of nodes at {request.elastic.endpoint} failed: {reason}. Check the address and its node.")
        return 1
    return 0


def _launch_config(request: ElasticRequest, own: str) -> LaunchConfig:
    elastic = request.elastic
    settings: dict[str, Any] = {
        "min_nodes": elastic.min_nodes,
        "max_nodes": elastic.max_nodes,
        "nproc_per_node": elastic.nproc,
        "run_id": elastic.run_id,
        "rdzv_backend": "c10d",
        "rdzv_endpoint": elastic.endpoint,
        "rdzv_configs": {
            "is_host": _should_host_rendezvous(elastic.endpoint),
            "timeout": _JOIN_TIMEOUT_S,
            "last_call_timeout": request.last_call_s,
            "keep_alive_interval": _KEEP_ALIVE_S,
        },
        "max_restarts": request.max_restarts,
        "local_addr": own,
        "logs_specs": DefaultLogsSpecs(log_dir=os.path.join(request.run_dir, "logs"), tee=Std.ALL),
        "log_line_prefix_template": "[rank ${rank}] ",
        "shutdown_timeout": int(request.grace_s),
    }
    # "shutdown_timeout" is missing in some versions of torch.
    known = {field.name for field in fields(LaunchConfig)}
    return LaunchConfig(**{name: value for name, value in settings.items() if name in known})


def _worker_command(request: ElasticRequest) -> list[str]:
    target = request.target
    return [os.fspath(Path(__file__).with_name("worker_main.py")), json.dumps([target.kind, target.name, target.args])]


def _environment(request: ElasticRequest, own: str) -> dict[str, str]:
    """Return the variables that ranks get besides the variables set by torch; settings of the user have precedence."""
    interface = find_interface(own)
    ours = {
        # Each attempt gets a store of its own: the store of failed ranks must not be reused.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        launch_protocol.RUN_DIR: request.run_dir,
        "PYTHONUNBUFFERED": "1",
    }
    ours[launch_protocol.OMP_THREADS] = request.threads or str(max(1, int(core_count()) // request.elastic.nproc))
    usual = {launch_protocol.GLOO_INTERFACE: interface, launch_protocol.NCCL_INTERFACE: interface} if interface else {}
    return ours | {name: value for name, value in usual.items() if not os.environ.get(name)}


def _local_address(endpoint: str) -> str:
    """Return the address of this node on the route to the endpoint, where other nodes reach this node, too."""
    host, _, port = endpoint.rpartition(":")
    family, target = resolve_address(host.strip("[]"), int(port))[0]
    # Connecting a datagram socket sends nothing.
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def _should_host_rendezvous(endpoint: str) -> bool:
    """Return True if the endpoint is on this node and its port is free; torch only compares host names as text."""
    host, _, port = endpoint.rpartition(":")
    with contextlib.suppress(OSError):
        family, target = resolve_address(host.strip("[]"), int(port))[0]
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(target)
            return True
    return False


def _report_failure(failures: dict[int, ProcessFailure], run_dir: Path) -> int:
    """Print the rank that failed first on this node, and return its exit code.

    Failure records contain exact times. Without records the order comes from torch's whole seconds.
    """
    if all(failure.exitcode == launch_protocol.PREEMPTED_EXIT_CODE for failure in failures.values()):
        return launch_protocol.PREEMPTED_EXIT_CODE
    records = {rank: launch_protocol.RankFailure.read(launch_protocol.failure_file(run_dir, rank)) for rank in failures}
    found = {rank: record for rank, record in records.items() if record is not None}
    # torch's agent ends the other ranks with SIGTERM.
    ended_by_agent = -signal.SIGTERM
    silent = [
        rank
        for rank in failures
        if rank not in found and failures[rank].exitcode < 0 and failures[rank].exitcode != ended_by_agent
    ]
    # A killed rank writes no record, and the other ranks fail because of the killed rank.
    if silent or not found:
        first = min(silent or failures, key=lambda rank: (failures[rank].timestamp, rank))
    else:
        first = min(found, key=lambda rank: (found[rank].at, rank))
    failure, record = failures[first], found.get(first)
    outcome = (
        f"was killed by {signal_name(-failure.exitcode)}"
        if failure.exitcode < 0
        else f"failed with exit code {failure.exitcode}"
    )
    message = "" if record is None else next(iter(record.message.strip().splitlines()), "")
    why = "" if record is None else f": {record.error_type}" + (f": {message[:300]}" if message else "")
    _print_line(
        f"rank {first} on {socket.gethostname()} {outcome} (pid {failure.pid}){why}; the other ranks of this node were ended"
    )
    return shell_exit_code(failure.exitcode)


def _print_line(line: str) -> None:
    print(f"dtrain: launch: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # torch's background threads may delay a normal exit.
    os._exit(code)
