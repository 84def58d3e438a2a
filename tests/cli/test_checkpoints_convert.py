"""``dtrain checkpoints convert`` and ``prune``, tables and bars."""

import json
import os
import shlex
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from dtrain.cli.output import ByteProgressBar, print_table


def test_convert_prints_path_and_size(checkpoints, root):
    code, out, err = checkpoints("convert", "root", "hf", "--to", "hf", "--dtype", "bf16")
    assert (code, out, err) == (0, f"{root.parent / 'hf'}: 5 tensors, 124 B\n", "")
    assert load_file("hf/model.safetensors")["first.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize(("out", "file"), [("model.safetensors", "model.safetensors"), ("new", "new/model.safetensors")])
def test_convert_writes_one_safetensors_file(checkpoints, root, out, file):
    code, said, err = checkpoints("convert", "root", out, "--to", "safetensors", "--max-shard-size", "16")
    assert (code, said, err) == (0, f"{root.parent / out}: 5 tensors, 240 B\n", "")
    assert os.listdir("new") == ["model.safetensors"] if out == "new" else os.path.isfile(out)
    assert len(load_file(file)) == 5
    assert not [name for name in os.listdir(".") if ".tmp-" in name]
    assert checkpoints("convert", file, "back", "--to", "dtrain")[0] == 0


def test_convert_json(checkpoints, root):
    code, out, _ = checkpoints("convert", "root/step-00000001", "weights", "--to", "dtrain", "--step", "9", "--json")
    path = root.parent / "weights" / "step-00000009"
    assert (code, json.loads(out)) == (0, {"path": str(path), "tensors": 5, "bytes": 240})
    assert checkpoints("verify", "--deep", "weights")[0] == 0


def test_convert_options_reach_the_conversion(checkpoints, root):
    save_file({"a": torch.ones(4), "b": torch.ones(4), "table": torch.ones(2)}, "x.safetensors")
    args = ["--tie", "b=a", "--buffers", "tab*", "--from", "hf"]
    assert checkpoints("convert", "x.safetensors", "out", "--to", "dtrain", *args)[0] == 0
    shown = json.loads(checkpoints("show", "out", "--json")[1])
    assert [tensor["key"] for tensor in shown["tensors"]] == ["params/a", "buffers/table"]
    assert checkpoints("convert", "x.safetensors", "hf", "--to", "hf", "--max-shard-size", "16XB")[0] == 2
    assert checkpoints("convert", "x.safetensors", "hf", "--to", "hf", "--max-shard-size", "17")[0] == 0
    assert len(os.listdir("hf")) == 4


MISTAKES = {
    "no source": ("nope out --to hf", 2, "path must exist, got "),
    "an empty path": ("'' out --to hf", 2, "SRC and DST must not be empty. Name the checkpoint"),
    "target": ("root out --to gguf", 2, "to must be one of hf, peft, dtrain, dcp, safetensors, got 'gguf'"),
    "existing": ("root root --to hf", 2, "destination must not exist"),
    "size": ("root out --to hf --max-shard-size huge", 2, "--max-shard-size must be a size such as"),
    "tie": ("root out --to hf --tie x", 2, "--tie must be ALIAS=NAME, got 'x'"),
    "trust": ("x.pt out --to hf", 2, "is a pickle, and reading it runs its code. Pass trust (--trust)"),
    "nothing there": ("empty out --to hf", 1, "path must be a checkpoint of dtrain"),
    "a state": ("root out --to hf --state gan", 1, "(one state without a name), got 'gan'"),
}


@pytest.mark.parametrize(("args", "code", "expected"), MISTAKES.values(), ids=MISTAKES)
def test_convert_failure_prints_one_line_and_leaves_no_output(checkpoints, root, args, code, expected):
    (root.parent / "x.pt").write_bytes(b"")
    (root.parent / "empty").mkdir()
    exit_code, out, err = checkpoints("convert", *shlex.split(args))
    assert (exit_code, out) == (code, "")
    assert err.startswith("dtrain: checkpoints: convert: ")
    assert expected in err
    assert err.count("\n") == 1
    assert sorted(os.listdir(root.parent)) == ["empty", "root", "x.pt"]


def test_prune_dry_run_lists_steps_and_prune_removes_them(checkpoints, root):
    before = sorted(os.listdir(root))
    code, out, err = checkpoints("prune", "root", "--keep-last", "1", "--dry-run")
    assert (code, err) == (0, "")
    assert out.splitlines()[0].startswith("step-00000001: would be removed, ")
    assert sorted(os.listdir(root)) == before
    assert checkpoints("prune", "root", "--keep-last", "1", "--keep-step", "1")[1] == "nothing to remove\n"
    report = json.loads(checkpoints("prune", "root", "--keep-last", "1", "--json")[1])
    assert [(step["step"], step["path"]) for step in report["removed"]] == [(1, str(root / "step-00000001"))]
    assert (report["root"], report["dry_run"]) == (str(root), False)
    assert not (root / "step-00000001").exists()
    assert (root / "step-00000002").exists()


def test_prune_invalid_arguments_print_one_line(checkpoints, root):
    for args in (["root", "--keep-last", "0"], ["root/step-00000001", "--keep-last", "1"], ["nope", "--keep-last", "1"]):
        code, out, err = checkpoints("prune", *args)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert err.startswith("dtrain: checkpoints: prune: ")


class Terminal:
    """A stream that takes itself for a terminal."""

    def __init__(self):
        self.text = ""

    def write(self, text):
        self.text += text
        return len(text)

    def flush(self):
        pass

    def isatty(self):
        return True


def test_progress_bar_is_drawn_on_terminal_after_delay():
    slow, quick = Terminal(), Terminal()
    with ByteProgressBar("comparing", 100, after_s=0, stream=slow) as bar:
        bar.advance(40)
        bar.advance(60)
    with ByteProgressBar("comparing", 100, after_s=1000, stream=quick) as bar:
        bar.advance(100)
    assert "comparing" in slow.text
    assert quick.text == ""


def test_progress_bar_is_not_drawn_into_file(tmp_path):
    with open(tmp_path / "log", "w") as log, ByteProgressBar("comparing", 100, after_s=0, stream=log) as bar:
        bar.advance(100)
    assert (tmp_path / "log").read_text() == ""


def test_table_keeps_long_rows_whole_without_terminal(capsys):
    print_table(("name", "size"), [("x" * 500, "1 B"), ("[bold]y", "20 B")], right=(1,))
    head, first, second = capsys.readouterr().out.splitlines()
    assert head.split() == ["name", "size"]
    assert first == f"{'x' * 500}   1 B"
    assert second.split() == ["[bold]y", "20", "B"]


def test_table_fits_terminal_and_escapes_control_characters(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "xterm")
    print_table(("name", "size"), [("y" * 90 + "\x1b]0;x\x07", "1 B")])
    lines = terminal.text.splitlines()
    assert max(map(len, lines[1:])) <= 40
    assert "".join(line.split()[0] for line in lines[1:]) == "y" * 90 + r"\x1b]0;x\x07"
