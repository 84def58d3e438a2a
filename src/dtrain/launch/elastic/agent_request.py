"""Describe the ranks of one elastic node on the command line of the program that runs torch's agent. Imports no torch."""

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
    """Settings of the program that runs torch's elastic agent of one node.

    Attributes:
        elastic: the rendezvous, and the number of nodes and ranks.
        target: the program that ranks run.
        run_dir: folder of the launch.
        max_restarts: restarts of the ranks after a failure.
        grace_s: seconds between SIGTERM and SIGKILL.
        threads: ``OMP_NUM_THREADS`` of the user; empty if unset.
        last_call_s: seconds to wait for further nodes once the minimum has joined.
    """

    elastic: ElasticConfig
    target: Target
    run_dir: str
    max_restarts: int
    grace_s: float
    threads: str = ""
    last_call_s: int = 30

    @classmethod
    def from_plan(cls, plan: LaunchPlan, elastic: ElasticConfig, *, threads: str = "") -> ElasticRequest:
        """Build the request from the settings of ``plan`` that torch's agent supports."""
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
        """Parse the text that ``encode`` returns."""
        record = json.loads(text)
        target = Target(**{**record["target"], "args": tuple(record["target"]["args"])})
        return cls(**{**record, "elastic": ElasticConfig(**record["elastic"]), "target": target})

    def encode(self) -> str:
        return json.dumps(asdict(self))


def build_agent_command(request: ElasticRequest) -> list[str]:
    """Return the command of the program, which prints the summary line and exits with the exit code of ``dtrain launch``."""
    return [sys.executable, os.fspath(Path(__file__).with_name("agent_main.py")), request.encode()]


def make_elastic_plan(plan: LaunchPlan, elastic: ElasticConfig, *, threads: str) -> LaunchPlan:
    """Return ``plan`` as the launch of one program, torch's elastic agent.

    Raises:
        ConfigError: the plan has an option that torch's agent does not support.
    """
    if plan.hang_timeout_s is not None or plan.output.shown is not None:
        option = "--hang-timeout" if plan.hang_timeout_s is not None else "--log-ranks"
        raise ConfigError(
            f"launch: {option} must not be set with --rdzv-endpoint, because torch's own agent runs the ranks. Remove {option}."
        )
    program, *args = build_agent_command(ElasticRequest.from_plan(plan, elastic, threads=threads))
    return replace(
        plan,
        target=Target(kind="command", name=program, args=tuple(args)),
        # More than one node, so that no address is limited to loopback.
        layout=NodeLayout(nproc=1, world_size=1, nodes=elastic.max_nodes + 1),
        max_restarts=0,
        reports_own_exit=True,
    )
