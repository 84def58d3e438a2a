"""A program for a scheduler to start on each node: joins as ``dtrain launch -n 2`` would, and prints its place."""

import os
import select
import sys
from dataclasses import replace

from dtrain.errors import ConfigError
from dtrain.launch.agent import start_agent
from dtrain.launch.node_messages import JobFinished, JoinAccepted, JoinRefused, RanksExited
from dtrain.launch.topology import LaunchArgs, infer_topology, read_scheduler


def main() -> int:
    try:
        meeting = infer_topology(LaunchArgs(nproc=2), read_scheduler(os.environ), gpus=1).rendezvous
    except ConfigError as error:
        sys.exit(str(error))
    if meeting is None:
        print("one node")
        return 0
    agent = start_agent(replace(meeting, run_name="run of node 0" if meeting.node_rank == 0 else ""))
    while not agent.has_exited:
        select.select([agent], [], [])
        for message in agent.read():
            if isinstance(message, JoinAccepted):
                print(message.layout.ranks, message.layout.world_size, message.run_name)
                agent.send(RanksExited(exit_codes=dict.fromkeys(message.layout.ranks, 0)))
            elif isinstance(message, JobFinished | JoinRefused):
                print(message)
                agent.close()
                os.waitpid(agent.pid, 0)
                return 0 if isinstance(message, JobFinished) else 1
    return 1


if __name__ == "__main__":
    sys.exit(main())
