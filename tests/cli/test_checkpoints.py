"""``dtrain checkpoints list`` and ``verify``: their output, and the effect of damage on both."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint.filled import save_filled
from checkpoint.states import plain_state, train, write_of_another_version
from dtrain import storage
from dtrain.checkpoint import layout
from dtrain.checkpoint.conversion.convert import convert
from dtrain.checkpoint.save import save_sharded
from mutations import flip_bits

VALID = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d +[0-9.]+ KiB +1 +all +[0-9a-f]{8} "
CORRUPT = r"\*  2 +[-0-9]+ [0-9:]+  - +- +- +- +- +corrupt: manifest.json: .*"


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
    flip_bits(root / "step-00000002" / "manifest.json", 0.5, 4)
    code, out, err = checkpoints("list", "root")
    assert (code, err) == (0, "")
    assert re.fullmatch(rf"   1     {VALID} +- +valid", out.splitlines()[1])
    assert re.fullmatch(CORRUPT, out.splitlines()[2])


def test_list_and_prune_refuse_a_folder_without_checkpoints(checkpoints, root):
    (root.parent / "empty" / "checkpoints").mkdir(parents=True)
    for command in (["list", "empty"], ["prune", "empty", "--keep-last", "1"]):
        code, out, err = checkpoints(*command)
        assert (code, out) == (2, "")
        advice = "Name a step, the folder of the steps, or a run with checkpoints/."
        assert err == f"dtrain: checkpoints: {command[0]}: no checkpoints in 'empty'. {advice}\n"


def test_commands_find_the_checkpoints_of_a_run(checkpoints, root):
    root.rename("checkpoints")
    Path("run").mkdir()
    Path("checkpoints").rename("run/checkpoints")
    assert checkpoints("list", "run")[:2] == checkpoints("list", "run/checkpoints")[:2]
    assert [step["step"] for step in json.loads(checkpoints("list", "run", "--json")[1])["steps"]] == [1, 2]
    assert checkpoints("verify", "run", "--all")[1].count(": ok, ") == 2
    assert checkpoints("show", "run")[1].startswith("step 2 of run ")
    assert checkpoints("diff", "run", "run/checkpoints/step-00000002")[0] == 0
    assert checkpoints("convert", "run", "out.safetensors", "--to", "safetensors")[0] == 0
    assert checkpoints("prune", "run", "--keep-last", "1")[1].startswith("step-00000001: removed, ")
    # Steps in the folder itself come first.
    shutil.copytree("run/checkpoints/step-00000002", "run/step-00000007")
    assert "step-00000007" in checkpoints("verify", "run")[1]


def test_verify_checks_newest_step_of_root(checkpoints, root):
    flip_bits(root / "step-00000001" / "rank-00000.safetensors", 0.5, 4)
    code, out, err = checkpoints("verify", "--deep", "root")
    assert (code, err) == (0, "")
    assert re.fullmatch(r"step-00000002: ok, [0-9.]+ KiB of 1 rank \(every byte read\)\n", out)


def test_verify_checks_given_step(checkpoints, root):
    flip_bits(root / "step-00000002" / "manifest.json", 0.5, 4)
    code, out, _ = checkpoints("verify", "root/step-00000001")
    assert (code, out.startswith("step-00000001: ok, ")) == (0, True)


@pytest.mark.parametrize("name", ["manifest.json", "rank-00000.json", "rank-00000.safetensors"])
def test_verify_finds_flipped_bit_and_names_file(checkpoints, root, name):
    flip_bits(root / "step-00000002" / name, 0.5, 4)
    for options in (["--deep"], [] if name.endswith(".json") else ["--deep"]):
        code, out, err = checkpoints("verify", "root", *options)
        assert (code, err) == (1, "")
        assert re.fullmatch(rf"step-00000002: corrupt: {name}: .*\n", out)


def test_verify_reads_no_tensor_data_by_default(checkpoints, root):
    flip_bits(root / "step-00000002" / "rank-00000.safetensors", 0.5, 4)
    code, out, err = checkpoints("verify", "root")
    assert (code, err) == (0, "")
    assert re.fullmatch(r"step-00000002: ok, .* of 1 rank \(manifest, sizes and indexes; --deep reads every byte\)\n", out)


def test_verify_finds_truncated_or_missing_file(checkpoints, root):
    path = root / "step-00000002" / "rank-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert re.fullmatch(r"step-00000002: corrupt: rank-00000.safetensors: size must be .*\n", checkpoints("verify", "root")[1])
    path.unlink()
    assert checkpoints("verify", "root")[:2] == (1, "step-00000002: corrupt: rank-00000.safetensors: file is missing\n")


def test_verify_json_has_a_record_for_every_step(checkpoints, root):
    flip_bits(root / "step-00000001" / "rank-00000.safetensors", 0.5, 4)
    code, out, err = checkpoints("verify", "root", "--all", "--deep", "--json")
    report = json.loads(out)
    first, second = report["steps"]
    assert (code, err, report["deep"]) == (1, "", True)
    assert (first["path"], first["ok"], first["removed"]) == (str(root / "step-00000001"), False, False)
    assert first["problem"].startswith("corrupt: rank-00000.safetensors: ")
    assert list(first) == list(second)
    assert {"step": 2, "ok": True, "problem": None, "world_size": 1}.items() <= second.items()


def test_list_json_has_stable_fields(checkpoints, root):
    flip_bits(root / "step-00000002" / "manifest.json", 0.5, 4)
    code, out, err = checkpoints("list", "root", "--json")
    report = json.loads(out)
    good, bad = report["steps"]
    assert (code, err, report["root"]) == (0, "", str(root))
    assert list(good) == list(bad)
    assert {
        "step": 1,
        "path": str(root / "step-00000001"),
        "latest": False,
        "valid": True,
        "problem": None,
    }.items() <= good.items()
    assert {"world_size": 1, "scope": "all", "holds": list(layout.SECTIONS["all"]), "parent_step": None}.items() <= good.items()
    assert datetime.fromisoformat(good["committed_at"]).tzinfo is not None
    assert {"step": 2, "latest": True, "valid": False, "bytes": None}.items() <= bad.items()
    assert bad["problem"].startswith("manifest.json: ")


def test_list_json_of_empty_root_is_empty_list(checkpoints, root):
    (root.parent / "empty").mkdir()
    code, out, err = checkpoints("list", "empty", "--json")
    assert (code, err, json.loads(out)) == (2, "", {"root": str(root.parent / "empty"), "steps": []})


def test_list_shows_which_steps_hold_only_weights(checkpoints, root):
    save_sharded("weights", train(plain_state(), 3), scope="weights")
    for name, expected in (("root", "all"), ("weights", "weights")):
        lines = checkpoints("list", name)[1].splitlines()
        assert {line.split()[-4] for line in lines[1:]} == {expected}


def test_verify_all_has_a_line_for_every_step(checkpoints, root):
    flip_bits(root / "step-00000001" / "rank-00000.safetensors", 0.5, 4)
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
    assert out.startswith("step-00000002: cannot be read: manifest.json: format version must be 4, got 9")


def test_step_of_other_format_version_fails_list_with_one_line(checkpoints, root):
    write_of_another_version(root / "step-00000002")
    code, out, err = checkpoints("list", "root")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert err.startswith(f"dtrain: {root / 'step-00000002'}: manifest.json: format version must be 4, got 9")


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
    "list: no folder": ("list nope", "list: no such folder: 'nope'. Check the path."),
    "list: an empty path": ("list ''", "list: no such folder: ''. Check the path."),
    "verify: an empty path": ("verify --all ''", "verify: no such folder: ''. Check the path."),
    "list: a file": ("list root/step-00000001/manifest.json", "list: no such folder: "),
    "list: a step": ("list root/step-00000001", "list: 'root/step-00000001' is the folder of one step. Name the folder that"),
    "verify: no folder": ("verify nope", "verify: no such folder: 'nope'. Check the path."),
    "verify: nothing there": ("verify .", "verify: no checkpoints in '.'. Name a step"),
    "verify: nothing there at all": ("verify --all .", "verify: no checkpoints in '.'. Name a step"),
    "show: no folder": ("show nope", "show: no such folder: 'nope'. Check the path."),
    "show: nothing there": ("show .", "show: no checkpoints in '.'. Name a step"),
    "diff: no folder": ("diff root nope", "diff: no such folder: 'nope'. Check the path."),
    "diff: nothing there": ("diff . root", "diff: no checkpoints in '.'. Name a step"),
    "verify: all of a step": ("verify --all root/step-00000001", "verify: 'root/step-00000001' is the folder of one"),
}


@pytest.mark.parametrize(("args", "expected"), MISTAKES.values(), ids=MISTAKES)
def test_invalid_arguments_print_one_line(checkpoints, root, args, expected):
    code, out, err = checkpoints(*shlex.split(args))
    assert (code, out) == (2, "")
    assert err.startswith(f"dtrain: checkpoints: {expected}")
    assert err.count("\n") == 1


@pytest.fixture
def removed_while_read(root, monkeypatch):
    """Step 1 goes, as when a run removes it, after it was found and before it is looked at again."""
    from dtrain.checkpoint import checkpoint_info

    read = checkpoint_info.scan_root

    def survey(folder):
        checkpoints = read(folder)
        if (root / "step-00000001").exists():
            (root / "step-00000001").rename(root / f"step-00000001.old-{'0' * 8}-{'0' * 8}")
        return checkpoints

    monkeypatch.setattr(checkpoint_info, "scan_root", survey)


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


@pytest.fixture(scope="module")
def two_ranks(ranks, tmp_path_factory):
    """The folder of a step that two ranks wrote, sharded."""
    return ranks(2).run(save_filled, str(tmp_path_factory.mktemp("two") / "root"), "full_shard")[0][0]


@pytest.mark.costly
def test_show_prints_step_and_tensor_locations(checkpoints, two_ranks):
    code, out, err = checkpoints("show", two_ranks)
    head, rows = out.split("\n\n")
    first, second, third = head.splitlines()
    assert (code, err) == (0, "")
    assert first.startswith("step 4 of run ")
    assert second.startswith("written by 2 ranks, full_shard (dp_replicate 1 x dp_shard 2): ")
    assert third.startswith("holds params, buffers, modules, optimizer, transforms, clock, seed: ")
    lines = {line.split()[0]: line.split()[1:] for line in rows.splitlines()}
    assert lines["params/first.weight"] == ["F32", "[7,", "5]", "140", "B", "rank-00000,", "rank-00001"]
    assert lines["optimizer/state/first.weight/exp_avg_sq"][:3] == ["BF16", "[7,", "5]"]
    assert any(key.startswith("rank-00001/rng/") for key in lines)


def test_show_json_has_every_part(checkpoints, two_ranks):
    code, out, err = checkpoints("show", two_ranks, "--json", "--only", "params/first")
    report = json.loads(out)
    assert (code, err) == (0, "")
    assert {"step": 4, "world_size": 2, "path": two_ranks, "scope": "all", "states": []}.items() <= report.items()
    assert report["layout"] == {"strategy": "full_shard", "axes": ["dp_replicate", "dp_shard"], "shape": [1, 2]}
    assert [(file["rank"], file["name"]) for file in report["files"]] == [
        (0, "rank-00000.safetensors"),
        (1, "rank-00001.safetensors"),
    ]
    assert [tensor["key"] for tensor in report["tensors"]] == ["params/first.weight", "params/first.bias"]
    assert report["tensors"][0] == {
        "key": "params/first.weight",
        "dtype": "F32",
        "shape": [7, 5],
        "bytes": 140,
        "parts": [
            {"file": "rank-00000.safetensors", "offset": [0, 0], "size": [4, 5]},
            {"file": "rank-00001.safetensors", "offset": [4, 0], "size": [3, 5]},
        ],
    }


def test_show_escapes_terminal_control_characters(checkpoints, root):
    save_file({"a\x1b[2J\nb [red]c": torch.ones(2)}, "x.safetensors")
    convert("x.safetensors", "strange", to="dtrain")
    code, out, _ = checkpoints("show", "strange")
    assert code == 0
    assert r"params/a\x1b[2J\nb [red]c  F32" in out
    assert "\x1b" not in out


def test_show_refuses_corrupt_step_with_one_line(checkpoints, root):
    (root / "step-00000002" / "rank-00000.json").write_text("{}")
    code, out, err = checkpoints("show", "root")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert err.startswith("dtrain: checkpoints: show: rank-00000.json: ")


def rows_of(out):
    """Return the rows of the table below the summary and an empty line."""
    return {line.split()[0]: line for line in out.splitlines()[3:]}


def test_diff_of_copy_is_equal(checkpoints, root):
    shutil.copytree("root", "copy")
    code, out, err = checkpoints("diff", "root", "copy")
    assert (code, err) == (0, "")
    assert out.startswith("equal: ")


def test_diff_of_two_layouts_finds_only_per_rank_values(checkpoints, two_ranks, ranks, tmp_path):
    other = ranks(2).run(save_filled, str(tmp_path / "root"), "replicate")[0][0]
    assert checkpoints("diff", two_ranks, other, "--weights")[0] == 0
    differences = json.loads(checkpoints("diff", two_ranks, other, "--json")[1])["differences"]
    assert [row for row in differences if not row["key"].startswith("rank-")] == []


def test_diff_gives_number_and_size_of_differing_elements(checkpoints, root):
    state = train(plain_state(), 1)
    save_sharded("a", state)
    with torch.no_grad():
        state.params["first.weight"][2, 3] += 0.5
        state.params["first.weight"][4, 1] -= 0.25
        state.params["last.bias"][0] = float("nan")
    state.model.seen.add_(7)
    state.optimizer.param_groups[0]["lr"] = 0.125
    save_sharded("b", replace(state))
    code, out, err = checkpoints("diff", "a", "b")
    assert (code, err) == (1, "")
    rows = {key: line.split() for key, line in rows_of(out).items() if not key.startswith("rank-")}
    assert rows == {
        "params/first.weight": ["params/first.weight", "values", *["F32", "[7,", "5]"] * 2, "2", "0.5"],
        "params/last.bias": ["params/last.bias", "values", *["F32", "[2]"] * 2, "1", "nan"],
        "buffers/seen": ["buffers/seen", "values", *["I64", "[]"] * 2, "1", "7"],
        "optimizer/groups/0/lr": ["optimizer/groups/0/lr", "plain", "value", "0.01", "0.125"],
    }
    report = json.loads(checkpoints("diff", "a", "b", "--json")[1])
    assert report["equal"] is False
    nan = next(row for row in report["differences"] if row["key"] == "params/last.bias")
    assert nan == {
        "key": "params/last.bias", "kind": "values", "a": "F32 [2]", "b": "F32 [2]", "differing": 1, "max_abs": "nan",
    }  # fmt: skip


def test_diff_lists_missing_tensors_and_differing_shapes_or_dtypes(checkpoints, root):
    save_file({"a": torch.ones(2), "b": torch.ones(3), "c": torch.ones(2, 2)}, "x.safetensors")
    save_file({"b": torch.ones(4), "c": torch.ones(2, 2, dtype=torch.bfloat16), "d": torch.ones(())}, "y.safetensors")
    code, out, _ = checkpoints("diff", "x.safetensors", "y.safetensors")
    assert code == 1
    summary, empty, _, *rows = out.splitlines()
    assert (summary, empty) == (
        "a has 3 tensors, b has 3 tensors: 1 only in a, 1 only in b, 1 differ in shape, 1 differ in dtype, 0 equal",
        "",
    )
    assert [line.split() for line in rows] == [
        ["a", "only", "in", "a", "F32", "[2]", "-"],
        ["d", "only", "in", "b", "-", "F32", "[]"],
        ["b", "shape", "F32", "[3]", "F32", "[4]"],
        ["c", "dtype", "F32", "[2,", "2]", "BF16", "[2,", "2]", "0"],
    ]


def test_diff_of_unrelated_models_begins_with_a_summary(checkpoints, root):
    save_file({f"encoder.{number}": torch.ones(2) for number in range(5)} | {"bias": torch.ones(1)}, "x.safetensors")
    save_file({f"blocks.{number}": torch.ones(2) for number in range(4)} | {"bias": torch.ones(1)}, "y.safetensors")
    code, out, _ = checkpoints("diff", "x.safetensors", "y.safetensors")
    assert (code, out.splitlines()[0]) == (
        1, "different models: a has 6 tensors, b has 5 tensors: 5 only in a, 4 only in b, 1 equal")  # fmt: skip


def test_diff_compares_weights_of_step_and_hf_folder(checkpoints, root):
    convert("root", "hf", to="hf")
    assert checkpoints("diff", "root", "hf") == (0, "equal: 5 tensors, 0 plain values\n", "")
    weights = load_file("hf/model.safetensors")
    save_file({**weights, "last.bias": weights["last.bias"] + 1}, "hf/model.safetensors")
    code, out, _ = checkpoints("diff", "root/step-00000002", "hf")
    assert code == 1
    assert list(rows_of(out)) == ["last.bias"]


def test_diff_refuses_corrupt_data(checkpoints, root):
    flip_bits(root / "step-00000002" / "rank-00000.safetensors", 1.0, 4)
    code, out, err = checkpoints("diff", "root/step-00000001", "root")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert err.startswith("dtrain: checkpoints: diff: rank-00000.safetensors: bytes from 0 on do not match")


@pytest.fixture
def on_a_server(root):
    """The URL of the same root on a server (one in this process's memory)."""
    there = storage.resolve_path("memory://cli/root")
    for folder in root.iterdir():
        storage.make_folders(there / folder.name)
        for path in folder.iterdir():
            storage.write_file(there / folder.name / path.name, path.read_bytes())
    yield "memory://cli/root"
    storage.remove_folder(there)


def test_roots_on_servers_are_readable(checkpoints, on_a_server):
    code, out, err = checkpoints("list", on_a_server, "--json")
    assert (code, err) == (0, "")
    assert [(step["path"], step["valid"]) for step in json.loads(out)["steps"]] == [
        (f"{on_a_server}/step-0000000{step}", True) for step in (1, 2)
    ]
    assert checkpoints("list", on_a_server)[0] == 0
    assert checkpoints("verify", on_a_server, "--all", "--deep")[0] == 0
    assert checkpoints("show", f"{on_a_server}/step-00000001")[0] == 0
    assert checkpoints("diff", on_a_server, "root")[0] == 0


def test_diff_compares_selected_state(checkpoints, root):
    for name, seed in (("two", 1), ("other", 2)):
        save_sharded(name, {"generator": plain_state(), "discriminator": plain_state(seed)})
    assert checkpoints("diff", "two", "other", "--state", "generator")[0] == 0
    assert checkpoints("diff", "two", "other", "--state", "discriminator")[0] == 1
    code, out, err = checkpoints("diff", "two", "other", "--weights")
    assert (code, out) == (2, "")
    assert "holds the states 'generator', 'discriminator'. Name one with state (--state)" in err
    assert "convert:" not in err
    assert "states/discriminator/params/last.bias" in checkpoints("diff", "two", "other")[1]
