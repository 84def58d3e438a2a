"""Every change to the files of a committed step is detected, names the file, and leaves the state unchanged."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from checkpoint.states import digest, plain_state, train
from checkpoint.stored import json_of, shards_of
from dtrain.checkpoint import data_file, layout
from dtrain.checkpoint.checkpoint_info import latest_checkpoint, list_steps
from dtrain.checkpoint.load import load_sharded
from dtrain.checkpoint.reader import verify
from dtrain.checkpoint.save import save_sharded
from dtrain.errors import CheckpointError, CorruptCheckpointError
from mutations import flip_bits

FILES = ["manifest.json", "rank-00000.json", "rank-00000.safetensors", "index.json"]
Damage = Callable[[Path, Path, Path], None]


def flip(name: str, where: float) -> Damage:
    def damage(step: Path, older: Path, foreign: Path) -> None:
        flip_bits(step / name, where, 4)

    return damage


def truncate(name: str, keep: float) -> Damage:
    return lambda step, older, foreign: os.truncate(step / name, int((step / name).stat().st_size * keep))


def append(name: str) -> Damage:
    return lambda step, older, foreign: (step / name).write_bytes((step / name).read_bytes() + b" ")


def missing(name: str) -> Damage:
    return lambda step, older, foreign: (step / name).unlink()


def of_older(name: str) -> Damage:
    return lambda step, older, foreign: shutil.copy(older / name, step / name)


def of_other_run(name: str) -> Damage:
    return lambda step, older, foreign: shutil.copy(foreign / name, step / name)


def folder_instead(name: str) -> Damage:
    return lambda step, older, foreign: ((step / name).unlink(), (step / name).mkdir())


def pipe_instead(name: str) -> Damage:
    return lambda step, older, foreign: ((step / name).unlink(), os.mkfifo(step / name))


def zero_page(step: Path, older: Path, foreign: Path) -> None:
    data = bytearray((step / FILES[2]).read_bytes())
    data[4096:8192] = bytes(4096)
    (step / FILES[2]).write_bytes(data)


DAMAGE: dict[str, tuple[Damage, str]] = {
    # ``faults/test_flips.py`` flips bits anywhere.
    **{f"flip {name}": (flip(name, 0.3), name) for name in FILES},
    **{f"truncate {name} {share}": (truncate(name, share), name) for name in FILES for share in (0.0, 0.999)},
    **{f"append {name}": (append(name), name) for name in FILES},
    **{f"missing {name}": (missing(name), name) for name in FILES[1:]},
    **{f"older {name}": (of_older(name), name) for name in FILES},
    **{f"folder {name}": (folder_instead(name), name) for name in FILES},
    **{f"pipe {name}": (pipe_instead(name), name) for name in FILES},
    "zeroed page": (zero_page, FILES[2]),
    "index of another run": (of_other_run(FILES[1]), FILES[1]),
    "data of another run": (of_other_run(FILES[2]), FILES[2]),
    "manifest of another run": (of_other_run(FILES[0]), FILES[3]),
    "unexpected file": (lambda step, older, foreign: (step / "rank-00001.json").write_text("{}"), "rank-00001.json"),
    "foreign hidden file": (lambda step, older, foreign: (step / ".x").touch(), ".x"),
    "foreign folder": (lambda step, older, foreign: (step / "more").mkdir(), "more"),
}


@pytest.fixture(scope="module")
def clean(tmp_path_factory) -> Path:
    """Two steps of one run under ``root``, and the same steps of another run under ``other``."""
    folder = tmp_path_factory.mktemp("clean")
    for name, seed in (("root", 0), ("other", 1)):
        state = train(plain_state(seed), 1)
        save_sharded(folder / name, state)
        save_sharded(folder / name, train(state, 1))
    return folder


@pytest.fixture
def root(clean, tmp_path) -> Path:
    shutil.copytree(clean, tmp_path / "copy")
    return tmp_path / "copy" / "root"


def apply(damage: Damage, root: Path) -> Path:
    step = root / "step-00000002"
    damage(step, root / "step-00000001", root.parent / "other" / "step-00000002")
    return step


@pytest.mark.parametrize(("damage", "name"), DAMAGE.values(), ids=DAMAGE)
def test_corruption_error_names_file_and_older_step(root, damage, name):
    step = apply(damage, root)
    state = train(plain_state(7), 3)
    before = digest(state)
    message = rf"{step} is corrupt: rank 0: {name}.*The newest older valid step is {root}/step-00000001. Load that folder"
    for path in (root, step):
        with pytest.raises(CorruptCheckpointError, match=message):
            load_sharded(path, state)
    assert digest(state) == before
    state._check_not_stale("here")
    assert state._run_context.lineage.run_id is None
    with pytest.raises(CorruptCheckpointError, match=rf"verify: {step}: {name}"):
        verify(step)


REFUSED = {title: case for title, case in DAMAGE.items() if title.startswith(("flip", "missing", "unexpected"))}


@pytest.mark.parametrize(("damage", "name"), REFUSED.values(), ids=REFUSED)
def test_on_corrupt_previous_loads_previous_step(root, damage, name):
    step = apply(damage, root)
    with pytest.warns(UserWarning, match=rf"{step} is corrupt: rank 0: {name}.*. Loading {root}/step-00000001 instead"):
        restored = load_sharded(root, plain_state(7), on_corrupt="previous")
    assert restored.step == 1
    assert digest(restored) == digest(load_sharded(root / "step-00000001", plain_state()))


@pytest.mark.parametrize("name", FILES[1:])
@pytest.mark.parametrize("damage", [append, lambda name: truncate(name, 0.5)], ids=["longer", "shorter"])
def test_wrong_file_size_is_reported(root, name, damage):
    apply(damage(name), root)
    with pytest.raises(CorruptCheckpointError, match=rf"{name}: size must be \d+ bytes as in the index of the step, got \d+"):
        load_sharded(root, plain_state())


@pytest.mark.parametrize("on_corrupt", ["raise", "previous"])
def test_load_is_refused_when_every_step_is_corrupt(root, on_corrupt):
    for step in root.iterdir():
        flip(FILES[2], 0.5)(step, step, step)
    state = plain_state()
    before = digest(state)
    with pytest.raises(CorruptCheckpointError, match="The root has no older valid step"):
        load_sharded(root, state, on_corrupt=on_corrupt)
    assert digest(state) == before


def test_offered_older_step_is_verified(root):
    state = load_sharded(root, plain_state())
    save_sharded(root, train(state, 1))
    flip(FILES[2], 0.5)(root / "step-00000003", root, root)
    flip(FILES[1], 0.5)(root / "step-00000002", root, root)
    with pytest.raises(CorruptCheckpointError, match=r"step-00000003 is corrupt.*valid step is .*step-00000001"):
        load_sharded(root, plain_state())


def test_listing_skips_corrupt_manifest_with_warning(root):
    apply(flip(FILES[0], 0.5), root)
    with pytest.warns(UserWarning, match=r"step-00000002 is corrupt and skipped: manifest.json"):
        assert [c.step for c in list_steps(root)] == [1]
    with pytest.warns(UserWarning, match="skipped"):
        assert latest_checkpoint(root) == root / "step-00000001"


def test_resumed_run_replaces_later_corrupt_step(root):
    step = apply(flip(FILES[0], 0.5), root)
    with pytest.warns(UserWarning, match="Loading"):
        state = load_sharded(root, plain_state(), on_corrupt="previous")
    with pytest.warns(UserWarning, match=r"step-00000002 is not a valid checkpoint and was renamed to step-00000002.aside-"):
        save_sharded(root, train(state, 1))
    assert verify(step).step == 2


def test_later_format_version_is_refused_with_on_corrupt_previous(root):
    step = root / "step-00000002"
    manifest = layout.parse_manifest((step / "manifest.json").read_bytes())
    (step / "manifest.json").write_bytes(layout._sign({"format": layout.FORMAT, "version": 5, "step": manifest.step}))
    with pytest.raises(CheckpointError, match="format version must be 4, got 5"):
        load_sharded(root, plain_state(), on_corrupt="previous")


def test_renamed_step_folder_is_refused(root):
    (root / "step-00000002").rename(root / "step-00000005")
    with pytest.raises(CorruptCheckpointError, match=r"manifest.json: step must be 5 as in the folder's name, got 2"):
        load_sharded(root, plain_state())


def test_load_verifies_only_needed_chunks(root, monkeypatch):
    for module in (layout, data_file):
        monkeypatch.setattr(module, "CHUNK_BYTES", 512)
    state = plain_state(3)
    small = root.parent / "small"
    step = save_sharded(small, state, extra={"table": torch.arange(4096)}).path
    data = step / FILES[2]
    assert len(json_of(step, FILES[1])["blocks"][0]["ends"]) > 20
    content = data.read_bytes()
    shard = shards_of(step)["extra/table"]
    altered = bytearray(content)
    altered[(shard.begin + shard.end) // 2] ^= 1
    data.write_bytes(altered)
    assert load_sharded(small, plain_state(), ignore=["extra/table"]).step == 0, "nobody asked for the damaged chunk"
    with pytest.raises(CorruptCheckpointError, match=r"rank-00000.safetensors: bytes from \d+ on do not match"):
        load_sharded(small, plain_state(), extra={"table": torch.zeros(4096, dtype=torch.int64)})
    with pytest.raises(CorruptCheckpointError, match=FILES[2]):
        verify(small)


def test_load_verifies_all_needed_chunks_before_changing_state(tmp_path, monkeypatch):
    for module in (layout, data_file):
        monkeypatch.setattr(module, "CHUNK_BYTES", 512)
    data = save_sharded(tmp_path, train(plain_state(), 1)).path / FILES[2]
    content = data.read_bytes()
    for key, shard in shards_of(data.parent).items():
        altered = bytearray(content)
        altered[(shard.begin + shard.end) // 2] ^= 1
        data.write_bytes(altered)
        state = plain_state(3)
        before = digest(state)
        with pytest.raises(CorruptCheckpointError, match=FILES[2]):
            load_sharded(tmp_path, state)
        assert digest(state) == before, key
        state._check_not_stale("here")


def test_load_applies_verified_bytes_without_rereading(root, monkeypatch):
    """Files that change after they were read and verified change nothing: they are not read again."""
    from dtrain.checkpoint import load

    expected = digest(load_sharded(root, plain_state()))
    original = load._apply

    def damage_then_take_over(*args):
        flip(FILES[2], 0.99)(root / "step-00000002", root, root)
        return original(*args)

    monkeypatch.setattr(load, "_apply", damage_then_take_over)
    assert digest(load_sharded(root, plain_state(3))) == expected
