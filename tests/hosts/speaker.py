"""A program: an agent whose supervisor writes what it hears to stdout, and sends what comes on stdin. Usage: MEETING."""

import json
import os
import select
import sys

from dtrain.launch.launch_plan import NodeRendezvous
from dtrain.launch.nodes.agent import start_agent
from dtrain.launch.nodes.messages import decode, encode


def main() -> None:
    agent = start_agent(NodeRendezvous(**json.loads(sys.argv[1])))
    while True:
        ready = select.select([0] if agent.has_exited else [0, agent.fileno()], [], [])[0]
        if 0 not in ready:
            for message in agent.read():
                os.write(1, encode(message))
            continue
        lines = os.read(0, 65536).splitlines()
        for line in lines:
            agent.send(decode(line))  # type: ignore[arg-type]
        if not lines:
            agent.close()
            os.waitpid(agent.pid, 0)
            return


if __name__ == "__main__":
    main()
