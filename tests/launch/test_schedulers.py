"""Facts of schedulers, from environments that real schedulers printed."""

from __future__ import annotations

import pytest

from dtrain.launch.topology import expand_hostlist, read_scheduler

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
    found = read_scheduler(STEP)
    assert found is not None
    assert (found.name, found.node_rank, found.nodes, found.master_addr) == ("Slurm", 1, 2, "n1")
    assert (found.fallback_addr, found.hosts, found.refusal) == ("10.0.0.1", ("n1", "n2"), "")


def test_port_and_token_are_shared_within_one_slurm_step():
    first, second = read_scheduler({**STEP, "SLURM_NODEID": "0", "SLURM_PROCID": "0"}), read_scheduler(STEP)
    other = read_scheduler({**STEP, "SLURM_STEP_ID": "1"})
    assert first is not None
    assert second is not None
    assert other is not None
    assert (first.master_port, first.token) == (second.master_port, second.token)
    assert first.token != other.token
    assert first.master_port != other.master_port
    assert first.master_port is not None
    assert 1024 < first.master_port < 32_768


def test_exported_variables_override_slurm():
    found = read_scheduler({**STEP, "MASTER_ADDR": "10.1.1.1", "MASTER_PORT": "7000"})
    assert found is not None
    assert (found.master_addr, found.master_port) == ("10.1.1.1", 7000)


def test_batch_script_outside_step_is_not_a_scheduler():
    assert read_scheduler({name: value for name, value in STEP.items() if "STEP" not in name}) is None


def test_slurm_task_per_rank_is_refused_with_suggested_option():
    found = read_scheduler({**STEP, "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NODELIST": "n1"})
    assert found is not None
    assert "8 tasks on 1 node" in found.refusal
    assert "--ntasks-per-node=1" in found.refusal


def test_openmpi_process_per_node_gives_complete_topology():
    found = read_scheduler({**STEP, **MPI})
    assert found is not None
    assert (found.name, found.node_rank, found.nodes, found.master_addr, found.refusal) == ("OpenMPI", 1, 2, "a", "")
    assert found.master_port is not None


def test_openmpi_process_per_rank_is_refused():
    found = read_scheduler({**MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"})
    assert found is not None
    assert "--map-by ppr:1:node" in found.refusal


def test_kubernetes_indexed_job_gives_node_rank_without_node_count():
    found = read_scheduler({"JOB_COMPLETION_INDEX": "3", "HOSTNAME": "train-3", "MASTER_ADDR": "train-0.train"})
    assert found is not None
    assert (found.name, found.node_rank, found.nodes, found.master_addr) == ("Kubernetes", 3, None, "train-0.train")
    other = read_scheduler({"JOB_COMPLETION_INDEX": "0", "HOSTNAME": "train-0", "MASTER_ADDR": "train-0.train"})
    assert other is not None
    assert (found.token, found.master_port) == (other.token, other.master_port)
    assert found.token


def test_kubeflow_gives_complete_topology():
    pet = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "a", "PET_MASTER_PORT": "29400"}
    found = read_scheduler({**pet, "JOB_COMPLETION_INDEX": "1"})
    assert found is not None
    assert (found.node_rank, found.nodes, found.master_addr, found.master_port) == (1, 2, "a", 29400)


def test_plain_variables_require_complete_set():
    found = read_scheduler(PLAIN)
    assert found is not None
    assert (found.node_rank, found.world_size, found.nodes) == (1, 4, None)
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
    found = read_scheduler(env)
    assert found is not None
    assert (found.node_rank, found.base_rank, found.nproc, found.world_size, found.nodes) == place
    assert set(found.variables) <= {name for name, value in env.items() if value}


@pytest.mark.parametrize(
    "left_over",
    [
        {**STEP, "TORCHELASTIC_RUN_ID": "x"},
        {**MPI, "TORCHELASTIC_RUN_ID": "x"},
        {**PLAIN, "RANK": "0"},
        {**PLAIN, "LOCAL_RANK": "0"},
        {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "0"},
        {"LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"},
        {"LOCAL_WORLD_SIZE": "0"},
        {"BASE_RANK": "0"},
        {**PLAIN, "NODE_RANK": "one"},
        {**PLAIN, "WORLD_SIZE": "-1"},
        {"OMPI_COMM_WORLD_RANK": "", "OMPI_COMM_WORLD_SIZE": ""},
        {},
    ],
    ids=[
        "slurm, in a rank",
        "mpi, in a rank",
        "a rank's",
        "a local rank's",
        "ranks here, in a rank",
        "ranks here, in a launch",
        "no ranks here",
        "base rank alone",
        "no number",
        "negative",
        "empty",
        "nothing",
    ],
)
def test_leftover_or_invalid_variables_are_not_a_scheduler(left_over):
    assert read_scheduler(left_over) is None
