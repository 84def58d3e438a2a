"""Conversion to ``torch.distributed.checkpoint``: torch's own ``load`` reads the output."""

import errno
import os
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn

from checkpoint.conversion.models import MODELS, TIED, logits, saved
from dtrain.checkpoint.conversion.convert import convert
from dtrain.errors import CorruptCheckpointError
from mutations import flip_bits

ALONE = "ignore:torch.distributed is disabled:UserWarning"


def read_into_(tensors, folder):
    dcp.load(tensors, storage_reader=dcp.FileSystemReader(folder), no_dist=True)


@pytest.mark.filterwarnings(ALONE)
@pytest.mark.parametrize("key", [None, "model"])
def test_dcp_load_reads_every_tensor(tmp_path, key):
    model, other = MODELS["gpt2"](), MODELS["gpt2"](seed=1)
    convert(saved(model, tmp_path / "root"), tmp_path / "out", to="dcp", tie=TIED["gpt2"], key=key)
    tensors = other.state_dict()
    read_into_(tensors if key is None else {key: tensors}, tmp_path / "out")
    other.load_state_dict(tensors)
    assert torch.equal(logits(other), logits(model))


@pytest.mark.filterwarnings(ALONE)
def test_convert_preserves_dtypes_and_shapes(tmp_path):
    tensors = {
        "half": torch.randn(3, 2).to(torch.bfloat16),
        "whole": torch.arange(5),
        "flag": torch.tensor(True),
        "empty": torch.zeros(0, 3),
        "byte": torch.arange(200, dtype=torch.uint8),
    }
    save_file(tensors, tmp_path / "x.safetensors")
    done = convert(tmp_path / "x.safetensors", tmp_path / "out", to="dcp")
    assert done.bytes == sum(tensor.nbytes for tensor in tensors.values())
    copies = {name: torch.full_like(tensor, 1) for name, tensor in tensors.items()}
    read_into_(copies, tmp_path / "out")
    for name, tensor in tensors.items():
        assert torch.equal(copies[name], tensor), name


@pytest.mark.filterwarnings(ALONE)
@pytest.mark.parametrize("width", [8, 256], ids=["small", "large"])
def test_convert_holds_one_tensor_in_memory(tmp_path, monkeypatch, width):
    from dtrain.checkpoint.conversion import write_formats

    written = []
    resolve = write_formats._StreamingSavePlanner.resolve_data

    def recorded(planner, item):
        written.append(resolve(planner, item))
        return written[-1]

    monkeypatch.setattr(write_formats._StreamingSavePlanner, "resolve_data", recorded)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(6)))
    convert(saved(model, tmp_path / "root"), tmp_path / "out", to="dcp")
    assert len(written) == 6
    assert len({tensor.untyped_storage().data_ptr() for tensor in written}) == 1


def test_corrupt_source_raises_and_leaves_no_output(tmp_path):
    root = saved(nn.Linear(3, 3), tmp_path / "root")
    path = root / "step-00000000" / "rank-00000.safetensors"
    flip_bits(path, -1)
    with pytest.raises(CorruptCheckpointError, match=r"rank-00000.safetensors: bytes from 0 on do not match"):
        convert(root, tmp_path / "out", to="dcp")
    assert os.listdir(tmp_path) == ["root"]


def test_full_disk_raises_and_leaves_no_output(tmp_path, monkeypatch):
    def refuse(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    root = saved(nn.Linear(3, 3), tmp_path / "root")
    monkeypatch.setattr("torch.distributed.checkpoint.filesystem.os.fsync", refuse)
    monkeypatch.setattr("dtrain.storage.local.os", SimpleNamespace(**{**vars(os), "fsync": os.fdatasync}))
    with pytest.raises(OSError, match="No space left on device"):
        convert(root, tmp_path / "out", to="dcp")
    assert os.listdir(tmp_path) == ["root"]
