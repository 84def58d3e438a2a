"""From files that run code: only when they are trusted, and in a process of its own."""

import os
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from dtrain.checkpoint.conversion import unpickle_subprocess
from dtrain.checkpoint.conversion.convert import convert
from dtrain.errors import CheckpointError, ConfigError

WEIGHTS = {"a.weight": torch.arange(6.0).reshape(2, 3), "b": torch.tensor([1, 2]), "c": torch.ones(3, dtype=torch.bfloat16)}


class Payload:
    """Says which process it was read in."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.system, (f"echo $PPID > {self.path}",)


def nothing_beside(folder, *names):
    return sorted(os.listdir(folder)) == sorted(names)


@pytest.mark.parametrize("name", ["x.pt", "x.pth", "x.bin", "x.ckpt"])
def test_untrusted_pickle_is_refused_without_unpickling(tmp_path, name):
    torch.save({"weights": WEIGHTS, "payload": Payload(tmp_path / "ran")}, tmp_path / name)
    with pytest.raises(ConfigError, match=r"is a pickle, and reading it runs its code. Pass trust \(--trust\) if you know"):
        convert(tmp_path / name, tmp_path / "out", to="hf")
    assert nothing_beside(tmp_path, name)


def test_untrusted_dcp_folder_is_refused_without_unpickling(tmp_path):
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(Payload(tmp_path / "ran")))
    with pytest.raises(ConfigError, match=r"is a folder of torch.distributed.checkpoint, which holds a pickle"):
        convert(tmp_path / "dcp", tmp_path / "out", to="hf")
    assert nothing_beside(tmp_path, "dcp")


@pytest.mark.costly
def test_trusted_pickle_is_read_in_subprocess(tmp_path):
    torch.save({"model": WEIGHTS, "step": 3, "payload": Payload(tmp_path / "ran")}, tmp_path / "x.pt")
    done = convert(tmp_path / "x.pt", tmp_path / "out", to="hf", trust=True)
    reader = int((tmp_path / "ran").read_text())
    assert reader != os.getpid()
    assert not os.path.exists(f"/proc/{reader}")
    weights = load_file(done.path / "model.safetensors")
    assert weights.keys() == WEIGHTS.keys()
    assert all(torch.equal(weights[name], WEIGHTS[name]) for name in WEIGHTS)
    assert nothing_beside(tmp_path, "x.pt", "ran", "out")


@pytest.mark.costly
def test_empty_key_selects_top_level_weights(tmp_path):
    torch.save({**WEIGHTS, "optimizer": {"a.weight": torch.zeros(2)}}, tmp_path / "x.pt")
    done = convert(tmp_path / "x.pt", tmp_path / "out", to="hf", trust=True, key="")
    assert load_file(done.path / "model.safetensors").keys() == WEIGHTS.keys()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("limit", [10, 2**20])
def test_dcp_folder_is_read_in_batches(tmp_path, monkeypatch, limit):
    monkeypatch.setattr(unpickle_subprocess, "BUFFER_BYTES", limit)
    state = {"model": WEIGHTS, "optimizer": {"exp_avg": {"b": torch.zeros(2)}}, "step": 3}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "dcp"), no_dist=True)
    assert unpickle_subprocess.main("dcp", str(tmp_path / "dcp"), str(tmp_path / "out.safetensors"), "model") == 0
    weights = load_file(tmp_path / "out.safetensors")
    assert weights.keys() == WEIGHTS.keys()
    assert all(torch.equal(weights[name], WEIGHTS[name]) for name in WEIGHTS)


@pytest.mark.costly
def test_unreadable_trusted_file_leaves_no_output(tmp_path):
    (tmp_path / "x.pt").write_bytes(b"no pickle\n" * 10)
    with pytest.raises(CheckpointError, match=r"^convert: .*x.pt: UnpicklingError: "):
        convert(tmp_path / "x.pt", tmp_path / "out", to="hf", trust=True)
    assert nothing_beside(tmp_path, "x.pt")


@pytest.fixture
def program(tmp_path, capsys):
    """Return ``program(tree, key)``: the tensors that the program reads from a file of ``torch.save``, or its error."""

    def run(tree, key=None, **options):
        torch.save(tree, tmp_path / "x.pt", **options)
        out = tmp_path / "out.safetensors"
        code = unpickle_subprocess.main("pt", str(tmp_path / "x.pt"), str(out), *([] if key is None else [key]))
        err = capsys.readouterr().err
        assert (code == 0) == (not err)
        return load_file(out) if code == 0 else err

    return run


TREES = {
    "flat": (WEIGHTS, None),
    "the only dict with tensors": ({"state": {"model": WEIGHTS}, "epoch": 1}, None),
    "a dict by name": ({"model": WEIGHTS, "other": {"x": torch.ones(1)}}, "model"),
    "a dict in a dict": ({"state": {"model": WEIGHTS, "ema": WEIGHTS}}, "state/model"),
    "the dict at the top, beside others": ({**WEIGHTS, "optimizer": {"x": torch.ones(1)}}, ""),  # as torchtitan has it
}


@pytest.mark.parametrize(("tree", "key"), TREES.values(), ids=TREES)
def test_weights_are_found_in_nested_dicts(program, tree, key):
    weights = program(tree, key)
    assert weights.keys() == WEIGHTS.keys()
    assert all(torch.equal(weights[name], WEIGHTS[name]) for name in WEIGHTS)


def test_legacy_torch_format_is_read(program):
    assert program(WEIGHTS, _use_new_zipfile_serialization=False).keys() == WEIGHTS.keys()


def test_pickled_module_yields_its_state_dict(program):
    model = torch.nn.Linear(2, 3)
    assert program({"model": model}).keys() == model.state_dict().keys()


def test_tied_and_strided_tensors_are_written_contiguously(program):
    whole = torch.arange(12.0).reshape(3, 4)
    weights = program({"a": whole, "b": whole, "columns": whole.t(), "part": whole[1]})
    assert torch.equal(weights["b"], whole)
    assert torch.equal(weights["columns"], whole.t())
    assert torch.equal(weights["part"], whole[1])


COMPLAINTS = {
    "several dicts": (
        {"model": WEIGHTS, "ema": WEIGHTS, "x": torch.ones(1)},
        None,
        r"ConfigError: convert: .*x.pt: there are several dicts of tensors \(3 in 'model', 3 in 'ema', 1 in ''\). Name",
    ),
    "no such dict": ({"model": WEIGHTS}, "ema", r"ConfigError: .*there are no tensors in 'ema' \(3 in 'model'\)"),
    "no tensors": ({"model": 3}, None, "ConfigError: convert: path must hold tensors, got .*x.pt"),
    "a dtype": (
        {"a": torch.ones(2, dtype=torch.complex64)},
        None,
        "CheckpointError: .*a: dtype must be one of safetensors files, got torch.complex64",
    ),
}


@pytest.mark.parametrize(("tree", "key", "expected"), COMPLAINTS.values(), ids=COMPLAINTS)
def test_invalid_pickle_content_gives_one_line_error(program, tree, key, expected):
    complaint = program(tree, key)
    assert complaint.count("\n") == 1
    with pytest.raises(ConfigError, match=expected):
        raise ConfigError(complaint)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_incomplete_dcp_folder_gives_one_line_error(tmp_path, capsys):
    dcp.save(WEIGHTS, storage_writer=dcp.FileSystemWriter(tmp_path / "dcp"), no_dist=True)
    (tmp_path / "dcp" / "__0_0.distcp").unlink()
    assert unpickle_subprocess.main("dcp", str(tmp_path / "dcp"), str(tmp_path / "out.safetensors")) == 1
    complaint = capsys.readouterr().err
    assert complaint.startswith(f"CheckpointError: convert: {tmp_path / 'dcp'}: FileNotFoundError: ")
    assert complaint.count("\n") == 1
