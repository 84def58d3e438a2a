"""Define ``dtrain env``: show the machine, the versions, and misconfigurations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from dtrain.cli.env_facts import MachineFacts

_ERROR_EXIT_CODE = 1


def env(
    as_json: Annotated[bool, typer.Option("--json", help="Print the same as one JSON object.")] = False,
) -> int:
    """Show the machine, versions, and misconfigurations.

    Values of environment variables are shown only if they cannot be secrets.

    Exit codes: 0 no findings, or only warnings; 1 an error: a run would fail, hang, or not use the GPUs.
    """
    # Imported here, so that other commands start faster.
    import json
    from dataclasses import asdict

    from dtrain.cli.env_checks import check_machine
    from dtrain.cli.env_facts import collect_machine_facts

    facts = collect_machine_facts()
    findings = check_machine(facts)
    if as_json:
        typer.echo(json.dumps({**asdict(facts), "findings": [asdict(finding) for finding in findings]}, indent=1))
    else:
        lines = [*format_facts(facts), "", *(map(str, findings) if findings else ["nothing is misconfigured"])]
        typer.echo("\n".join(lines))
    return _ERROR_EXIT_CODE if any(finding.level == "error" for finding in findings) else 0


def format_facts(facts: MachineFacts) -> list[str]:
    """Format the facts as lines, each with a name and a text."""
    rows = [*_software_rows(facts), *_hardware_rows(facts), *_network_rows(facts), *_environment_rows(facts)]
    width = max(len(name) for name, _ in rows)
    return [f"{name:{width}}  {text}".rstrip() for name, text in rows]


def _software_rows(facts: MachineFacts) -> list[tuple[str, str]]:
    torch = facts.torch
    versions = [f"{package.name} {package.version or 'not installed'}" for package in facts.packages]
    rows = [
        ("dtrain", facts.dtrain),
        ("python", f"{facts.python}, {facts.executable}"),
        ("packages", ", ".join(versions)),
    ]
    if torch is None:
        return [*rows, ("torch", f"unknown: {facts.torch_problem}")]
    build = f"for CUDA {torch.cuda}" if torch.cuda else "CPU build"
    backends = ", ".join([*(["gloo"] if torch.gloo else []), *([f"nccl {torch.nccl}"] if torch.nccl else [])])
    text = f"{torch.version}, {build}, {torch.folder}; collectives: {backends or 'none'}; {torch.threads} threads"
    return [*rows, ("torch", text), *(("", f"it warns: {warning}") for warning in torch.warnings)]


def _hardware_rows(facts: MachineFacts) -> list[tuple[str, str]]:
    hardware, gpus = facts.hardware, facts.hardware.gpus
    cores, memory, (soft, hard) = hardware.cores, hardware.memory, hardware.open_files
    rows = [
        ("system", hardware.system),
        (
            "cores",
            f"{cores.usable} usable of {cores.present}" + (f", control group allows {cores.quota:g}" if cores.quota else ""),
        ),
        (
            "memory",
            f"{_format_gib(memory.total_bytes)}, {_format_gib(memory.available_bytes)} available"
            + (f", control group allows {_format_gib(memory.limit_bytes)}" if memory.limit_bytes else ""),
        ),
        ("/dev/shm", "not there" if hardware.shm_bytes is None else _format_gib(hardware.shm_bytes)),
        ("open files", f"at most {soft or 'any number'}, can be raised to {hard or 'any number'}"),
    ]
    listed = [f"{gpu.name}, {_format_gib(gpu.memory_bytes)}, driver {gpu.driver}" for gpu in gpus.listed]
    usable = f"{len(facts.torch.devices) if facts.torch else 0} usable by torch"
    rows.append(("gpus", f"{gpus.count}, {usable}" if gpus.count else "none"))
    return [*rows, *(("", f"{number}: {text}") for number, text in enumerate(listed))]


def _network_rows(facts: MachineFacts) -> list[tuple[str, str]]:
    rows = [("host", f"{name}: {', '.join(found) or 'does not resolve'}") for name, found in facts.addresses.items()]
    for link in facts.interfaces:
        marks = [*(["loopback"] if link.loopback else []), *([] if link.up else ["down"])]
        rows.append(("interface", " ".join([link.name, *link.addresses, *(f"({mark})" for mark in marks)])))
    return rows


def _environment_rows(facts: MachineFacts) -> list[tuple[str, str]]:
    rows = [("variable", f"{name}={value}") for name, value in facts.variables.items()]
    return [*rows, *(("variable", f"{name} is set (value not shown)") for name in facts.named_variables)]


def _format_gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
