"""docs/nodes.md: programs for its manifest, script and loop read them, as far as that is possible without a cluster."""

from __future__ import annotations

import re
import subprocess
from typing import Any

import pytest
import yaml

from dtrain.launch.topology import LaunchArgs, infer_topology, read_scheduler
from pages.fences import DOCS, fences

PAGE = DOCS / "nodes.md"


def block(language: str, word: str) -> str:
    (text,) = (fence.text for fence in fences(PAGE) if fence.language == language and word in fence.text)
    return text


@pytest.fixture(scope="module")
def manifest() -> tuple[dict[str, Any], dict[str, Any]]:
    service, job = yaml.safe_load_all(block("yaml", "completionMode"))
    return service, job


def option(command: list[str], name: str) -> int:
    return int(command[command.index(name) + 1])


def test_manifest_pods_match_the_launcher_nodes(manifest):
    """Kubernetes sets the host name to the job's name and the index, and JOB_COMPLETION_INDEX to the index."""
    _, job = manifest
    (container,) = job["spec"]["template"]["spec"]["containers"]
    given = {variable["name"]: variable["value"] for variable in container["env"]}
    command = container["command"]
    nodes, nproc = option(command, "--nnodes"), option(command, "-n")
    assert nodes == job["spec"]["completions"] == job["spec"]["parallelism"]
    seen = []
    for index in range(nodes):
        env = {**given, "JOB_COMPLETION_INDEX": str(index), "HOSTNAME": f"{job['metadata']['name']}-{index}"}
        meeting = infer_topology(LaunchArgs(nproc=nproc, nnodes=str(nodes)), read_scheduler(env), gpus=8).rendezvous
        assert meeting is not None, "it would train alone"
        assert (meeting.node_rank, meeting.nodes, meeting.nproc) == (index, nodes, nproc)
        seen.append((meeting.addr, meeting.port, meeting.token))
    assert len(set(seen)) == 1
    assert all(seen[0]), "an address, a port and a token"


def test_service_resolves_the_master_address_to_pod_0(manifest):
    service, job = manifest
    pod = job["spec"]["template"]["spec"]
    (address,) = (variable["value"] for variable in pod["containers"][0]["env"] if variable["name"] == "MASTER_ADDR")
    assert address == f"{job['metadata']['name']}-0.{pod['subdomain']}"
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}


def test_manifest_restarts_saved_jobs_and_allows_time_to_save(manifest):
    _, job = manifest
    pod = job["spec"]["template"]["spec"]
    (rule,) = job["spec"]["podFailurePolicy"]["rules"]
    assert (rule["action"], rule["onExitCodes"]["values"], pod["restartPolicy"]) == ("Ignore", [75], "Never")
    assert rule["onExitCodes"]["containerName"] == pod["containers"][0]["name"]
    assert job["spec"]["backoffLimit"] // job["spec"]["completions"] == 2, "each failure takes every pod; the third ends it"
    assert pod["terminationGracePeriodSeconds"] > option(pod["containers"][0]["command"], "--grace")
    assert {volume["name"] for volume in pod["containers"][0]["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


@pytest.mark.parametrize("word", ["#SBATCH --nodes=4", "ssh -n -tt"])
def test_shell_scripts_have_valid_bash_syntax(word):
    done = subprocess.run(["bash", "-n"], input=block("bash", word), capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_srun_passes_cpus_per_task():
    """srun does not take them from the job (release notes of Slurm 22.05)."""
    script = block("bash", "#SBATCH --nodes=4")
    assert re.search(r"#SBATCH.* --cpus-per-task=\d+", script)
    assert 'srun --cpus-per-task="$SLURM_CPUS_PER_TASK" ' in script


def test_slurm_signal_precedes_the_grace_period():
    script = block("bash", "#SBATCH --nodes=4")
    asked, grace = (int(re.search(pattern, script)[1]) for pattern in (r"TERM@(\d+)", r"--grace (\d+)"))
    assert asked > grace
