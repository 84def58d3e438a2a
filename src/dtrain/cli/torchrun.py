"""Options of torchrun: those that work here under torchrun's spelling, and advice for the others."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from dtrain.errors import ConfigError
from dtrain.launch.plan import MAX_RANKS

ADVICE = {
    "--log-dir": "say --run-dir FOLDER, which keeps logs and failure records",
    "--redirects": "leave it out: the run folder keeps the output of every rank",
    "-r": "leave it out: the run folder keeps the output of every rank",
    "--tee": "leave it out, and say --log-ranks all to see every rank here",
    "-t": "leave it out, and say --log-ranks all to see every rank here",
    "--local-ranks-filter": "say --log-ranks RANKS, counted over all nodes",
    "--duplicate-stdout-filters": "leave it out: the run folder keeps the output of every rank",
    "--duplicate-stderr-filters": "leave it out: the run folder keeps the output of every rank",
    "--logs-specs": "say --stdout FILE and --stderr FILE",
    "--rdzv-conf": "say --join-timeout SECONDS",
    "--monitor-interval": "leave it out: the end of a rank is noticed at once",
    "--start-method": "leave it out: ranks are forks, or interpreters of their own with --no-preload",
    "--role": "leave it out: all ranks have one role",
    "--run-path": "leave it out: the script runs as with `python`",
    "--local-addr": "leave it out, and say --master-addr, by which the address of this node is found",
    "--numa-binding": "say --bind",
    "--signals-to-handle": "leave it out, and see --stop-signal",
    "--virtual-local-rank": "leave it out, and set CUDA_VISIBLE_DEVICES",
    "--event-log-handler": "leave it out",
}
"""Advice for each option of torchrun that is none of ours."""

_LOOPBACK = ("localhost", "127.0.0.1", "::1", "[::1]")
_ENDPOINT = re.compile(r"(?P<host>.+?)(?::(?P<port>[0-9]{1,5}))?")
_USUAL_PORT = "29400"  # torchrun's, where an endpoint has none


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """The options that say where nodes meet, as texts; None for those that were not given."""

    nnodes: str | None
    endpoint: str | None
    master_addr: str | None
    master_port: str | None


def advice_for(option: str) -> str | None:
    """Return what to do about ``option``, if torchrun has it and ``dtrain launch`` does not."""
    name = option if len(option) == 2 else option.replace("_", "-")
    return f"{option} is torchrun's; {ADVICE[name]}" if name in ADVICE else None


def parse_ranks(text: str | None, *, gpus: int) -> str | None:
    """Return the number of ranks as a text, where torchrun's ``auto``, ``gpu`` and ``cpu`` are numbers.

    Args:
        text: the value of ``-n``.
        gpus: number of GPUs of this node, 0 if there is none.

    Raises:
        ConfigError: ``gpu`` on a node without.
    """
    word = (text or "").strip().lower()
    if word == "auto":
        return None
    if word == "gpu":
        if gpus == 0:
            raise ConfigError("launch: -n gpu, but this node has no GPU; say a number, or cpu")
        return str(gpus)
    if word == "cpu":
        return str(min(MAX_RANKS, os.cpu_count() or 1))
    return text


def place_nodes(given: Rendezvous, *, standalone: bool, backend: str | None) -> Rendezvous:
    """Return ``given`` with what ``--standalone`` and ``--rdzv-backend`` say.

    Raises:
        ConfigError: ``standalone`` with several nodes, or a backend that is not there.
    """
    if standalone:
        if given.nnodes not in (None, "", "1", "1:1"):
            raise ConfigError(f"launch: --standalone is one node, not --nnodes {given.nnodes}; leave one of them out")
        return Rendezvous(nnodes="1", endpoint=None, master_addr=None, master_port=None)
    if backend not in (None, "", "c10d", "static"):
        raise ConfigError(
            f"launch: --rdzv-backend must be c10d or static, got {backend!r}; say --rdzv-endpoint or --master-addr instead"
        )
    if given.endpoint is None or (match := _ENDPOINT.fullmatch(given.endpoint)) is None:
        return given
    host, port = match["host"], match["port"]
    if backend == "static":
        return Rendezvous(
            nnodes=given.nnodes,
            endpoint=None,
            master_addr=given.master_addr or host,
            master_port=given.master_port or port or _USUAL_PORT,
        )
    one = given.nnodes in (None, "", "1") or (given.nnodes == "1:1" and backend == "c10d")
    if one and host in _LOOPBACK:
        return Rendezvous(nnodes="1", endpoint=None, master_addr=None, master_port=None)
    if backend == "c10d" and port is None:
        return Rendezvous(
            nnodes=given.nnodes,
            endpoint=f"{host}:{_USUAL_PORT}",
            master_addr=given.master_addr,
            master_port=given.master_port,
        )
    return given
