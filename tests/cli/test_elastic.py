"""``--nnodes MIN:MAX`` from the command line on: one node, which is as many as it may be."""

from __future__ import annotations

import subprocess
import sys

import pytest

from jobs import Result

LOOK = """
import os, sys
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()  # a rank that ends early breaks the connections that the other rank still makes
print(os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["OMP_NUM_THREADS"], os.environ["DTRAIN_RUN_DIR"])
dist.destroy_process_group()
sys.exit(int(sys.argv[1]) if os.environ["RANK"] == "1" else 0)
"""


def launch(folder, port, *options, code):
    (folder / "look.py").write_text(LOOK)
    endpoint = f"127.0.0.1:{port}"
    command = [sys.executable, "-m", "dtrain", "launch", "-n", "2", "--nnodes", "1:1", "--rdzv-endpoint", endpoint, *options]
    done = subprocess.run([*command, "look.py", str(code)], cwd=folder, capture_output=True, text=True, timeout=120)
    return Result(code=done.returncode, out=done.stdout, err=done.stderr)


@pytest.mark.parametrize("code", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_ranks_run_under_torch_elastic_agent_with_its_exit_code(tmp_path, port, code):
    done = launch(tmp_path, port, "--run-dir", "here", code=code)
    assert done.code == code, done.err
    lines = sorted(line for line in done.out.splitlines() if line.startswith("[rank "))
    assert [line.split()[2:4] for line in lines] == [["0", "2"], ["1", "2"]]
    assert {line.split()[5] for line in lines} == {str(tmp_path / "here")}
    assert len(done.summary) == bool(code)  # one line, not one of each launcher


@pytest.mark.parametrize("option", ["--hang-timeout", "--log-ranks"])
def test_unsupported_elastic_options_are_refused(tmp_path, port, option):
    done = launch(tmp_path, port, option, "1", code=0)
    assert (done.code, len(done.errors.splitlines())) == (2, 1)
    assert option in done.errors
