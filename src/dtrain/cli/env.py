"""Define ``dtrain env``: show the machine, the versions, and misconfigurations.

A run fails, hangs, or does not use the GPUs because of an *error*. A *warning* costs speed, or matters only in some runs.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

import dtrain
from dtrain.launch_protocol import (
    GLOO_INTERFACE,
    LOCAL_RANK,
    LOCAL_WORLD_SIZE,
    MASTER_ADDR,
    MASTER_PORT,
    NCCL_INTERFACE,
    NODE_RANK,
    OMP_THREADS,
    RANK,
    RUN_ID,
    WORLD_SIZE,
)
from dtrain.machine import (
    CommandOutput,
    Hardware,
    NetworkInterface,
    hidden_variable_names,
    list_interfaces,
    max_ranks,
    read_hardware,
    read_output,
    resolve_names,
    start_nvidia_smi,
    start_query,
    visible_variables,
)
from dtrain.packages import Package, check_packages


def env(
    as_json: Annotated[bool, typer.Option("--json", help="Print the same as one JSON object.")] = False,
) -> int:
    """Show the machine, versions, and misconfigurations.

    Values of environment variables are shown only if they cannot be secrets.

    Exit codes: 0 no findings, or only warnings; 1 an error: a run would fail, hang, or not use the GPUs.

    Examples:
        dtrain env
        dtrain env --json | jq .findings
    """
    facts = collect_machine_facts()
    findings = check_machine(facts)
    if as_json:
        typer.echo(json.dumps({**asdict(facts), "findings": [asdict(finding) for finding in findings]}, indent=1))
    else:
        lines = [*format_facts(facts), "", *(map(str, findings) if findings else ["nothing is misconfigured"])]
        typer.echo("\n".join(lines))
    return 1 if any(finding.level == "error" for finding in findings) else 0


def format_facts(facts: MachineFacts) -> list[str]:
    """Format the facts as lines, each with a name and a text."""
    torch = facts.torch
    versions = [f"{package.name} {package.version or 'not installed'}" for package in facts.packages]
    python = f"{facts.python}, {facts.executable}"
    rows = [("dtrain", facts.dtrain), ("python", python), ("packages", ", ".join(versions))]
    if torch is None:
        rows.append(("torch", f"unknown: {facts.torch_problem}"))
    else:
        build = f"for CUDA {torch.cuda}" if torch.cuda else "CPU build"
        backends = ", ".join([*(["gloo"] if torch.gloo else []), *([f"nccl {torch.nccl}"] if torch.nccl else [])])
        text = f"{torch.version}, {build}, {torch.folder}; collectives: {backends or 'none'}; {torch.threads} threads"
        rows += [("torch", text), *(("", f"it warns: {warning}") for warning in torch.warnings)]
    rows += _hardware_rows(facts)
    rows += [("host", f"{name}: {', '.join(found) or 'does not resolve'}") for name, found in facts.addresses.items()]
    for link in facts.interfaces:
        marks = [*(["loopback"] if link.loopback else []), *([] if link.up else ["down"])]
        rows.append(("interface", " ".join([link.name, *link.addresses, *(f"({mark})" for mark in marks)])))
    rows += [("variable", f"{name}={value}") for name, value in facts.variables.items()]
    rows += [("variable", f"{name} is set (value not shown)") for name in facts.named_variables]
    width = max(len(name) for name, _ in rows)
    return [f"{name:{width}}  {text}".rstrip() for name, text in rows]


def _hardware_rows(facts: MachineFacts) -> list[tuple[str, str]]:
    hardware, gpus = facts.hardware, facts.hardware.gpus
    cores, memory, (soft, hard) = hardware.cores, hardware.memory, hardware.open_files
    quota = f", control group allows {cores.quota:g}" if cores.quota else ""
    limit = f", control group allows {_format_gib(memory.limit_bytes)}" if memory.limit_bytes else ""
    raised = "any number" if hard is None else f"{hard}, enough for a job of {max_ranks(hard)} ranks"
    usable = f"{len(facts.torch.devices) if facts.torch else 0} usable by torch"
    rows = [
        ("system", hardware.system),
        ("cores", f"{cores.usable} usable of {cores.present}{quota}"),
        ("memory", f"{_format_gib(memory.total_bytes)}, {_format_gib(memory.available_bytes)} available{limit}"),
        ("/dev/shm", "not there" if hardware.shm_bytes is None else _format_gib(hardware.shm_bytes)),
        ("open files", f"at most {soft or 'any number'}, can be raised to {raised}"),
        ("gpus", f"{gpus.count}, {usable}" if gpus.count else "none"),
    ]
    for number, gpu in enumerate(gpus.listed):
        rows.append(("", f"{number}: {gpu.name}, {_format_gib(gpu.memory_bytes)}, driver {gpu.driver}"))
    return rows


def _format_gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


MIB = 2**20
# Docker's default for a container.
MIN_SHM_BYTES = 64 * MIB
# The usual soft limit.
MIN_OPEN_FILES = 1024


@dataclass(frozen=True, slots=True)
class EnvFinding:
    """Misconfiguration: its level, its description, and advice."""

    level: Literal["error", "warning"]
    what: str
    do: str

    def __str__(self) -> str:
        return f"{self.level}: {self.what}; {self.do}"


def check_machine(facts: MachineFacts) -> list[EnvFinding]:
    """Return all misconfigurations, errors first."""
    return sorted((finding for rule in RULES for finding in rule(facts)), key=lambda finding: finding.level != "error")


_error, _warning = partial(EnvFinding, "error"), partial(EnvFinding, "warning")


def check_package_versions(facts: MachineFacts) -> Iterator[EnvFinding]:
    """Yield packages that are missing or too old."""
    for package in facts.packages:
        if package.version is None:
            yield _error(f"packages: {package.name} is not installed", f"pip install {package.name}")
        elif package.too_old:
            what = (
                f"packages: {package.name} {package.version} is older than {package.at_least}, the first that dtrain runs with"
            )
            yield _error(what, f"pip install '{package.name}>={package.at_least}'")


def check_torch_build(facts: MachineFacts) -> Iterator[EnvFinding]:
    """Yield the reason that torch, or its gloo, cannot be used."""
    if facts.torch is None:
        if any(package.name == "torch" and package.version for package in facts.packages):
            yield _error(
                f"torch: cannot be used: {facts.torch_problem}", f"try `{facts.executable} -c 'import torch'`; reinstall it"
            )
    elif not facts.torch.gloo:
        yield _error("torch: is built without gloo, which every run needs for agreements", "install a build from pytorch.org")


def check_gpus(facts: MachineFacts) -> Iterator[EnvFinding]:
    """Yield the reason that GPUs cannot be used."""
    gpus, torch = facts.hardware.gpus, facts.torch
    if gpus.problem is not None:
        level = _error if gpus.device_files else _warning
        yield level(f"gpus: nvidia-smi failed: {gpus.problem}", "if there is a GPU, reload or reinstall NVIDIA's driver")
        return
    if not gpus.count or torch is None:
        return
    visible = facts.variables.get("CUDA_VISIBLE_DEVICES")
    if torch.cuda is None:
        what = f"torch: {torch.version} is a CPU build, but there are {gpus.count} NVIDIA GPUs"
        yield _error(what, "install the CUDA build from pytorch.org")
    elif visible is not None and not torch.devices:
        yield _warning(f"gpus: CUDA_VISIBLE_DEVICES={visible!r} hides all {gpus.count} GPUs", "unset it to use them")
    elif not torch.devices:
        why = torch.warnings[-1] if torch.warnings else "torch gives no reason"
        yield _error(f"torch: cannot use any of {gpus.count} GPUs: {why}", "match torch's CUDA version and the driver")
    elif torch.nccl is None:
        yield _error("torch: is built without NCCL, which GPUs need for collectives", "install a build from pytorch.org")


def check_rank_variables(facts: MachineFacts) -> Iterator[EnvFinding]:
    """Yield faults of the variables of a launch. In a shell they are left over from a launch, but ``init_dist`` uses them."""
    env, launched = facts.variables, RUN_ID in facts.variables
    left_over = f"unset {' '.join(name for name in _RANK_VARIABLES if name in env)}"
    rank, world = env.get(RANK), env.get(WORLD_SIZE)
    if rank is None and world is None:
        if env.get(MASTER_ADDR) is not None and not launched:
            yield _warning(f"environment: {MASTER_ADDR} is set but {RANK} is not, maybe by an old launch", left_over)
        return
    if rank is None or world is None:
        missing, present = (RANK, WORLD_SIZE) if rank is None else (WORLD_SIZE, RANK)
        yield _error(f"environment: {present}={env[present]} is set but {missing} is not", f"set both, or {left_over}")
        return
    if not (rank.isdecimal() and world.isdecimal() and int(rank) < int(world)):
        what = f"environment: needs 0 <= RANK < WORLD_SIZE, got RANK={rank} WORLD_SIZE={world}"
        yield _error(what, f"correct them, or {left_over}")
    elif int(world) > 1 and not {MASTER_ADDR, MASTER_PORT} <= env.keys():
        master = f"{MASTER_ADDR} and {MASTER_PORT}"
        what = f"environment: {WORLD_SIZE}={world} needs {master}"
        yield _error(what, f"set them, or {left_over}")
    elif int(world) > 1 and not launched:
        what = f"environment: {WORLD_SIZE}={world} makes `python loop.py` wait for {int(world) - 1} more ranks"
        yield _warning(what, f"if no launcher set it, {left_over}")


_RANK_VARIABLES = (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, NODE_RANK, MASTER_ADDR, MASTER_PORT)


def check_host_names(facts: MachineFacts) -> Iterator[EnvFinding]:
    """Yield host names that do not resolve."""
    master = facts.variables.get(MASTER_ADDR)
    if master and not facts.addresses.get(master):
        yield _error(f"network: {MASTER_ADDR}={master} does not resolve", "correct or unset it, or add it to /etc/hosts")
    if not facts.addresses.get(facts.host) and GLOO_INTERFACE not in facts.variables:
        what = f"network: the host name {facts.host!r} does not resolve, and gloo listens where it points to"
        yield _warning(what, f"add it to /etc/hosts, or set {GLOO_INTERFACE}; `dtrain launch` does so for its ranks")


def check_interfaces(facts: MachineFacts) -> Iterator[EnvFinding]:
    """Yield network interfaces that are missing or down."""
    if not any(link.loopback and link.up and "127.0.0.1" in link.addresses for link in facts.interfaces):
        yield _error(
            "network: no loopback interface with 127.0.0.1 is up, which ranks of `dtrain launch` use", "ip link set lo up"
        )
    up = [link.name for link in facts.interfaces if link.up]
    gloo = facts.variables.get(GLOO_INTERFACE, "")
    for name in filter(None, gloo.split(",")):
        if name not in up:
            what = f"network: {GLOO_INTERFACE}={gloo}: no interface {name!r} is up"
            yield _error(what, f"choose from {', '.join(up)}, or unset it")
    nccl = facts.variables.get(NCCL_INTERFACE, "")
    if nccl and not any(_nccl_matches(nccl, name) for name in up):
        level = _error if facts.hardware.gpus.count else _warning
        yield level(
            f"network: {NCCL_INTERFACE}={nccl} matches no interface that is up", f"choose from {', '.join(up)}, or unset it"
        )


def _nccl_matches(setting: str, name: str) -> bool:
    """Apply NCCL's own rule: a list of prefixes, of whole names after ``=``, and of exclusions after ``^``."""
    excluded, names = setting.startswith("^"), setting.removeprefix("^")
    exact, names = names.startswith("="), names.removeprefix("=")
    listed = any(name == part if exact else name.startswith(part) for part in names.split(",") if part)
    return listed is not excluded


def check_cores(facts: MachineFacts) -> Iterator[EnvFinding]:
    """Yield numbers of threads that do not match the cores."""
    cores, threads = facts.hardware.cores, facts.variables.get(OMP_THREADS)
    allowed = max(1, int(min(cores.usable, cores.quota or cores.usable)))
    first = (threads or "").split(",")[0]
    if threads is not None and not (first.isdecimal() and int(first) > 0):
        yield _warning(f"environment: {OMP_THREADS}={threads} is not a number of threads", "unset it, or set a whole number")
    elif threads is not None and int(first) > allowed:
        what = f"environment: {OMP_THREADS}={threads}, but this process may use {allowed} cores"
        yield _warning(what, "unset it: `dtrain launch` shares the cores among its ranks")
    elif threads is None and allowed < cores.usable:
        what = f"cores: the control group allows {cores.quota:g} of {cores.usable} cores, and libraries start a thread for each"
        yield _warning(what, f"set {OMP_THREADS} to {allowed} or less, divided by the number of ranks")


def check_limits(facts: MachineFacts) -> Iterator[EnvFinding]:
    """Yield limits that are too low for loader workers or sockets."""
    shm, (soft, hard) = facts.hardware.shm_bytes, facts.hardware.open_files
    if shm is None:
        yield _warning("memory: there is no /dev/shm; loader workers and NCCL need it", "mount a tmpfs there, or use workers=0")
    elif shm <= MIN_SHM_BYTES:
        what = f"memory: /dev/shm has {shm // MIB} MiB, which loader workers and NCCL use to exchange tensors"
        yield _warning(what, "docker run --shm-size=8g or --ipc=host, or workers=0")
    if soft is not None and soft < MIN_OPEN_FILES:
        goal = MIN_OPEN_FILES if hard is None else min(MIN_OPEN_FILES, hard)
        do = f"ulimit -n {goal}" if goal > soft else "ask for a higher hard limit"
        yield _warning(f"limits: {soft} open files; ranks hold sockets, pipes and shared tensors open", do)


_COSTLY_VARIABLES = {
    "CUDA_LAUNCH_BLOCKING": (("1",), "every kernel launch waits for its kernel"),
    "TORCH_DISTRIBUTED_DEBUG": (("DETAIL",), "every collective is checked by another collective"),
    "NCCL_DEBUG": (("INFO", "TRACE"), "every rank writes long logs"),
    "NCCL_P2P_DISABLE": (("1",), "GPUs communicate through host memory"),
    "NCCL_SHM_DISABLE": (("1",), "GPUs of one machine communicate through the network"),
    "NCCL_IB_DISABLE": (("1",), "nodes communicate over TCP, not InfiniBand"),
}


def check_costly_variables(facts: MachineFacts) -> Iterator[EnvFinding]:
    """Yield variables that slow a run down."""
    for name, (values, why) in _COSTLY_VARIABLES.items():
        if facts.variables.get(name, "").upper() in values:
            value = facts.variables[name]
            yield _warning(f"environment: {name}={value}: {why}", "unset it unless you are looking for a fault")


RULES: tuple[Callable[[MachineFacts], Iterator[EnvFinding]], ...] = (
    check_package_versions,
    check_torch_build,
    check_gpus,
    check_rank_variables,
    check_host_names,
    check_interfaces,
    check_cores,
    check_limits,
    check_costly_variables,
)


# A cold import from a network file system takes most of a minute.
TORCH_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchBuild:
    """Facts of the installed torch.

    Args:
        version: version with the build's suffix (``+cpu``, ``+cu128``).
        folder: folder of the package.
        cuda: version of CUDA or HIP; None for a CPU build.
        devices: names of usable GPUs.
        gloo: if True, collectives on CPUs are available.
        nccl: version of NCCL; None without NCCL.
        threads: threads of an operation on the CPU by default.
        warnings: warnings during the import and the query for GPUs.
    """

    version: str
    folder: str
    cuda: str | None
    devices: tuple[str, ...]
    gloo: bool
    nccl: str | None
    threads: int
    warnings: tuple[str, ...]


def parse_probe_output(output: CommandOutput) -> TorchBuild | str:
    """Parse the facts in the last JSON line of the probe's output, or return the problem."""
    if output.code is None:
        return f"importing it took more than {TORCH_TIMEOUT_S:g} s"
    if output.code < 0:
        return f"importing it was ended by signal {-output.code}"
    if output.code > 0:
        return output.last_line
    import msgspec

    # Libraries may print other lines.
    lines = [line for line in output.out.splitlines() if line.startswith("{")]
    if not lines:
        return "it ended before it could say anything"
    return msgspec.json.decode(lines[-1], type=TorchBuild)


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """Facts of the machine, its network, its packages and its environment.

    Args:
        dtrain: version of dtrain.
        python: version of Python.
        executable: path of Python.
        packages: packages that dtrain needs.
        torch: facts of torch; None if torch could not be queried.
        torch_problem: reason that torch could not be queried, in one line.
        hardware: cores, memory, limits, GPUs.
        host: name of this machine.
        addresses: addresses of the host name, and of MASTER_ADDR if set; () for a name that does not resolve.
        interfaces: network interfaces.
        variables: variables that affect a run, with values.
        named_variables: names of variables that affect a run and may be secret.
    """

    dtrain: str
    python: str
    executable: str
    packages: tuple[Package, ...]
    torch: TorchBuild | None
    torch_problem: str | None
    hardware: Hardware
    host: str
    addresses: dict[str, tuple[str, ...]]
    interfaces: tuple[NetworkInterface, ...]
    variables: dict[str, str]
    named_variables: tuple[str, ...]


def collect_machine_facts() -> MachineFacts:
    """Collect the facts of this machine and this process. The slow queries (torch, GPUs) start first and are read last."""
    # Without the current folder in the path, which may have a torch.py.
    torch_query = start_query([sys.executable, "-P", str(Path(__file__).with_name("torch_probe.py"))])
    gpu_query = start_nvidia_smi()
    variables, host = visible_variables(os.environ), socket.gethostname()
    interfaces = list_interfaces()
    addresses = resolve_names(dict.fromkeys([host, *filter(None, [variables.get(MASTER_ADDR)])]))
    hardware = read_hardware(gpu_query)
    torch = parse_probe_output(read_output(torch_query, timeout_s=TORCH_TIMEOUT_S))
    return MachineFacts(
        dtrain=dtrain.__version__,
        python=platform.python_version(),
        executable=sys.executable,
        packages=check_packages(),
        torch=None if isinstance(torch, str) else torch,
        torch_problem=torch if isinstance(torch, str) else None,
        hardware=hardware,
        host=host,
        addresses=addresses,
        interfaces=interfaces,
        variables=variables,
        named_variables=hidden_variable_names(os.environ),
    )
