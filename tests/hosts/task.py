"""A program for a scheduler to start on each node: joins as ``dtrain launch -n 2`` would, and prints its place."""

import os
import select
import sys
from dataclasses import replace

from dtrain.errors import ConfigError
from dtrain.launch.nodes.agent import start_agent
from dtrain.launch.nodes.messages import Ended, Joined, Over, Refused
from dtrain.launch.schedulers import scheduled
from dtrain.launch.topology import Asked, infer


def main() -> int:
    try:
        meeting = infer(Asked(nproc=2), scheduled(os.environ), gpus=1).meeting
    except ConfigError as error:
        sys.exit(str(error))
    if meeting is None:
        print("one node")
        return 0
    agent = start_agent(replace(meeting, run_name="run of node 0" if meeting.node_rank == 0 else ""))
    while not agent.gone:
        select.select([agent], [], [])
        for message in agent.read():
            if isinstance(message, Joined):
                print(message.layout.ranks, message.layout.world_size, message.run_name)
                agent.send(Ended(codes=dict.fromkeys(message.layout.ranks, 0)))
            elif isinstance(message, Over | Refused):
                print(message)
                agent.close()
                os.waitpid(agent.pid, 0)
                return 0 if isinstance(message, Over) else 1
    return 1


if __name__ == "__main__":
    sys.exit(main())
