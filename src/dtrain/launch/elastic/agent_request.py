"""What the program that runs torch's agent is told, on its command line. Imports no torch."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from dtrain.errors import ConfigError
from dtrain.launch.launch_plan import LaunchPlan, NodeLayout, Target
from dtrain.launch.topology import ElasticConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticRequest:
    """Which ranks are to run, and where the nodes meet."""

    elastic: ElasticConfig
    target: Target
    run_dir: str
    max_restarts: int
    grace_s: float  # between SIGTERM and SIGKILL, when the program is told to end
    threads: str = ""  # OMP_NUM_THREADS as the user has given it
    last_call_s: int = 30  # for more nodes to come when the smallest number of them is there

    @classmethod
    def from_plan(cls, plan: LaunchPlan, elastic: ElasticConfig, *, threads: str = "") -> ElasticRequest:
        """What ``plan`` says, as far as torch's agent can do it."""
        return cls(
            elastic=elastic,
            target=plan.target,
            run_dir=os.fspath(plan.run_dir),
            max_restarts=plan.max_restarts,
            grace_s=plan.grace_after_signal_s,
            threads=threads,
        )

    @classmethod
    def parse(cls, text: str) -> ElasticRequest:
        """The opposite of ``encode``."""
        record = json.loads(text)
        target = Target(**{**record["target"], "args": tuple(record["target"]["args"])})
        return cls(**{**record, "elastic": ElasticConfig(**record["elastic"]), "target": target})

    def encode(self) -> str:
        return json.dumps(asdict(self))


def build_agent_command(request: ElasticRequest) -> list[str]:
    """The command line of the program. It exits as ``dtrain launch`` does, and writes the summary line itself."""
    return [sys.executable, os.fspath(Path(__file__).with_name("program.py")), request.encode()]


def make_elastic_plan(plan: LaunchPlan, elastic: ElasticConfig, *, threads: str) -> LaunchPlan:
    """``plan`` as the launch of a single program, torch's agent, which does what was planned.

    Raises:
        ConfigError: the plan has what torch's agent cannot do.
    """
    if plan.hang_timeout_s is not None or plan.output.shown is not None:
        option = "--hang-timeout" if plan.hang_timeout_s is not None else "--log-ranks"
        raise ConfigError(
            f"launch: {option} is not for --rdzv-endpoint, whose ranks torch's own agent looks after; leave it out"
        )
    program, *args = build_agent_command(ElasticRequest.from_plan(plan, elastic, threads=threads))
    return replace(
        plan,
        target=Target(kind="command", name=program, args=tuple(args)),
        layout=NodeLayout(nproc=1, world_size=1, nodes=elastic.max_nodes + 1),  # more than one: nothing is kept on loopback
        max_restarts=0,
        reports_own_exit=True,
    )
