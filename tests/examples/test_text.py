"""The example text: its files, its windows, and the held-out windows."""

import math
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import torch

import dtrain as dt
from dtrain.cli.main import run
from dtrain.data.stream.sharded_dataset import ShardedDataset
from helpers import text
from helpers.text import ByteWindows, cut_windows, next_byte_batch, read_text, stdlib_files, train_and_held_out, unigram_entropy

FLOAT64_ROUNDING = 1e-12


def counted_text(size: int) -> torch.Tensor:
    return torch.arange(size).remainder(251).to(torch.uint8)  # 251 is prime: windows of most sizes all differ


def test_stdlib_files_are_python_files_in_a_fixed_order() -> None:
    files = stdlib_files()
    root = Path(sysconfig.get_path("stdlib"))
    below = [path.relative_to(root).as_posix() for path in files]
    assert files == stdlib_files()
    assert below == sorted(below)
    assert len(set(below)) == len(below)
    assert {"abc.py", "json/decoder.py"} <= set(below)
    assert all(path.suffix == ".py" for path in files)


def test_stdlib_files_leave_out_installed_packages_and_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("b.py", "a/z.py", "a/site-packages/no.py", "dist-packages/no.py", "a/__pycache__/no.py", "a/no.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())
    (tmp_path / "gone.py").symlink_to(tmp_path / "nowhere")
    monkeypatch.setattr(text.sysconfig, "get_path", {"stdlib": str(tmp_path)}.__getitem__)
    assert stdlib_files() == [tmp_path / "a/z.py", tmp_path / "b.py"]
    assert bytes(read_text()) == b"a/z.pyb.py"


def test_read_text_joins_the_matches_in_sorted_order(tmp_path: Path) -> None:
    (tmp_path / "deep.txt").mkdir()  # a folder that matches is no file
    for name, content in {"b.txt": b"2\xff", "a.txt": b"1", "deep.txt/c.txt": b"3", "d.md": b"4"}.items():
        (tmp_path / name).write_bytes(content)
    text = read_text(f"{tmp_path}/**/*.txt")
    assert text.dtype == torch.uint8
    assert bytes(text) == b"12\xff3"


def test_read_text_without_matches_raises_a_one_line_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no file matches '.*/\*\.txt'") as caught:
        read_text(f"{tmp_path}/*.txt")
    assert "\n" not in str(caught.value)


def test_read_text_with_only_empty_matches_raises(tmp_path: Path) -> None:
    (tmp_path / "a.txt").touch()
    with pytest.raises(ValueError, match=r"all 1 files that match .* are empty"):
        read_text(f"{tmp_path}/*.txt")


def test_windows_are_the_text_in_order_and_labels_are_the_next_bytes() -> None:
    data = ByteWindows(cut_windows(counted_text(104), seq=9))
    assert len(data) == 10
    for index in range(10):
        sample = data[index]
        assert sample["input_ids"].tolist() == list(range(10 * index, 10 * index + 9))
        assert sample["labels"].tolist() == list(range(10 * index + 1, 10 * index + 10))
        assert sample["input_ids"].dtype == sample["labels"].dtype == torch.int64


def test_getitems_equals_single_getitem_calls() -> None:
    data = ByteWindows(cut_windows(counted_text(104), seq=9))
    indices = [7, 0, 0, 3]
    together = data.__getitems__(indices)
    assert len(together) == 4
    for sample, index in zip(together, indices, strict=True):
        assert sample.keys() == {"input_ids", "labels"}
        assert all(torch.equal(sample[name], data[index][name]) for name in sample)
    assert data.__getitems__([]) == []
    with pytest.raises(IndexError):
        data.__getitems__([10])


def test_windows_of_shards_make_the_same_batch_as_windows_of_a_tensor() -> None:
    windows = cut_windows(counted_text(104), seq=9)
    here = ByteWindows(windows)
    for dtype in (np.uint8, np.uint16, np.int64):
        batch = next_byte_batch([{"tokens": window.numpy().astype(dtype)} for window in windows])
        for name in ("input_ids", "labels"):
            assert torch.equal(batch[name], torch.stack([here[index][name] for index in range(len(here))]))
            assert batch[name].dtype == torch.int64


@pytest.mark.parametrize(
    "windows",
    [torch.zeros(3, 4), torch.zeros(12, dtype=torch.uint8), torch.zeros(3, 1, dtype=torch.uint8)],
    ids=["not-bytes", "not-a-table", "no-room-for-a-label"],
)
def test_byte_windows_refuses_invalid_window_tables(windows: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"uint8 \[count, seq \+ 1\]"):
        ByteWindows(windows)


@pytest.mark.parametrize("held_out_windows", [1, 5, 63, 64, 65, 100, 500])
@pytest.mark.parametrize("total", [1000, 1003])
def test_held_out_and_training_windows_divide_the_text(total: int, held_out_windows: int) -> None:
    # Every window is filled with its own number, in base 256, so that a row says where it came from.
    number = torch.arange(total)
    text_of_numbers = torch.stack([number // 256, number % 256], dim=1).to(torch.uint8).flatten()
    train, held_out = train_and_held_out(text_of_numbers, seq=1, held_out_windows=held_out_windows)
    where = [(data.windows.long() @ torch.tensor([256, 1])).tolist() for data in (train, held_out)]
    assert len(where[1]) == held_out_windows
    assert sorted(where[0] + where[1]) == list(range(total))  # disjoint, and nothing is lost
    assert where == [sorted(places) for places in where]

    # Spread: no stretch of the text goes without a held-out window for much longer than the even spacing.
    runs = min(text.RUNS, held_out_windows)
    gaps = torch.tensor([-1, *where[1], total]).diff()
    assert gaps.max() <= 2 * math.ceil(total / runs)
    assert max(gaps[0], gaps[-1]) <= math.ceil(total / runs / 2) + 1
    assert (gaps[1:-1] > 1).sum() <= runs - 1


def test_no_byte_of_a_held_out_sample_is_in_a_training_sample() -> None:
    # Positions instead of content: byte i of the text is in a sample when changing it changes the sample.
    original = torch.zeros(400, dtype=torch.uint8)
    for position in range(400):
        changed = original.clone()
        changed[position] = 1
        seen = []
        for data in train_and_held_out(changed, seq=7, held_out_windows=10):
            samples = data.__getitems__(range(len(data)))
            seen.append(any(sample[name].any() for sample in samples for name in sample))
        assert seen in ([True, False], [False, True]), position


def test_streaming_gives_the_same_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in (("a.txt", 700), ("b.txt", 900), ("c.txt", 55)):
        (tmp_path / name).write_bytes(counted_text(size).numpy().tobytes())
    command = ["dtrain", "data", "write", f"{tmp_path}/*.txt", str(tmp_path / "shards"), "--from", "documents"]
    monkeypatch.setattr(sys, "argv", [*command, "--tokenizer", "bytes", "--concat", "17", "--max-shard-size", "500"])
    with pytest.raises(SystemExit) as end:
        run()
    assert end.value.code == 0
    here = ByteWindows(cut_windows(read_text(f"{tmp_path}/*.txt"), seq=16))
    streamed = ShardedDataset(tmp_path / "shards")
    how = {"global_batch_size": 8, "seed": 0, "shuffle": False}
    ours = list(dt.build_loader(here, **how).until("1ep"))
    theirs = list(dt.build_loader(streamed, collate=next_byte_batch, **how).until("1ep"))
    assert len(ours) == len(theirs) == 13
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one["input_ids"], other["input_ids"])
        assert torch.equal(one["labels"], other["labels"])
    assert len(streamed.entries) > 1
    streamed.close()


def test_train_and_held_out_is_deterministic() -> None:
    first, second = (train_and_held_out(counted_text(5000), seq=16, held_out_windows=40) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one.windows, other.windows)


def test_train_and_held_out_error_states_the_required_text_length() -> None:
    train_and_held_out(counted_text(2 * 10 * 17), seq=16, held_out_windows=10)
    with pytest.raises(ValueError, match=r"at least 340 bytes, got 339") as caught:
        train_and_held_out(counted_text(2 * 10 * 17 - 1), seq=16, held_out_windows=10)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("seq", "held_out_windows"), [(0, 1), (1, 0)])
def test_train_and_held_out_refuses_sizes_below_one(seq: int, held_out_windows: int) -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        train_and_held_out(counted_text(100), seq=seq, held_out_windows=held_out_windows)


def test_unigram_entropy_of_known_texts() -> None:
    def entropy(content: bytes) -> float:
        return unigram_entropy(torch.frombuffer(bytearray(content), dtype=torch.uint8))

    assert entropy(b"aaaa") == 0
    assert entropy(bytes(range(256))) == pytest.approx(math.log(256), abs=FLOAT64_ROUNDING)
    assert entropy(b"aaab") == pytest.approx(-0.75 * math.log(0.75) - 0.25 * math.log(0.25), abs=FLOAT64_ROUNDING)


def test_unigram_entropy_of_a_dataset_counts_its_labels() -> None:
    data = ByteWindows(torch.tensor([[9, 1, 2], [9, 2, 1]], dtype=torch.uint8))
    assert unigram_entropy(data) == pytest.approx(math.log(2), abs=FLOAT64_ROUNDING)
    streamed = [{"tokens": window.numpy()} for window in data.windows]
    assert unigram_entropy(streamed) == unigram_entropy(data)
