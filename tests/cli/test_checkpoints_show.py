"""``dtrain checkpoints show`` and ``diff``: what a step holds, and in what two differ."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint.filled import save_filled
from checkpoint.states import plain_state, train
from dtrain import storage
from dtrain.checkpoint.conversion.convert import convert
from dtrain.checkpoint.save import save_sharded


@pytest.fixture(scope="module")
def two_ranks(ranks, tmp_path_factory):
    """The folder of a step that two ranks wrote, sharded."""
    return ranks(2).run(save_filled, str(tmp_path_factory.mktemp("two") / "root"), "full_shard")[0][0]


def test_show_prints_step_and_tensor_locations(checkpoints, two_ranks):
    code, out, err = checkpoints("show", two_ranks)
    head, rows = out.split("\n\n")
    first, second, third = head.splitlines()
    assert (code, err) == (0, "")
    assert first.startswith("step 4 of run ")
    assert second.startswith("written by 2 ranks, full_shard (dp_replicate 1 x dp_shard 2): ")
    assert third.startswith("holds params, buffers, optimizer, transforms, clock, seed: ")
    lines = {line.split()[0]: line.split()[1:] for line in rows.splitlines()}
    assert lines["params/first.weight"] == ["F32", "[7,", "5]", "140", "B", "rank-00000,", "rank-00001"]
    assert lines["optimizer/state/first.weight/exp_avg_sq"][:3] == ["BF16", "[7,", "5]"]
    assert any(key.startswith("rank-00001/rng/") for key in lines)


def test_show_json_has_every_part(checkpoints, two_ranks):
    code, out, err = checkpoints("show", two_ranks, "--json", "--only", "params/first")
    found = json.loads(out)
    assert (code, err) == (0, "")
    assert {"step": 4, "world_size": 2, "path": two_ranks, "what": "all", "states": []}.items() <= found.items()
    assert found["layout"] == {"strategy": "full_shard", "axes": ["dp_replicate", "dp_shard"], "shape": [1, 2]}
    assert [(file["rank"], file["name"]) for file in found["files"]] == [
        (0, "rank-00000.safetensors"),
        (1, "rank-00001.safetensors"),
    ]
    assert [tensor["key"] for tensor in found["tensors"]] == ["params/first.weight", "params/first.bias"]
    assert found["tensors"][0] == {
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
    return {line.split()[0]: line for line in out.splitlines()[1:]}


def test_diff_of_copy_is_equal(checkpoints, root):
    shutil.copytree("root", "copy")
    code, out, err = checkpoints("diff", "root", "copy")
    assert (code, err) == (0, "")
    assert out.startswith("equal: ")


def test_diff_of_two_layouts_finds_only_per_rank_values(checkpoints, two_ranks, ranks, tmp_path):
    other = ranks(2).run(save_filled, str(tmp_path / "root"), "replicate")[0][0]
    assert checkpoints("diff", two_ranks, other, "--weights")[0] == 0
    found = json.loads(checkpoints("diff", two_ranks, other, "--json")[1])["differences"]
    assert [row for row in found if not row["key"].startswith("rank-")] == []


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
    found = json.loads(checkpoints("diff", "a", "b", "--json")[1])
    assert found["equal"] is False
    nan = next(row for row in found["differences"] if row["key"] == "params/last.bias")
    assert nan == {
        "key": "params/last.bias", "kind": "values", "a": "F32 [2]", "b": "F32 [2]", "differing": 1, "max_abs": "nan",
    }  # fmt: skip


def test_diff_lists_missing_tensors_and_differing_shapes_or_dtypes(checkpoints, root):
    save_file({"a": torch.ones(2), "b": torch.ones(3), "c": torch.ones(2, 2)}, "x.safetensors")
    save_file({"b": torch.ones(4), "c": torch.ones(2, 2, dtype=torch.bfloat16), "d": torch.ones(())}, "y.safetensors")
    code, out, _ = checkpoints("diff", "x.safetensors", "y.safetensors")
    assert code == 1
    assert [line.split() for line in out.splitlines()[1:]] == [
        ["a", "only", "in", "a", "F32", "[2]", "-"],
        ["d", "only", "in", "b", "-", "F32", "[]"],
        ["b", "shape", "F32", "[3]", "F32", "[4]"],
        ["c", "dtype", "F32", "[2,", "2]", "BF16", "[2,", "2]", "0"],
    ]


def test_diff_compares_weights_of_step_and_hf_folder(checkpoints, root):
    convert("root", "hf", to="hf")
    assert checkpoints("diff", "root", "hf") == (0, "equal: 5 tensors, 0 plain values\n", "")
    weights = load_file("hf/model.safetensors")
    save_file({**weights, "last.bias": weights["last.bias"] + 1}, "hf/model.safetensors")
    code, out, _ = checkpoints("diff", "root/step-00000002", "hf")
    assert code == 1
    assert list(rows_of(out)) == ["last.bias"]


def test_diff_refuses_corrupt_data(checkpoints, root):
    path = root / "step-00000002" / "rank-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    code, out, err = checkpoints("diff", "root/step-00000001", "root")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert err.startswith("dtrain: checkpoints: diff: rank-00000.safetensors: bytes from 0 on do not match")


MISTAKES = {
    "show: no folder": (["show", "nope"], "show: no such folder: 'nope'. Check the path."),
    "show: nothing there": (["show", "."], "show: no checkpoints in '.'. Name a step"),
    "diff: no folder": (["diff", "root", "nope"], "diff: no such folder: 'nope'. Check the path."),
    "diff: nothing there": (["diff", ".", "root"], "diff: no checkpoints in '.'. Name a step"),
}


@pytest.mark.parametrize(("args", "expected"), MISTAKES.values(), ids=MISTAKES)
def test_invalid_arguments_print_one_line(checkpoints, root, args, expected):
    code, out, err = checkpoints(*args)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"dtrain: checkpoints: {expected}")


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
        save_sharded(name, {"maker": plain_state(), "judge": plain_state(seed)})
    assert checkpoints("diff", "two", "other", "--state", "maker")[0] == 0
    assert checkpoints("diff", "two", "other", "--state", "judge")[0] == 1
    code, out, err = checkpoints("diff", "two", "other", "--weights")
    assert (code, out) == (2, "")
    assert "holds the states 'maker', 'judge'. Name one with state (--state)" in err
    assert "states/judge/params/last.bias" in checkpoints("diff", "two", "other")[1]
