"""Facts of schedulers, from environments that real schedulers printed."""

from __future__ import annotations

import pytest

from dtrain.launch.topology import SchedulerInfo, expand_hostlist, read_scheduler

STEP = {
    "SLURM_JOB_ID": "41",
    "SLURM_STEP_ID": "0",
    "SLURM_CLUSTER_NAME": "c",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "1",
    "SLURM_NNODES": "2",
    "SLURM_NTASKS": "2",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",
}
MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "OMPI_COMM_WORLD_NODE_RANK": "0",
    "PMIX_NAMESPACE": "prterun-a-7@1",
    "MASTER_ADDR": "a",
}
PLAIN = {"NODE_RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "29400"}


def facts(env: dict[str, str]) -> SchedulerInfo:
    info = read_scheduler(env)
    assert info is not None
    return info


@pytest.mark.parametrize(
    ("nodes", "names"),
    [
        ("n1", ["n1"]),
        ("n[1-3,07],m5", ["n1", "n2", "n3", "n07", "m5"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("r[1-2]n[3,5]-ib", ["r1n3-ib", "r1n5-ib", "r2n3-ib", "r2n5-ib"]),
        ("a,b,c[1]", ["a", "b", "c1"]),
        ("gpu[a,b]", ["gpua", "gpub"]),
        ("", []),
    ],
)
def test_slurm_hostlist_is_expanded(nodes, names):
    assert list(expand_hostlist(nodes)) == names


def test_hostlist_expansion_is_limited():
    assert len(list(expand_hostlist("n[0-999999999]"))) == 65_536


def test_slurm_step_gives_complete_topology():
    info = facts(STEP)
    assert (info.name, info.node_rank, info.nodes, info.master_addr) == ("Slurm", 1, 2, "n1")
    assert (info.fallback_addr, info.hosts, info.refusal) == ("10.0.0.1", ("n1", "n2"), "")


def test_port_and_token_are_shared_within_one_slurm_step():
    first, second = facts({**STEP, "SLURM_NODEID": "0", "SLURM_PROCID": "0"}), facts(STEP)
    other = facts({**STEP, "SLURM_STEP_ID": "1"})
    assert (first.master_port, first.token) == (second.master_port, second.token)
    assert first.token != other.token
    assert first.master_port != other.master_port
    assert 1024 < first.master_port < 32_768


def test_exported_variables_override_slurm():
    info = facts({**STEP, "MASTER_ADDR": "10.1.1.1", "MASTER_PORT": "7000"})
    assert (info.master_addr, info.master_port) == ("10.1.1.1", 7000)


def test_batch_script_outside_step_is_not_a_scheduler():
    assert read_scheduler({name: value for name, value in STEP.items() if "STEP" not in name}) is None


def test_slurm_task_per_rank_is_refused_with_suggested_option():
    info = facts({**STEP, "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NODELIST": "n1"})
    assert "8 tasks on 1 node" in info.refusal
    assert "--ntasks-per-node=1" in info.refusal


def test_openmpi_process_per_node_gives_complete_topology():
    info = facts({**STEP, **MPI})
    assert (info.name, info.node_rank, info.nodes, info.master_addr, info.refusal) == ("OpenMPI", 1, 2, "a", "")
    assert info.master_port is not None


def test_openmpi_process_per_rank_is_refused():
    info = facts({**MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"})
    assert "--map-by ppr:1:node" in info.refusal


def test_kubernetes_indexed_job_gives_node_rank_without_node_count():
    info = facts({"JOB_COMPLETION_INDEX": "3", "HOSTNAME": "train-3", "MASTER_ADDR": "train-0.train"})
    assert (info.name, info.node_rank, info.nodes, info.master_addr) == ("Kubernetes", 3, None, "train-0.train")
    other = facts({"JOB_COMPLETION_INDEX": "0", "HOSTNAME": "train-0", "MASTER_ADDR": "train-0.train"})
    assert (info.token, info.master_port) == (other.token, other.master_port)
    assert info.token


def test_kubeflow_gives_complete_topology():
    pet = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "a", "PET_MASTER_PORT": "29400"}
    info = facts({**pet, "JOB_COMPLETION_INDEX": "1"})
    assert (info.node_rank, info.nodes, info.master_addr, info.master_port) == (1, 2, "a", 29400)


def test_plain_variables_require_complete_set():
    info = facts(PLAIN)
    assert (info.node_rank, info.world_size, info.nodes) == (1, 4, None)
    for name in PLAIN:
        assert read_scheduler({key: value for key, value in PLAIN.items() if key != name}) is None


@pytest.mark.parametrize(
    ("env", "place"),  # node_rank, base_rank, nproc, world_size, nodes
    [
        ({**PLAIN, "LOCAL_WORLD_SIZE": "2"}, (1, None, 2, 4, None)),
        ({**PLAIN, "BASE_RANK": "3", "LOCAL_WORLD_SIZE": "1"}, (1, 3, 1, 4, None)),
        ({**PLAIN, "NODE_RANK": "", "BASE_RANK": "2"}, (None, 2, None, 4, None)),
        ({**PLAIN, "LOCAL_WORLD_SIZE": "0"}, (1, None, None, 4, None)),
        ({"LOCAL_WORLD_SIZE": "2"}, (None, None, 2, None, 1)),
        ({"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "4"}, (None, None, 2, None, 1)),
    ],
    ids=["ranks here", "nodes differ", "base rank", "no GPUs here", "ranks here alone", "some"],
)
def test_composer_variables_give_ranks_of_node(env, place):
    info = facts(env)
    assert (info.node_rank, info.base_rank, info.nproc, info.world_size, info.nodes) == place
    assert set(info.variables) <= {name for name, value in env.items() if value}


LEFT_OVER = {
    "slurm, in a rank": {**STEP, "TORCHELASTIC_RUN_ID": "x"},
    "mpi, in a rank": {**MPI, "TORCHELASTIC_RUN_ID": "x"},
    "a rank's": {**PLAIN, "RANK": "0"},
    "a local rank's": {**PLAIN, "LOCAL_RANK": "0"},
    "ranks here, in a rank": {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "0"},
    "ranks here, in a launch": {"LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"},
    "no ranks here": {"LOCAL_WORLD_SIZE": "0"},
    "base rank alone": {"BASE_RANK": "0"},
    "no number": {**PLAIN, "NODE_RANK": "one"},
    "negative": {**PLAIN, "WORLD_SIZE": "-1"},
    "empty": {"OMPI_COMM_WORLD_RANK": "", "OMPI_COMM_WORLD_SIZE": ""},
    "nothing": {},
}


@pytest.mark.parametrize("left_over", LEFT_OVER.values(), ids=LEFT_OVER)
def test_leftover_or_invalid_variables_are_not_a_scheduler(left_over):
    assert read_scheduler(left_over) is None
