"""Checks before a start, and the environment of a rank. No process starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dtrain.errors import ConfigError
from dtrain.launch.launch_plan import (
    LaunchPlan,
    NodeLayout,
    Target,
    build_common_environment,
    build_rank_command,
    build_rank_environment,
    count_gpus,
)
from dtrain.launch.topology import find_stale_variables

SCRIPT = Target(kind="script", name="a.py", args=("--lr", "1"))
PLAN = LaunchPlan(target=SCRIPT, layout=NodeLayout.one_node(4), run_dir=Path("/runs/one"))


@pytest.mark.parametrize("nproc", [0, -1, 257, 10**6])
def test_number_of_ranks_has_bounds(nproc):
    with pytest.raises(ConfigError, match="-n must be an integer from 1 to 256"):
        replace(PLAN, layout=NodeLayout.one_node(nproc))


@pytest.mark.parametrize("seconds", [-1, float("nan"), float("inf"), 1e9])
def test_grace_has_bounds(seconds):
    with pytest.raises(ConfigError, match="--grace must be a finite number at least 0 and at most 86400"):
        replace(PLAN, grace_s=seconds)


def test_run_folder_must_be_absolute():
    with pytest.raises(ConfigError, match="must be absolute"):
        replace(PLAN, run_dir=Path("runs"))


@pytest.mark.parametrize(
    ("devices", "visible", "expected"),
    [
        ([], None, 0),
        (["null", "nvidiactl", "nvidia-uvm", "nvidia-caps"], None, 0),
        (["nvidia0", "nvidia1", "nvidia10", "nvidiactl"], None, 3),
        (["nvidia0", "nvidia1"], "", 0),
        (["nvidia0", "nvidia1"], "1", 1),
        (["nvidia0", "nvidia1"], "1, 0", 2),
        (["nvidia0", "nvidia1"], "1,-1,0", 1),
        (["nvidia0", "nvidia1"], "0,5,1", 1),
        (["nvidia0"], "MIG-a,MIG-b", 2),
        (["nvidia0", "nvidia1"], "GPU-a", 1),
        ([], "0,1", 0),
    ],
)
def test_visible_gpus_are_counted(devices, visible, expected):
    assert count_gpus(devices, visible) == expected


def test_ranks_share_cores_unless_omp_num_threads_is_set():
    def threads(cores, inherited):
        return build_rank_environment(PLAN, 0, port=1, cores=cores, inherited=inherited)["OMP_NUM_THREADS"]

    assert [threads(cores, {}) for cores in (0.5, 1, 4, 9)] == ["1", "1", "1", "2"]
    assert threads(64, {"OMP_NUM_THREADS": "3"}) == "3"


def test_rank_environments_differ_only_in_rank_variables():
    first, last = (build_rank_environment(PLAN, rank, port=1, cores=4, inherited={}) for rank in (0, 3))
    assert {name for name in first if first[name] != last[name]} == {"RANK", "LOCAL_RANK", "ROLE_RANK", "DTRAIN_FAILURE_FILE"}


def test_ranks_of_second_node_have_correct_environment():
    layout = NodeLayout(nproc=2, world_size=5, base_rank=3, node_rank=1, nodes=2, master_addr="10.0.0.1")
    own = build_rank_environment(replace(PLAN, layout=layout), 4, port=77, cores=4, inherited={})
    expected = {
        "RANK": "4",
        "WORLD_SIZE": "5",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "NODE_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "77",
    }
    assert {name: own[name] for name in expected} == expected


@pytest.mark.parametrize(("nodes", "interface"), [(1, "lo"), (2, "eth0")])
def test_single_node_ranks_use_loopback_interface(nodes, interface):
    layout = NodeLayout(nproc=2, world_size=2 * nodes, nodes=nodes)
    given = {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "eth0"}
    common = build_common_environment(replace(PLAN, layout=layout), given)
    assert {common[name] for name in given} == {interface}


def test_stale_launch_variables_are_removed_and_others_kept():
    given = {
        "RANK": "3",
        "DTRAIN_RUN_DIR": "/old",
        "TORCHELASTIC_ERROR_FILE": "/old",
        "MASTER_PORT": "1",
        "A": "b",
        "RANKS": "8",
        "DTRAIN_JOB_SECRET": "known on all nodes",
    }
    assert find_stale_variables(given) == ["DTRAIN_RUN_DIR", "MASTER_PORT", "RANK", "TORCHELASTIC_ERROR_FILE"]
    common = build_common_environment(PLAN, given)
    assert "TORCHELASTIC_ERROR_FILE" not in common
    assert (common["DTRAIN_RUN_DIR"], common["A"], common["RANKS"]) == ("/runs/one", "b", "8")
    assert common["DTRAIN_JOB_SECRET"] == "known on all nodes"


@pytest.mark.parametrize(
    ("given", "stale"),
    [
        ({"LOCAL_WORLD_SIZE": "2"}, []),
        ({"LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "1"}, ["MASTER_PORT"]),
        ({"NODE_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, []),
        ({"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "1"}, ["LOCAL_RANK", "LOCAL_WORLD_SIZE"]),
    ],
    ids=["ranks here", "and a port", "a place", "a rank's"],
)
def test_node_placement_variables_are_not_stale(given, stale):
    assert find_stale_variables(given) == stale


def test_command_ends_with_the_script_and_its_arguments():
    # The command begins with the interpreter, flags that this process has, and the program of a rank.
    assert build_rank_command(SCRIPT)[-4:] == ["script", "a.py", "--lr", "1"]
    assert build_rank_command(Target(kind="module", name="a.b"))[-2:] == ["module", "a.b"]
    assert build_rank_command(Target(kind="command", name="sh", args=("-c", ":")))[1:] == ["-c", ":"]
