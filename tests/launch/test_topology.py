"""Topology of a job, inferred from command lines as people write them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dtrain.errors import ConfigError
from dtrain.launch.topology import LaunchArgs, SchedulerInfo, infer_topology

AGAIN = {"max_restarts": 3}
HERE = {"master_addr": "a", "master_port": 29400}
SLURM = SchedulerInfo(
    name="Slurm", node_rank=1, nodes=2, master_addr="n1", master_port=12345, token="slurm 4.0", hosts=("n1", "n2")
)
INDEXED = SchedulerInfo(name="Kubernetes", node_rank=1, master_addr="a", master_port=23456, token="kubernetes j")
ARRAY = SchedulerInfo(name="Kubernetes", node_rank=1)
PLAIN = SchedulerInfo(
    name="the environment",
    node_rank=1,
    world_size=8,
    master_addr="a",
    master_port=29400,
    variables=("LOCAL_WORLD_SIZE", "NODE_RANK", "B", "C"),
)
RANKS_HERE = SchedulerInfo(name="the environment", nodes=1, nproc=2)
PER_RANK = SchedulerInfo(
    name="Slurm", node_rank=0, nodes=1, refusal="srun started 8 tasks on 1 node. Start one launcher per node"
)


def _with(scheduled: SchedulerInfo, **changes: object) -> SchedulerInfo:
    return replace(scheduled, **changes)


@pytest.mark.parametrize(
    ("asked", "scheduler", "nproc"),
    [
        ({}, None, 3),
        ({"nproc": 2}, None, 2),
        ({"nproc": 2, "world_size": None, "master_addr": ""}, None, 2),
        ({"nproc": 2, "world_size": 2}, None, 2),
        ({"nproc": 2, "nnodes": "1"}, SLURM, 2),
        ({"nproc": 2, "nnodes": "1"}, PER_RANK, 2),
        ({"nproc": 2}, ARRAY, 2),
        ({"nproc": 8}, PLAIN, 8),
        ({"nproc": 2, "base_rank": 0}, None, 2),
        ({"nproc": 3}, RANKS_HERE, 3),
    ],
    ids=["GPUs", "-n", "nothing given", "world", "slurm", "per rank", "array", "all in variables", "base 0", "ranks here"],
)
def test_arguments_and_variables_select_one_node(asked, scheduler, nproc):
    scheduler = scheduler if scheduler is not PLAIN else _with(PLAIN, node_rank=0)
    topology = infer_topology(LaunchArgs(**asked), scheduler, gpus=3)
    assert topology.rendezvous is None
    assert (topology.layout.nproc, topology.layout.world_size, topology.layout.nodes) == (nproc, nproc, 1)
    assert topology.notices == ()


# node_rank, nodes, nproc, base_rank, world_size, addr, port
RENDEZVOUS = {
    "node rank": ({"nproc": 4, "world_size": 8, "node_rank": 1, **HERE}, None, (1, 2, 4, 4, 8, "a", 29400)),
    "base rank": ({"nproc": 4, "world_size": 8, "base_rank": 4, **HERE}, None, (1, 2, 4, 4, 8, "a", 29400)),
    "nodes differ": (
        {"nproc": 3, "world_size": 8, "base_rank": 5, "node_rank": 1, **HERE},
        None,
        (1, None, 3, 5, 8, "a", 29400),
    ),
    "both given": ({"nproc": 4, "world_size": 8, "base_rank": 4, "node_rank": 1, **HERE}, None, (1, None, 4, 4, 8, "a", 29400)),
    "world learnt": ({"nproc": 4, "nnodes": "2", "node_rank": 1, **HERE}, None, (1, 2, 4, None, None, "a", 29400)),
    "world stated, nodes differ": (
        {"nproc": 3, "nnodes": "2", "world_size": 8, "node_rank": 1, **HERE},
        None,
        (1, 2, 3, None, 8, "a", 29400),
    ),
    "all stated": ({"nproc": 4, "nnodes": "2", "world_size": 8, "node_rank": 1, **HERE}, None, (1, 2, 4, 4, 8, "a", 29400)),
    "slurm": ({"nproc": 4}, SLURM, (1, 2, 4, None, None, "n1", 12345)),
    "slurm, world": ({"nproc": 4, "world_size": 8}, SLURM, (1, 2, 4, 4, 8, "n1", 12345)),
    "slurm, own port": ({"nproc": 4, "master_port": 7}, SLURM, (1, 2, 4, None, None, "n1", 7)),
    "kubernetes": ({"nproc": 4, "nnodes": "2"}, INDEXED, (1, 2, 4, None, None, "a", 23456)),
    "variables": ({"nproc": 4}, PLAIN, (1, 2, 4, 4, 8, "a", 29400)),
    "variables, ranks here": ({}, _with(PLAIN, nproc=4), (1, 2, 4, 4, 8, "a", 29400)),
    "variables, own ranks": ({"nproc": 2}, _with(PLAIN, nproc=4), (1, 4, 2, 2, 8, "a", 29400)),
    "variables, base rank": ({}, _with(PLAIN, nproc=4, node_rank=None, base_rank=4), (1, 2, 4, 4, 8, "a", 29400)),
    "variables, nodes differ": ({}, _with(PLAIN, nproc=3, base_rank=5), (1, None, 3, 5, 8, "a", 29400)),
    "variables, own place": ({"node_rank": 0}, _with(PLAIN, nproc=4, base_rank=4), (0, 2, 4, 0, 8, "a", 29400)),
    "ranks here alone": ({"nnodes": "3", "node_rank": 2, **HERE}, RANKS_HERE, (2, 3, 2, None, None, "a", 29400)),
    "all on the command line": ({"nproc": 2, "nnodes": "3", "node_rank": 2, **HERE}, SLURM, (2, 3, 2, None, None, "a", 29400)),
}


@pytest.mark.parametrize(("asked", "scheduler", "place"), RENDEZVOUS.values(), ids=RENDEZVOUS)
def test_rendezvous_combines_arguments_and_variables(asked, scheduler, place):
    meeting = infer_topology(LaunchArgs(**asked), scheduler, gpus=1).rendezvous
    names = ("node_rank", "nodes", "nproc", "base_rank", "world_size", "addr", "port")
    assert tuple(getattr(meeting, name) for name in names) == place


@pytest.mark.parametrize("scheduler", [None, PLAIN], ids=["options", "variables"])
def test_a_changing_number_of_nodes_leaves_the_ranks_to_the_rendezvous(scheduler):
    asked = {"nproc": 4, "nnodes": "1:2", "node_rank": 1, "join_timeout": 7.0, **AGAIN, **HERE}
    meeting = infer_topology(LaunchArgs(**asked), scheduler, gpus=1).rendezvous
    assert (meeting.min_nodes, meeting.nodes, meeting.base_rank, meeting.world_size) == (1, 2, None, None)
    assert (meeting.timeout_s, meeting.replace_timeout_s, meeting.max_restarts) == (7, 60, 3)
    assert infer_topology(LaunchArgs(**{**asked, "nnodes": "2:2"}), scheduler, gpus=1).rendezvous.min_nodes is None


def test_a_lost_node_is_awaited_longer_than_the_ranks_have_to_end():
    asked = {"nproc": 4, "nnodes": "1:2", "node_rank": 1, "grace": 100.0, **AGAIN, **HERE}
    assert infer_topology(LaunchArgs(**asked), None, gpus=1).rendezvous.replace_timeout_s == 130
    # Without restarts nobody waits for the ranks of another node.
    once = {"nproc": 4, "nnodes": "2", "node_rank": 1, "grace": 600.0, **HERE}
    assert infer_topology(LaunchArgs(**once), None, gpus=1).rendezvous.timeout_s == 300


def test_scheduler_sets_token_and_hosts_unless_rdzv_id_is_given():
    plain = infer_topology(LaunchArgs(nproc=1), SLURM, gpus=1).rendezvous
    named = infer_topology(LaunchArgs(nproc=1, rdzv_id="mine"), SLURM, gpus=1).rendezvous
    assert (plain.token, plain.hosts) == ("slurm 4.0", ("n1", "n2"))
    assert named.token == "mine"


@pytest.mark.parametrize(
    ("asked", "notice"),
    [
        ({"nproc": 8, "world_size": 8, "node_rank": 0}, "only node; for two nodes of 4 ranks pass -n 4"),
        ({"nproc": 1, "master_addr": "10.0.0.1"}, "one node needs no --master-addr"),
        ({"nproc": 1, "master_port": 29400}, "one node needs no --master-addr"),
    ],
    ids=["two nodes meant", "address", "port"],
)
def test_one_node_reports_ignored_settings(asked, notice):
    topology = infer_topology(LaunchArgs(**asked), None, gpus=1)
    assert topology.layout is not None
    assert [notice in line for line in topology.notices] == [True]


def test_variables_selecting_several_nodes_are_named():
    (notice,) = infer_topology(LaunchArgs(nproc=4), PLAIN, gpus=1).notices
    assert notice == "launch: node 1 of several, as NODE_RANK, B and C say"


@pytest.mark.parametrize("scheduler", [RANKS_HERE, _with(PLAIN, nproc=2)], ids=["alone", "with a place"])
def test_nproc_variable_is_reported_and_overridden_by_command_line(scheduler):
    assert "launch: -n 2, as LOCAL_WORLD_SIZE says" in infer_topology(LaunchArgs(), scheduler, gpus=3).notices
    other = infer_topology(LaunchArgs(nproc=4), scheduler, gpus=3)
    place = other.layout or other.rendezvous
    assert place.nproc == 4
    assert not any("LOCAL_WORLD_SIZE" in notice for notice in other.notices)


def test_nproc_variable_out_of_range_is_refused():
    with pytest.raises(ConfigError, match="-n must be an integer from 1 to 256, got 1000"):
        infer_topology(LaunchArgs(), _with(RANKS_HERE, nproc=1000), gpus=3)


@pytest.mark.parametrize(
    ("asked", "scheduler", "line"),
    [
        ({"nproc": 8, "world_size": 4}, None, r"-n 8 is more than all ranks, --world-size 4\. Pass -n 4"),
        ({"nproc": 8, "world_size": 8, "node_rank": 1}, None, r"--node-rank 1 .* only one\. For 2 nodes pass -n 4"),
        ({"nproc": 4, "world_size": 4, "base_rank": 4}, None, r"--base-rank 4 .*\. For 2 nodes pass -n 2, or --world-size 8"),
        ({"nproc": 4, "node_rank": 1}, None, r"--node-rank 1 means several nodes, but -n 4 alone means one\. .*--nnodes 2"),
        ({"nproc": 4, "nnodes": "1", "world_size": 8}, None, r"is 4 ranks, not --world-size 8\. Pass -n 8, or --nnodes 2"),
        (
            {"nproc": 3, "world_size": 8, "node_rank": 1, **HERE},
            None,
            r"8 is no multiple of -n 3\. Pass -n 2, or --base-rank, too",
        ),
        ({"nproc": 3, "world_size": 8, "base_rank": 3, **HERE}, None, r"no multiple of -n 3\. Pass -n 2, or --node-rank, too"),
        ({"nproc": 4, "world_size": 8, "base_rank": 2, **HERE}, None, r"--base-rank 2 is no multiple of -n 4"),
        ({"nproc": 4, "world_size": 8, "base_rank": 6, "node_rank": 1, **HERE}, None, r"would make a rank 9 .*\. Pass -n 2"),
        ({"nproc": 4, "world_size": 8, "base_rank": 9, "node_rank": 1, **HERE}, None, r"rank 12 .*\. Pass --world-size 13"),
        ({"nproc": 4, "world_size": 8, "node_rank": 2, **HERE}, None, r"--node-rank 2 of 2 nodes, which are 0 to 1"),
        ({"nproc": 4, "nnodes": "2", "node_rank": 2, **HERE}, None, r"--node-rank 2 of 2 nodes"),
        ({"nproc": 7, "nnodes": "3", "world_size": 8, "node_rank": 0, **HERE}, None, r"leaves 1 of --world-size 8 .*Pass -n 2"),
        (
            {"nproc": 4, "nnodes": "2", "base_rank": 5, "world_size": 9, **HERE},
            None,
            r"--base-rank alone .*Pass --node-rank, too",
        ),
        ({"nproc": 4, "nnodes": "2", "world_size": 8, "node_rank": 1, "base_rank": 3, **HERE}, None, r"Pass --base-rank 4"),
        ({"nproc": 4, "world_size": 8, **HERE}, None, r"several nodes need --node-rank\. Pass 0 on the node of --master-addr"),
        ({"nproc": 4, "world_size": 8, "node_rank": 0, "master_port": 1}, None, r"several nodes need --master-addr"),
        ({"nproc": 4, "world_size": 8, "node_rank": 0, "master_addr": "a"}, None, r"several nodes need --master-port"),
        ({"nproc": 4, "nnodes": "3"}, SLURM, r"--nnodes 3, but Slurm started a launcher on 2 nodes\. Pass --nnodes 2"),
        ({"nproc": 8, "world_size": 8}, SLURM, r"Slurm says 2 nodes\. Pass --world-size 16, or -n 4, or --nnodes 1"),
        ({"nproc": 8}, PER_RANK, r"srun started 8 tasks on 1 node"),
        ({"nproc": 8}, INDEXED, r"Kubernetes says that this is node 1, but not of how many\. Add --nnodes N"),
        ({"nproc": 0}, None, r"-n must be an integer from 1 to 256"),
        ({"nproc": 1, "nnodes": "0"}, None, r"--nnodes must be from 1"),
        ({"nproc": 1, "nnodes": "3:2"}, None, r"--nnodes must be from 1 to 4096, with MIN at most MAX, got 3:2"),
        ({"nproc": 1, "nnodes": "0:2"}, None, r"--nnodes must be from 1 to 4096, got 0:2"),
        ({"nproc": 1, "nnodes": "two"}, None, r"--nnodes must be a number or MIN:MAX, got 'two'"),
        ({"nproc": 1, "nnodes": "2:4"}, None, r"--nnodes 2:4 must have restarts, got none\. Add --max-restarts 3"),
        ({"nproc": 2, "nnodes": "2:4", "world_size": 8, **AGAIN}, None, r"--world-size 8 fixes the ranks, .*\. Remove --world"),
        (
            {"nproc": 2, "nnodes": "2:4", "base_rank": 2, **AGAIN},
            None,
            r"--base-rank 2 fixes .*\. Remove --base-rank",
        ),
        (
            {"nproc": 2, "nnodes": "1:4", **AGAIN},
            SLURM,
            r"--nnodes 4, but Slurm started a launcher on 2 nodes\. Pass --nnodes 2",
        ),
        ({"nproc": 2, "nnodes": "2", "replace_timeout": 5.0}, None, r"--replace-timeout 5 is for --nnodes MIN:MAX\. Remove it"),
        (
            {"nproc": 2, "nnodes": "1:2", "node_rank": 0, "replace_timeout": 5.0, **AGAIN, **HERE},
            None,
            r"--replace-timeout 5 must be above --grace 5, the time that .*\. Pass --replace-timeout 35, or a smaller --grace",
        ),
        (
            {"nproc": 2, "nnodes": "1:2", "node_rank": 0, "replace_timeout": 400.0, **AGAIN, **HERE},
            None,
            r"--replace-timeout 400 is above --join-timeout 300, .*\. Pass --join-timeout 400, too",
        ),
        (
            {"nproc": 2, "nnodes": "2", "node_rank": 0, "grace": 600.0, **AGAIN, **HERE},
            None,
            r"--join-timeout 300 must be above --grace 600, the time that .*\. Pass --join-timeout 900, or a smaller --grace",
        ),
        ({"nproc": 1, "nnodes": "1:2", "rdzv_endpoint": "a:1"}, None, r"torchrun --nnodes 1:2 .* --rdzv-endpoint a:1 "),
        ({"nproc": 1, "nnodes": "2", "rdzv_endpoint": "a:1"}, None, r"Pass --master-addr .*, or run torchrun --nnodes 2 "),
        ({"nproc": 1, "rdzv_endpoint": "a:1"}, None, r"--rdzv-endpoint a:1 is for torch's agents"),
    ],
)
def test_contradictory_arguments_are_refused_with_suggestion(asked, scheduler, line):
    with pytest.raises(ConfigError, match=line) as refusal:
        infer_topology(LaunchArgs(**asked), scheduler, gpus=1)
    assert "\n" not in str(refusal.value)
    assert str(refusal.value).startswith("launch: ")
