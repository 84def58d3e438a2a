"""``dtrain checkpoints list`` and ``verify``: what is listed and verified, and what damage does to both."""

from __future__ import annotations

import json
import os
import re
import shutil
from datetime import datetime

import pytest

from checkpoint.states import plain_state, train, write_of_another_version
from dtrain.checkpoint import layout
from dtrain.checkpoint.save import save_sharded

VALID = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d +[0-9.]+ KiB +1 +all +[0-9a-f]{8} "
CORRUPT = r"\*  2 +[-0-9]+ [0-9:]+  - +- +- +- +- +corrupt: manifest.json: .*"


def flip(path, at=0.5):
    data = bytearray(path.read_bytes())
    data[int(at * (len(data) - 1))] ^= 4
    path.write_bytes(data)


def test_list_shows_steps_in_commit_order(checkpoints, root):
    code, out, err = checkpoints("list", "root")
    head, first, second = out.splitlines()
    assert (code, err) == (0, "")
    assert head.split("  ")[-1] == "manifest"
    assert re.fullmatch(rf"   1     {VALID} +- +valid", first)
    assert re.fullmatch(rf"\*  2     {VALID} +1 +valid", second)


def test_list_marks_last_committed_step_after_going_back(checkpoints, root):
    manifest = root / "step-00000001" / "manifest.json"
    shutil.rmtree(root / "step-00000001")
    save_sharded(root, train(plain_state(1), 1))
    assert manifest.exists()
    lines = checkpoints("list", "root")[1].splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [["2", lines[1].split()[1]], ["*", "1"]]


def test_list_shows_corrupt_manifest(checkpoints, root):
    flip(root / "step-00000002" / "manifest.json")
    code, out, err = checkpoints("list", "root")
    assert (code, err) == (0, "")
    assert re.fullmatch(rf"   1     {VALID} +- +valid", out.splitlines()[1])
    assert re.fullmatch(CORRUPT, out.splitlines()[2])


def test_list_reports_empty_root(checkpoints, root):
    (root.parent / "empty").mkdir()
    assert checkpoints("list", "empty") == (0, "no checkpoints in empty\n", "")


def test_verify_checks_newest_step_of_root(checkpoints, root):
    flip(root / "step-00000001" / "rank-00000.safetensors")
    code, out, err = checkpoints("verify", "--deep", "root")
    assert (code, err) == (0, "")
    assert re.fullmatch(r"step-00000002: ok, [0-9.]+ KiB of 1 rank \(every byte read\)\n", out)


def test_verify_checks_given_step(checkpoints, root):
    flip(root / "step-00000002" / "manifest.json")
    code, out, _ = checkpoints("verify", "root/step-00000001")
    assert (code, out.startswith("step-00000001: ok, ")) == (0, True)


@pytest.mark.parametrize("name", ["manifest.json", "rank-00000.json", "rank-00000.safetensors"])
def test_verify_deep_finds_flipped_bit_and_names_file(checkpoints, root, name):
    flip(root / "step-00000002" / name)
    code, out, err = checkpoints("verify", "root", "--deep")
    assert (code, err) == (1, "")
    assert re.fullmatch(rf"step-00000002: corrupt: {name}: .*\n", out)


def test_verify_reads_no_tensor_data_by_default(checkpoints, root):
    flip(root / "step-00000002" / "rank-00000.safetensors")
    code, out, err = checkpoints("verify", "root")
    assert (code, err) == (0, "")
    assert re.fullmatch(r"step-00000002: ok, .* of 1 rank \(manifest, sizes and indexes; --deep reads every byte\)\n", out)


@pytest.mark.parametrize("name", ["manifest.json", "rank-00000.json"])
def test_verify_finds_flipped_bit_in_metadata(checkpoints, root, name):
    flip(root / "step-00000002" / name)
    code, out, _ = checkpoints("verify", "root")
    assert code == 1
    assert re.fullmatch(rf"step-00000002: corrupt: {name}: .*\n", out)


def test_verify_finds_truncated_or_missing_file(checkpoints, root):
    path = root / "step-00000002" / "rank-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert re.fullmatch(r"step-00000002: corrupt: rank-00000.safetensors: size must be .*\n", checkpoints("verify", "root")[1])
    path.unlink()
    assert checkpoints("verify", "root")[:2] == (1, "step-00000002: corrupt: rank-00000.safetensors: file is missing\n")


def test_verify_json_has_a_record_for_every_step(checkpoints, root):
    flip(root / "step-00000001" / "rank-00000.safetensors")
    code, out, err = checkpoints("verify", "root", "--all", "--deep", "--json")
    found = json.loads(out)
    first, second = found["steps"]
    assert (code, err, found["deep"]) == (1, "", True)
    assert (first["path"], first["ok"], first["removed"]) == (str(root / "step-00000001"), False, False)
    assert first["problem"].startswith("corrupt: rank-00000.safetensors: ")
    assert list(first) == list(second)
    assert {"step": 2, "ok": True, "problem": None, "world_size": 1}.items() <= second.items()


def test_list_json_has_stable_fields(checkpoints, root):
    flip(root / "step-00000002" / "manifest.json")
    code, out, err = checkpoints("list", "root", "--json")
    found = json.loads(out)
    good, bad = found["steps"]
    assert (code, err, found["root"]) == (0, "", str(root))
    assert list(good) == list(bad)
    assert {
        "step": 1,
        "path": str(root / "step-00000001"),
        "latest": False,
        "valid": True,
        "problem": None,
    }.items() <= good.items()
    assert {"world_size": 1, "what": "all", "holds": list(layout.SECTIONS["all"]), "parent_step": None}.items() <= good.items()
    assert datetime.fromisoformat(good["committed_at"]).tzinfo is not None
    assert {"step": 2, "latest": True, "valid": False, "bytes": None}.items() <= bad.items()
    assert bad["problem"].startswith("manifest.json: ")


def test_list_json_of_empty_root_is_empty_list(checkpoints, root):
    (root.parent / "empty").mkdir()
    assert json.loads(checkpoints("list", "empty", "--json")[1]) == {"root": str(root.parent / "empty"), "steps": []}


def test_list_shows_which_steps_hold_only_weights(checkpoints, root):
    save_sharded("weights", train(plain_state(), 3), what="weights")
    for name, expected in (("root", "all"), ("weights", "weights")):
        lines = checkpoints("list", name)[1].splitlines()
        assert {line.split()[-4] for line in lines[1:]} == {expected}


def test_verify_all_has_a_line_for_every_step(checkpoints, root):
    flip(root / "step-00000001" / "rank-00000.safetensors")
    code, out, _ = checkpoints("verify", "root", "--all", "--deep")
    first, second = out.splitlines()
    assert code == 1
    assert first.startswith("step-00000001: corrupt: rank-00000.safetensors: ")
    assert second.startswith("step-00000002: ok, ")
    shutil.rmtree(root / "step-00000001")
    assert checkpoints("verify", "--all", "root")[0] == 0


def test_verify_distinguishes_unreadable_from_corrupt(checkpoints, root):
    write_of_another_version(root / "step-00000002")
    code, out, err = checkpoints("verify", "root/step-00000002")
    assert (code, err) == (1, "")
    assert out.startswith("step-00000002: cannot be read: manifest.json: format version must be 1, got 9")


def test_step_of_other_format_version_fails_list_with_one_line(checkpoints, root):
    write_of_another_version(root / "step-00000002")
    code, out, err = checkpoints("list", "root")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert err.startswith(f"dtrain: {root / 'step-00000002'}: manifest.json: format version must be 1, got 9")


def test_verify_refuses_incomplete_save(checkpoints, root):
    (root / "step-00000002" / "manifest.json").unlink()
    code, out, err = checkpoints("verify", "root/step-00000002")
    assert (code, out) == (1, "")
    assert err.startswith("dtrain: checkpoints: verify: ")
    assert err.endswith("has no manifest.json, because its save was not completed. Load another step.\n")


@pytest.mark.parametrize("command", ["list", "verify"])
def test_unreadable_root_prints_one_line(checkpoints, root, monkeypatch, command):
    from dtrain import storage

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(storage.local.os, "listdir", refuse)
    code, out, err = checkpoints(command, "root")
    assert (code, out) == (1, "")
    assert err.startswith(f"dtrain: checkpoints: {command}: [Errno 13] Permission denied: ")
    assert err.count("\n") == 1


MISTAKES = {
    "list: no folder": (["list", "nope"], "list: no such folder: 'nope'. Check the path."),
    "list: an empty path": (["list", ""], "list: no such folder: ''. Check the path."),
    "verify: an empty path": (["verify", "--all", ""], "verify: no such folder: ''. Check the path."),
    "list: a file": (["list", "root/step-00000001/manifest.json"], "list: no such folder: "),
    "list: a step": (
        ["list", "root/step-00000001"],
        "list: 'root/step-00000001' is the folder of one step. Name the folder that",
    ),
    "verify: no folder": (["verify", "nope"], "verify: no such folder: 'nope'. Check the path."),
    "verify: nothing there": (["verify", "."], "verify: no checkpoints in '.'. Name a step"),
    "verify: nothing there at all": (["verify", "--all", "."], "verify: no checkpoints in '.'. Name a step"),
    "verify: all of a step": (["verify", "--all", "root/step-00000001"], "verify: 'root/step-00000001' is the folder of one"),
}


@pytest.mark.parametrize(("args", "expected"), MISTAKES.values(), ids=MISTAKES)
def test_invalid_arguments_print_one_line(checkpoints, root, args, expected):
    code, out, err = checkpoints(*args)
    assert (code, out) == (2, "")
    assert err.startswith(f"dtrain: checkpoints: {expected}")
    assert err.count("\n") == 1


@pytest.fixture
def removed_while_read(root, monkeypatch):
    """Step 1 goes, as when a run removes it, after it was found and before it is looked at again."""
    from dtrain.checkpoint import checkpoint_info, reader

    read = checkpoint_info.scan_root

    def survey(folder):
        found = read(folder)
        if (root / "step-00000001").exists():
            (root / "step-00000001").rename(root / f"step-00000001.old-{'0' * 8}-{'0' * 8}")
        return found

    monkeypatch.setattr(checkpoint_info, "scan_root", survey)
    monkeypatch.setattr(reader, "scan_root", survey)


def test_list_tolerates_step_removed_during_read(checkpoints, removed_while_read):
    code, out, err = checkpoints("list", "root")
    assert (code, err) == (0, "")
    assert re.fullmatch(r"   1 +- +[0-9.]+ KiB .* valid", out.splitlines()[1])


def test_verify_reports_step_removed_during_read_as_removed(checkpoints, removed_while_read):
    code, out, err = checkpoints("verify", "root", "--all")
    assert (code, err) == (0, "")
    assert re.fullmatch(r"step-00000001: removed while it was read\nstep-00000002: ok, .*\n", out)


def test_list_and_verify_change_no_files(checkpoints, root):
    before = {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in root.rglob("*")}
    checkpoints("list", "root")
    checkpoints("verify", "--all", "--deep", "root")
    assert {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in root.rglob("*")} == before
    assert os.listdir(root.parent) == ["root"]
