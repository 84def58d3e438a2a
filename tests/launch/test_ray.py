"""Loops on a Ray cluster of two raylets: a rank that is killed is restarted and resumes, and a job runs ``dtrain launch``.

Needs Ray: ``nox -s ray`` installs it and runs these tests.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ray = pytest.importorskip("ray", reason="nox -s ray installs Ray")

EXAMPLES = Path(__file__).parents[2] / "examples"
LOOP = ("--until", "60ba")
TIMEOUT_S = 900
# The first run of rank 1 ends like a machine that is lost, behind the save of step 30.
KILLED = """
import os, pathlib, runpy, sys
import dtrain as dt

save, mark = dt.save_sharded, pathlib.Path(sys.argv.pop(1))

def save_and_die(root, state, **options):
    handle = save(root, state, **options)
    if state.step == 30 and os.environ["RANK"] == "1" and not mark.exists():
        handle.result()
        mark.touch()
        os._exit(9)
    return handle

dt.save_sharded = save_and_die
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[dict[str, str]]:
    """Environment of a cluster of two nodes with one CPU each, with the server of jobs."""
    from ray.cluster_utils import Cluster

    options = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_TRAIN_V2_ENABLED": "1", "OMP_NUM_THREADS": "1"}
    # Paths of sockets are limited to a hundred characters, so the folder is not one of pytest's.
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="ray-") as folder:
        for name, value in {**options, "RAY_TMPDIR": folder}.items():
            patch.setenv(name, value)
        nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": True, "dashboard_port": 0})
        try:
            nodes.add_node(num_cpus=1)
            yield {**os.environ, "RAY_ADDRESS": nodes.address, "DASHBOARD": f"http://{nodes.head_node.webui_url}"}
        finally:
            nodes.shutdown()


def held_out(output: str) -> str:
    (line,) = set(re.findall(r"held-out loss [\d.]+ nats/byte", output))
    return line


def run(*command: str, env: dict[str, str] | None = None) -> str:
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> str:
    """The result of the loop without Ray."""
    out = tmp_path_factory.mktemp("plain")
    command = (sys.executable, "-m", "dtrain", "launch", "-n", "2", str(EXAMPLES / "train_custom.py"), *LOOP, "--out", str(out))
    return held_out(run(*command))


def test_a_killed_rank_is_restarted_and_the_result_is_the_same(cluster, expected, tmp_path):
    script, mark = tmp_path / "killed.py", tmp_path / "mark"
    script.write_text(KILLED)
    loop = (str(script), str(mark), str(EXAMPLES / "train_custom.py"), *LOOP, "--out", str(tmp_path / "ckpt"))
    output = run(sys.executable, str(EXAMPLES / "on_ray.py"), *loop, env=cluster)
    assert mark.exists()
    assert "step-00000030" in output, "the second start resumes"
    assert held_out(output) == expected


def test_a_submitted_job_runs_dtrain_launch(cluster, expected, tmp_path):
    loop = f"{EXAMPLES / 'train_custom.py'} {' '.join(LOOP)} --out {tmp_path / 'ckpt'}"
    submit = ("ray", "job", "submit", "--address", cluster["DASHBOARD"], "--")
    output = run(*submit, *f"{sys.executable} -m dtrain launch -n 2 {loop}".split(), env=cluster)
    assert held_out(output) == expected
