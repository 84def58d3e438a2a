"""Tar archives: samples from members, decoders, and refused archives."""

import io
import json
import pickle
import tarfile
from typing import Any

import numpy as np
import pytest

from dtrain.data.stream.formats.shard_format import ShardEntry, ShardFile, get_format
from dtrain.errors import ConfigError, DataError
from places.opened import Held, entry_for, opened, rows


def archive(*members: tuple[str, bytes], form: int = tarfile.PAX_FORMAT) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def npy(array: Any, **options: Any) -> bytes:
    out = io.BytesIO()
    np.save(out, array, **options)
    return out.getvalue()


def keys(data: bytes) -> list[tuple[str, list[str]]]:
    return [(sample.pop("__key__"), list(sample)) for sample in rows(opened(data, "tar"))]


def test_consecutive_members_with_one_key_form_a_sample() -> None:
    data = archive(("b.cls", b"1"), ("b.txt", b"x"), ("a.txt", b"y"), ("dir/b.txt", b"z"), ("b.cls", b"2"))
    assert keys(data) == [("b", ["cls", "txt"]), ("a", ["txt"]), ("dir/b", ["txt"]), ("b", ["cls"])]


def test_key_ends_at_the_first_dot_of_the_file_name() -> None:
    data = archive(("v1.2/a.left.png", b"l"), ("v1.2/a.right.png", b"r"), ("./b.TXT", b"t"))
    assert keys(data) == [("v1.2/a", ["left.png", "right.png"]), ("./b", ["txt"])]


def test_members_without_suffix_are_skipped() -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, kind in (("dir.d", tarfile.DIRTYPE), ("link.txt", tarfile.SYMTYPE), ("a.txt", tarfile.REGTYPE)):
            info = tarfile.TarInfo(name)
            info.type = kind
            tar.addfile(info, io.BytesIO())
        for name in ("README", "._a.txt", "__meta__.json"):
            tar.addfile(tarfile.TarInfo(name), io.BytesIO())
    assert keys(out.getvalue()) == [("a", ["txt"])]


LONG = "d/" * 60 + "n" * 120


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT], ids=["ustar", "gnu", "pax"])
def test_long_and_non_ascii_member_names_are_read(form: int) -> None:
    names = ["short", "a" * 90] + ([LONG, "ünïcode/名前"] if form != tarfile.USTAR_FORMAT else [])
    data = archive(*((f"{name}.txt", name.encode()) for name in names), form=form)
    assert rows(opened(data, "tar")) == [{"__key__": name, "txt": name} for name in names]


def test_members_are_decoded_by_their_last_suffix() -> None:
    arrays = io.BytesIO()
    np.savez(arrays, x=np.arange(2), y=np.ones(1))
    data = archive(
        ("a.json", b'{"k": [1]}'),
        ("a.meta.json", b"null"),
        ("a.txt", "é".encode()),
        ("a.cls", b"7"),
        ("a.x.npy", npy(np.arange(3, dtype="int16"))),
        ("a.npz", arrays.getvalue()),
        ("a.jpg", b"\xff\xd8"),
        ("a.bin", b""),
    )
    (sample,) = rows(opened(data, "tar"))
    array, both = sample.pop("x.npy"), sample.pop("npz")
    assert (array.dtype, array.tolist()) == (np.int16, [0, 1, 2])
    assert {name: value.tolist() for name, value in both.items()} == {"x": [0, 1], "y": [1.0]}
    assert sample == {
        "__key__": "a",
        "json": {"k": [1]},
        "meta.json": None,
        "txt": "é",
        "cls": 7,
        "jpg": b"\xff\xd8",
        "bin": b"",
    }


def test_pickles_are_refused_unless_trusted_or_excluded() -> None:
    data = archive(("a.txt", b"t"), ("a.x.pkl", pickle.dumps({1})))
    with pytest.raises(ConfigError, match=r"member a\.x\.pkl is pickled"):
        opened(data, "tar")
    assert opened(data, "tar", columns=["txt"])[0] == {"__key__": "a", "txt": "t"}
    assert opened(data, "tar", allow_pickle=True)[0]["x.pkl"] == {1}


def test_pickle_inside_an_array_is_never_loaded() -> None:
    data = archive(("a.npy", npy(np.array([{}], dtype=object), allow_pickle=True)))
    with pytest.raises(ValueError, match="allow_pickle=False"):
        opened(data, "tar", allow_pickle=True)[0]


def test_images_are_decoded_on_request() -> None:
    image = pytest.importorskip("PIL.Image")
    out = io.BytesIO()
    image.new("RGB", (3, 2), (1, 2, 3)).save(out, format="PNG")
    data = archive(("a.png", out.getvalue()), ("b.png", out.getvalue()[:-30]))
    shard = opened(data, "tar", images=True)
    assert (shard[0]["png"].size, shard[0]["png"].getpixel((0, 0))) == ((3, 2), (1, 2, 3))
    with pytest.raises((OSError, SyntaxError)):
        shard[1]
    assert opened(data, "tar")[0]["png"] == out.getvalue()


def test_duplicate_member_of_a_sample_is_refused() -> None:
    with pytest.raises(DataError, match=r"member 'a\.txt' occurs twice in its sample"):
        opened(archive(("a.txt", b"1"), ("a.txt", b"2")), "tar")


@pytest.mark.parametrize("data", [b"", bytes(1024), bytes(10240)], ids=["empty", "end", "padded"])
def test_empty_archive_has_no_samples(data: bytes) -> None:
    assert rows(opened(data, "tar")) == []


def test_non_tar_bytes_are_refused() -> None:
    with pytest.raises(DataError, match="is not a tar archive, or truncated"):
        get_format("tar").count(Held(b"certainly not an archive " * 100))


def test_member_of_negative_size_is_refused() -> None:
    data = bytearray(archive(("plain", b"")))  # a member that is no sample: nothing else would end the way back to it
    data[124:136] = b"\xff" + (2**88 - 512).to_bytes(11, "big")
    data[148:156] = b" " * 8
    data[148:156] = b"%06o\0 " % sum(data[:512])
    # Pythons since 2025 refuse the size themselves.
    with pytest.raises(DataError, match=r"member 'plain' has an impossible size of -512 bytes|truncated: invalid offset"):
        get_format("tar").count(Held(bytes(data)))


def test_archive_truncated_within_a_member_is_refused() -> None:
    data = archive(*((f"{number}.txt", b"word " * 150) for number in range(3)))
    entry = entry_for(data, "tar")
    whole = 3 * (512 + 1024)
    for length in range(0, whole - 300, 100):  # the last 274 bytes before `whole` are padding
        with pytest.raises(DataError, match=r"truncated|ends after the archive|damaged"):
            get_format("tar").open(Held(data[:length]), entry, {})


def test_missing_end_marker_is_accepted_but_damaged_header_refused() -> None:
    data = archive(*((f"{number}.txt", b"word") for number in range(3)))
    assert len(rows(opened(data[: 3 * 1024], "tar"))) == 3
    damaged = bytearray(data)
    damaged[1024 + 3] ^= 255
    with pytest.raises(DataError, match="is damaged at byte 1024"):
        get_format("tar").count(Held(bytes(damaged)))


def test_sample_count_that_differs_from_the_index_is_refused() -> None:
    entry = ShardEntry(file=ShardFile(name="s.tar", size=0), samples=2, format="tar")
    with pytest.raises(DataError, match="has 1 samples, but the index has 2"):
        get_format("tar").open(Held(archive(("a.txt", b""))), entry, {})


def test_damaged_member_fails_only_its_own_sample() -> None:
    shard = opened(archive(("a.json", b"{"), ("b.cls", b"x"), ("c.json", b"1")), "tar")
    with pytest.raises(json.JSONDecodeError):
        shard[0]
    with pytest.raises(ValueError, match="invalid literal"):
        shard[1]
    assert shard[2] == {"__key__": "c", "json": 1}


def test_sample_read_requests_only_the_bytes_of_its_members() -> None:
    data = archive(*((f"{number:03}.{kind}", bytes(3000)) for number in range(50) for kind in ("a", "b")))
    source = Held(data)
    shard = get_format("tar").open(source, entry_for(data, "tar"), {"columns": ("b",)})
    source.reads = source.most = 0
    assert shard[30] == {"__key__": "030", "b": bytes(3000)}
    assert (source.reads, source.most) == (1, 3000)


@pytest.mark.parametrize("row", [-1, 1])
def test_row_out_of_range_and_closed_shard_are_refused(row: int) -> None:
    shard = opened(archive(("a.txt", b"t")), "tar")
    with pytest.raises(IndexError, match=f"row {row} of 1, open"):
        shard[row]
    shard.close()
    with pytest.raises(IndexError, match="row 0 of 1, closed"):
        shard[0]
