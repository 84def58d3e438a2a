"""write_snapshot: what holds the memory, in a file."""

import json
import pickle

import pytest
import torch

from dtrain.errors import ConfigError
from dtrain.memory.snapshot import write_snapshot
from dtrain.testing import memory_budget


def test_snapshot_in_a_memory_budget_lists_the_largest_storages(tmp_path):
    with memory_budget(1000, stack_depth=1):
        kept = [torch.zeros(3), torch.zeros(2, 5), torch.zeros(4)]
        torch.zeros(30)
        written = write_snapshot(tmp_path / "rank{rank}.json", max_storages=2)
    found = json.loads((tmp_path / "rank0.json").read_text())
    assert written == str((tmp_path / "rank0.json").resolve())
    assert (found["rank"], found["live"], found["peak"], found["capacity"]) == (0, 68, 188, 1000)
    assert [(row["bytes"], row["shape"], row["dtype"]) for row in found["storages"]] == [
        (40, [2, 5], "float32"),
        (16, [4], "float32"),
    ]
    assert all(row["made_by"] == "aten.zeros.default" and row["stack"][0].startswith(__file__) for row in found["storages"])
    assert found["left_out"] == 1
    assert len(kept) == 3


def test_snapshot_overwrites_an_existing_file(tmp_path):
    (tmp_path / "now.json").write_text("before")
    with memory_budget(1000):
        write_snapshot(str(tmp_path / "now.json"))
    assert json.loads((tmp_path / "now.json").read_text())["storages"] == []
    assert [path.name for path in tmp_path.iterdir()] == ["now.json"]


def test_snapshot_on_cpu_without_a_budget_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"device must be a CUDA device, got cpu. On a CPU, use"):
        write_snapshot(tmp_path / "now.json")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_snapshot_on_cuda_is_the_torch_memory_snapshot(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "dtrain.memory.snapshot.get_dist_info", lambda: type("Info", (), {"rank": 3, "device": torch.device("cuda", 0)})
    )
    kept = torch.zeros(1 << 20, device="cuda")
    write_snapshot(tmp_path / "rank{rank}.pickle")
    found = pickle.loads((tmp_path / "rank3.pickle").read_bytes())
    assert sum(segment["allocated_size"] for segment in found["segments"]) >= kept.nbytes
