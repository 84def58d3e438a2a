"""No process of a job listens beyond loopback, also where the host's name stands for another address."""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest

from jobs import Job

# A host of its own: with an interface besides loopback, and a name that resolves to that interface's address.
ELSEWHERE = """
ip link set lo up
ip link add host0 type veth peer name host1
ip addr add 10.99.0.1/24 dev host0
ip link set host0 up
ip link set host1 up
hostname elsewhere
printf '127.0.0.1 localhost\\n10.99.0.1 elsewhere\\n' > hosts
mount --bind hosts /etc/hosts
exec "$@"
"""
HOSTS = {"as it is": [], "elsewhere": ["unshare", "-m", "-u", "-n", "bash", "-ec", ELSEWHERE, "bash"]}

MEETS = """
    import os, sys, time
    from contextlib import nullcontext
    import torch, torch.distributed as dist
    import dtrain as dt

    ours = sys.argv[1] == "init_dist"
    with dt.init_dist(device="cpu") if ours else nullcontext():
        if not ours:
            dist.init_process_group("gloo")
        total = torch.ones(1)
        dist.all_reduce(total)
        dist.new_group([0, 1])
        assert total.item() == 2
        with open(f"{os.environ['FOLDER']}/{os.environ['RANK']}", "w") as file:
            file.write(str(os.getpid()))
        while not os.path.exists(os.environ["FOLDER"] + "/seen"):
            time.sleep(0.01)
        dist.barrier()
        if not ours:
            dist.destroy_process_group()
"""

LOOPBACK = {
    "0100007F",  # 127.0.0.1, as the kernel writes it
    "00000000000000000000000001000000",  # ::1
    "0000000000000000FFFF00000100007F",  # 127.0.0.1 in an IPv6 socket
}
LISTENS = "0A"


@cache
def why_no_host() -> str:
    """Return the machine's reason against a host of its own; empty if it gives one."""
    try:
        asked = [*HOSTS["elsewhere"][:-2], ELSEWHERE, "bash", "true"]
        return subprocess.run(asked, cwd="/tmp", capture_output=True, text=True, timeout=60).stderr.strip()
    except (FileNotFoundError, subprocess.TimeoutExpired) as error:
        return str(error)


def listeners(job: Job) -> list[str]:
    """Addresses at which processes of the job listen, as the kernel writes them."""
    sockets, tables = set(), set()
    for pid in job.processes():
        with suppress(OSError):
            sockets |= {os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()}
            for name in ("tcp", "tcp6"):
                tables |= set(Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:])
    rows = [line.split() for line in tables]
    return [row[1].partition(":")[0] for row in rows if row[3] == LISTENS and f"socket:[{row[9]}]" in sockets]


CASES = [
    pytest.param("elsewhere", "init_dist", (), id="elsewhere-init_dist"),
    pytest.param("elsewhere", "torch", (), id="elsewhere-torch"),
    *(
        pytest.param(host, who, options, id=f"{host}-{who}-{'plain' if options else 'preloaded'}", marks=pytest.mark.slow)
        for host, who, options in (
            ("as it is", "init_dist", ()),
            ("as it is", "torch", ()),
            ("as it is", "init_dist", ("--no-preload",)),
            ("as it is", "torch", ("--no-preload",)),
            ("elsewhere", "init_dist", ("--no-preload",)),
            ("elsewhere", "torch", ("--no-preload",)),
        )
    ),
]


@pytest.mark.parametrize(("host", "who", "options"), CASES)
def test_job_listens_only_on_loopback(start, host, who, options):
    if HOSTS[host] and (refusal := why_no_host()):
        pytest.skip(f"needs a network and a host name of its own: {refusal}")
    job = start(MEETS, who, options=options, wrap=HOSTS[host])
    job.wait_for("0", "1")
    addresses = listeners(job)
    (job.folder / "seen").touch()
    result = job.wait()
    assert result.code == 0, result.err
    assert len(addresses) >= 3  # the store, and each rank
    assert set(addresses) <= LOOPBACK
