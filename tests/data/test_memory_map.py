"""TensorDicts on disk, one for all ranks of a node."""

import re

import pytest
import torch
from tensordict import TensorDict

import dtrain as dt


def make() -> TensorDict:
    return TensorDict({"x": torch.arange(12), "more": {"y": torch.zeros(12, 2)}}, batch_size=[12])


def mapped(folder: str) -> tuple[list[int], list[str], int]:
    made = []
    data = dt.data.memory_map(folder, lambda: made.append(1) or make())
    batches = dt.build_loader(data, mesh=dt.build_mesh(), global_batch_size=6, seed=0, shuffle=False).until("1ep")
    address = data["x"].data_ptr()
    with open("/proc/self/maps") as lines:
        spans = [line for line in lines if folder in line]
    inside = any(int(line.split("-")[0], 16) <= address < int(re.split("[- ]", line)[1], 16) for line in spans)
    return [int(number) for batch in batches for number in batch["x"]], ["mapped" if inside else "copied"], len(made)


def test_one_rank_per_node_writes_and_all_ranks_map(ranks, tmp_path):
    first, second = ranks(2).run(mapped, str(tmp_path / "data"))
    assert first == [[0, 1, 2, 6, 7, 8], ["mapped"], 1]
    assert second == [[3, 4, 5, 9, 10, 11], ["mapped"], 0]
    assert [made for *_, made in ranks(2).run(mapped, str(tmp_path / "data"))] == [0, 0]


@pytest.mark.parametrize(
    "bad", [{"x": torch.zeros(3)}, TensorDict({"x": torch.zeros(3)}, batch_size=[])], ids=["dict", "scalar"]
)
def test_non_tensordict_data_is_refused_and_leaves_no_folder(tmp_path, bad):
    with pytest.raises(dt.errors.ConfigError, match="make must return a TensorDict with a batch size"):
        dt.data.memory_map(tmp_path / "data", lambda: bad)
    assert not list(tmp_path.iterdir())


def test_a_partial_folder_is_not_used(tmp_path):
    def interrupted() -> TensorDict:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        dt.data.memory_map(tmp_path / "data", interrupted)
    assert len(dt.data.memory_map(tmp_path / "data", make)) == 12
