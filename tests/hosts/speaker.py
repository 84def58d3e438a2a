"""A supervisor with its agent, in a fork on another host: writes its messages to stdout, and sends lines of stdin."""

import os
import select
from collections.abc import Mapping
from typing import Any

from dtrain.launch.agent import start_agent
from dtrain.launch.launch_plan import NodeRendezvous
from dtrain.launch.node_messages import decode, encode
from hosts.agents import run_here


def speak(meeting: Mapping[str, Any], stdin: int, stdout: int) -> None:
    """Run until the end of ``stdin``."""
    agent = start_agent(NodeRendezvous(**meeting), run=run_here)
    while True:
        ready = select.select([stdin] if agent.has_exited else [stdin, agent.fileno()], [], [])[0]
        if stdin not in ready:
            for message in agent.read():
                os.write(stdout, encode(message))
            continue
        lines = os.read(stdin, 65536).splitlines()
        for line in lines:
            agent.send(decode(line))  # type: ignore[arg-type]
        if not lines:
            agent.close()
            os.waitpid(agent.pid, 0)
            return
