"""All conversions: never half there, nothing left behind, one line for each mistake."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint.states import watching
from dtrain import storage
from dtrain.checkpoint.conversion.convert import convert
from dtrain.errors import CheckpointError, ConfigError, CorruptCheckpointError
from mutations import flip_bits

WEIGHTS = {"a": torch.randn(4, 3), "b": torch.arange(3)}


@pytest.fixture
def source(tmp_path):
    save_file(WEIGHTS, tmp_path / "x.safetensors")
    return tmp_path / "x.safetensors"


@pytest.mark.parametrize("to", ["hf", "dtrain"])
def test_failed_file_operation_leaves_no_output(source, to):
    """Every operation up to the rename; a failure after it cannot take the folder away again, and may leave an empty side
    folder."""
    folder = source.parent
    with watching() as all_of_it:
        convert(source, folder / "out", to=to)
    shutil.rmtree(folder / "out")
    last = len(all_of_it.calls) - 1 - all_of_it.calls[::-1].index("rename")
    assert last > 10
    for operation in range(last + 1):
        with watching(operation=operation) as watched:
            try:
                convert(source, folder / "out", to=to)
            except (OSError, CheckpointError, ConfigError):
                assert watched.fired
            else:
                # On a busy machine the first run may have waited, with more operations than this one.
                assert not watched.fired, f"operation {operation} failed without an error: {watched.calls[operation]}"
                shutil.rmtree(folder / "out")
        assert os.listdir(folder) == ["x.safetensors"], f"operation {operation}: {watched.calls[operation]}"


def test_existing_destination_is_refused_and_kept(source):
    (source.parent / "out").mkdir()
    with pytest.raises(ConfigError, match=r"destination must not exist, got .*out. Name a new folder"):
        convert(source, source.parent / "out", to="hf")
    assert os.listdir(source.parent / "out") == []


def test_destination_created_during_conversion_is_refused_and_kept(source):
    def make(nbytes):
        (source.parent / "out").mkdir(exist_ok=True)

    with pytest.raises(ConfigError, match="destination must not exist"):
        convert(source, source.parent / "out", to="hf", on_bytes_written=make)
    assert os.listdir(source.parent / "out") == []
    assert sorted(os.listdir(source.parent)) == ["out", "x.safetensors"]


def test_corrupt_source_is_refused_and_leaves_no_output(source):
    convert(source, source.parent / "root", to="dtrain")
    path = source.parent / "root" / "step-00000000" / "rank-00000.safetensors"
    flip_bits(path, -3)
    with pytest.raises(CorruptCheckpointError, match=r"rank-00000.safetensors: bytes from 0 on do not match"):
        convert(source.parent / "root", source.parent / "out", to="hf")
    assert sorted(os.listdir(source.parent)) == ["root", "x.safetensors"]


def test_progress_callbacks_sum_to_file_size(source):
    begun, wrote = [], []
    done = convert(source, source.parent / "out", to="hf", on_start=begun.append, on_bytes_written=wrote.append)
    assert begun == [done.bytes]
    assert sum(wrote) == (done.path / "model.safetensors").stat().st_size


def test_convert_copies_config_json_of_source_folder(source):
    folder = source.parent / "hf"
    folder.mkdir()
    source.rename(folder / "model.safetensors")
    (folder / "config.json").write_text('{"a": 1}')
    convert(folder, folder.parent / "out", to="hf", dtype="fp16")
    assert json.loads((folder.parent / "out" / "config.json").read_text()) == {"a": 1}
    weights = load_file(folder.parent / "out" / "model.safetensors")
    assert (weights["a"].dtype, weights["b"].dtype) == (torch.float16, torch.int64)


MISTAKES = {
    "no source": ({"path": "nope"}, "path must exist, got .*nope. Check the path"),
    "a strange file": ({"path": "x.txt"}, "path must be a checkpoint of dtrain, a folder with model.safetensors .*x.txt"),
    "a strange folder": ({"path": "."}, "path must be a checkpoint of dtrain"),
    "target": ({"to": "gguf"}, "to must be one of hf, peft, dtrain, dcp, safetensors, got 'gguf'"),
    "source format": ({"format": "gguf"}, "format must be one of dtrain, hf, dcp, pt, got 'gguf'"),
    "dtype": ({"dtype": "int3"}, "dtype must be one of fp32, bf16, fp16, got 'int3'"),
    "size": ({"max_shard_bytes": 0}, "max_shard_bytes must be at least 1, got 0"),
    "config": ({"config": "nope.json"}, "config must be a readable file: .*nope.json.*. Name the config.json of the model"),
    "config of another": ({"config": "x.txt", "to": "dtrain"}, "config must be None unless to is 'hf' or 'peft', got to='dt"),
    "merge for another": ({"merge": True, "to": "dcp"}, "merge must be False unless to is 'hf' or 'safetensors', got to='dcp'"),
    "adapter without config": ({"to": "peft"}, "config must hold adapter_config.json, got None. Write the file with model"),
    "step": ({"to": "dtrain", "step": -1}, "step must be at least 0, got -1"),
}


@pytest.mark.parametrize(("options", "expected"), MISTAKES.values(), ids=MISTAKES)
def test_invalid_options_are_refused_and_write_nothing(source, monkeypatch, options, expected):
    monkeypatch.chdir(source.parent)
    (source.parent / "x.txt").write_text("x")
    with pytest.raises((ConfigError, CheckpointError), match=expected):
        convert(**{"path": source, "destination": "out", "to": "hf", **options})
    assert sorted(os.listdir(source.parent)) == ["x.safetensors", "x.txt"]


def test_folder_of_pickles_is_refused_with_file_name(source):
    (source.parent / "old").mkdir()
    (source.parent / "old" / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"of pickles. Name one, such as pytorch_model.bin, and trust"):
        convert(source.parent / "old", source.parent / "out", to="hf")


@pytest.fixture
def on_a_server(source):
    """The URL of a root on a server (one in this process's memory)."""
    done = convert(source, source.parent / "root", to="dtrain")
    root = storage.resolve_path("memory://convert/root")
    storage.make_folders(root / done.path.name)
    for path in done.path.iterdir():
        storage.write_file(root / done.path.name / path.name, path.read_bytes())
    yield "memory://convert/root"
    storage.remove_folder(root)


def test_remote_source_is_converted(on_a_server, source):
    convert(on_a_server, source.parent / "out", to="hf")
    weights = load_file(source.parent / "out" / "model.safetensors")
    assert all(torch.equal(weights[name], WEIGHTS[name]) for name in WEIGHTS)


def test_remote_destination_is_refused(source):
    with pytest.raises(ConfigError, match="destination must be on this machine, got memory://convert/out"):
        convert(source, "memory://convert/out", to="hf")


_PEAK = """
import sys
from dtrain.checkpoint import weights
from dtrain.checkpoint.conversion import convert, write_formats


def resident(which):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(which))


weights.batch_regions.__kwdefaults__["limit"] = write_formats.BUFFER_BYTES = 8 * 2**20
convert.convert("x.safetensors", "warm", to=sys.argv[1])
open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew
before = resident("VmRSS")
convert.convert("big.safetensors", "out", to=sys.argv[1], dtype="bf16")
print(resident("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("to", ["hf", "dtrain", "dcp"])
def test_convert_uses_bounded_memory(source, to):
    largest = 2**24 if to == "dcp" else 2**26
    count = 2**28 // largest
    save_file({str(number): torch.randn(64, largest // 256) for number in range(count)}, source.parent / "big.safetensors")
    done = subprocess.run(
        [sys.executable, "-c", _PEAK, to], cwd=source.parent, capture_output=True, text=True, timeout=90, check=True
    )
    grown = int(done.stdout)
    # A batch and its cast, the chunks being read, and towards dcp a tensor of 16 MiB and its copies.
    assert grown < 64 * 2**20, f"{grown / 2**20:.0f} MiB for 256 MiB"
