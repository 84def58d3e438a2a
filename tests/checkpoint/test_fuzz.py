"""Mutated manifests, indexes and headers, with digests that are right again: each is read as it is, or refused in one line."""

import json
import shutil
import struct
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import dtrain as dt
from checkpoint.states import Net, plain_state, train
from checkpoint.stored import sign
from dtrain.checkpoint import layout
from dtrain.errors import CheckpointError, CheckpointMismatchError
from mutations import Mutation, mutate_bytes, mutate_json

EXTRA = {
    "note": {"text": "é"},
    "table": [1, 2.5, None, (3, {4: torch.ones(2)})],
    "own": dt.checkpoint.per_rank([torch.ones(2)]),
}
TENSORS = {
    "first.weight": torch.ones(7, 5),
    "first.bias": torch.ones(7),
    "last.weight": torch.ones(2, 7),
    "last.bias": torch.ones(2),
}

Mutate = Callable[[bytes, int], Mutation]


def signed_manifest(step: Path, mutate: Mutate, seed: int) -> str:
    """Mutate the content of the manifest; sign the result where it is JSON."""
    body = json.loads((step / "manifest.json").read_bytes())
    del body["sha256"]
    kind, data = mutate(json.dumps(body).encode(), seed)
    try:
        signed = layout._sign(json.loads(data))
    except (ValueError, TypeError, RecursionError):
        signed = data
    (step / "manifest.json").write_bytes(signed)
    return kind


def signed_rank_index(step: Path, mutate: Mutate, seed: int) -> str:
    """Mutate the index of rank 0, and sign it."""
    kind, data = mutate((step / "rank-00000.json").read_bytes(), seed)
    sign(step, ranks={0: data})
    return kind


def signed_index(step: Path, mutate: Mutate, seed: int) -> str:
    """Mutate the index of the run, and sign it in the manifest."""
    kind, data = mutate((step / "index.json").read_bytes(), seed)
    sign(step, index=data)
    return kind


def any_file(step: Path, mutate: Mutate, seed: int) -> str:
    """Mutate one of the JSON files, and sign nothing."""
    path = step / ("manifest.json", "rank-00000.json", "index.json")[seed % 3]
    kind, data = mutate(path.read_bytes(), seed)
    path.write_bytes(data)
    return kind


def header(folder: Path, mutate: Mutate, seed: int) -> str:
    """Mutate the header of a plain safetensors file, and give its right length."""
    path = folder / "model-00001-of-00001.safetensors"
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    kind, data = mutate(content[8 : 8 + length], seed)
    path.write_bytes(struct.pack("<Q", len(data)) + data + content[8 + length :])
    return kind


def whole_file(folder: Path, mutate: Mutate, seed: int) -> str:
    """Mutate any bytes of a plain safetensors file, its length field among them."""
    path = folder / "model-00001-of-00001.safetensors"
    kind, data = mutate_bytes(path.read_bytes(), seed)
    path.write_bytes(data)
    return kind


def weight_map(folder: Path, mutate: Mutate, seed: int) -> str:
    """Mutate the index of a folder of safetensors files."""
    path = folder / "model.safetensors.index.json"
    kind, data = mutate(path.read_bytes(), seed)
    path.write_bytes(data)
    return kind


ON_STEPS = {"manifest": signed_manifest, "rank index": signed_rank_index, "index": signed_index, "unsigned": any_file}
ON_WEIGHTS = {"header": header, "safetensors": whole_file, "weight map": weight_map}


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    """A step, and a folder of plain safetensors files."""
    root = tmp_path_factory.mktemp("sound")
    dt.save_sharded(root / "root", train(plain_state(), 1), extra=EXTRA)
    (root / "weights").mkdir()
    save_file({**TENSORS, "seen": torch.tensor(3)}, root / "weights" / "model-00001-of-00001.safetensors")
    names = dict.fromkeys([*TENSORS, "seen"], "model-00001-of-00001.safetensors")
    index = {"metadata": {"total_size": 1}, "weight_map": names}
    (root / "weights" / "model.safetensors.index.json").write_text(json.dumps(index))
    return root


def readers(folder: Path) -> dict[str, Callable[[], object]]:
    """The functions that read a folder."""
    calls: dict[str, Callable[[], object]] = {"load_weights_": lambda: dt.load_weights_(Net(), folder)}
    if folder.name == "weights":
        return calls
    return {
        **calls,
        "verify": lambda: dt.checkpoint.verify(folder),
        "load_sharded": lambda: dt.load_sharded(
            folder, plain_state(1), extra={"note": {}, "table": [], "own": dt.checkpoint.per_rank([])}
        ),
        "load_sharded, partly": lambda: dt.load_sharded(
            folder, plain_state(1), allow_cast=True, ignore=["extra/**", "optimizer"]
        ),
        "list_steps": lambda: dt.checkpoint.list_steps(folder.parent),
    }


def check(folder: Path, said: str) -> bool:
    """Have all readers read the folder; return True if one of them refused it."""
    refused = False
    for name, read in readers(folder).items():
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                read()
            refused |= bool(caught)
            texts = [str(warning.message) for warning in caught]
        except CheckpointError as error:
            refused = True
            texts = [str(error).splitlines()[0] if isinstance(error, CheckpointMismatchError) else str(error)]
        except Exception as error:
            raise AssertionError(f"{said}: {name} raised {type(error).__name__}") from error
        for text in texts:
            assert text.isprintable(), f"{said}: {name}: {text!r}"
            assert len(text) < 25_000, f"{said}: {name}: {text[:2000]!r}"
    return refused


def fuzz(sound: Path, folder: Path, place: str, seeds: range) -> int:
    """Read a mutated copy for each seed; return how many were refused."""
    refused = 0
    attack = {**ON_STEPS, **ON_WEIGHTS}[place]
    source = sound / ("weights" if place in ON_WEIGHTS else "root/step-00000001")
    target = folder / source.name
    for seed in seeds:
        shutil.copytree(source, target)
        mutate = mutate_json if seed % 4 else mutate_bytes
        kind = attack(target, mutate, seed)
        refused += check(target, f"{place}, seed {seed}, {kind}")
        shutil.rmtree(target)
    return refused


@pytest.mark.costly
@pytest.mark.parametrize("place", [*ON_STEPS, *ON_WEIGHTS])
def test_mutated_files_load_or_raise_one_line_error(sound, tmp_path, place, capfd):
    assert fuzz(sound, tmp_path, place, range(60)) > 30


def test_optimizer_values_of_another_type_are_refused(sound, tmp_path):
    # Seed 1487 makes a list of the values that belong to the whole optimizer.
    assert fuzz(sound, tmp_path, "index", range(1487, 1488)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("place", [*ON_STEPS, *ON_WEIGHTS])
def test_many_mutated_files_load_or_raise_one_line_error(sound, tmp_path, place, capfd):
    assert fuzz(sound, tmp_path, place, range(1000, 2700)) > 850


@pytest.mark.parametrize("source", ["weights", "root/step-00000001"])
def test_unmutated_files_are_accepted(sound, source):
    assert not check(sound / source, source)
