"""Decompression from chunks of any size, within bounds."""

import tracemalloc

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dtrain.data.stream.formats.compression import COMPRESSIONS, check_compression, compress, decompress, parse_compression
from dtrain.errors import ConfigError, DataError

TEXT = b"".join(b"%d bottles of beer, " % number for number in range(3000))


def unpacked(name: str, *pieces: bytes, limit: int | None = None) -> bytes:
    return b"".join(decompress(name, pieces, limit=limit))


@pytest.mark.parametrize("name", COMPRESSIONS)
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.binary(max_size=300), repeat=st.sampled_from([1, 7, 3000]), step=st.sampled_from([1, 5, 1000, 10**9]))
def test_decompression_restores_data_compressed_in_any_chunk_size(name: str, data: bytes, repeat: int, step: int) -> None:
    stored = compress(name, data * repeat)
    assert unpacked(name, *(stored[begin : begin + step] for begin in range(0, len(stored), step))) == data * repeat


@pytest.mark.parametrize("name", COMPRESSIONS)
def test_equal_data_give_equal_bytes(name: str) -> None:
    assert compress(name, TEXT) == compress(name, TEXT)


@pytest.mark.parametrize("name", COMPRESSIONS)
def test_truncated_file_raises_at_every_length(name: str) -> None:
    stored = compress(name, TEXT[:400])
    for length in range(len(stored)):
        with pytest.raises(DataError, match=f"{name}: (ends too early|cannot be decompressed)"):
            unpacked(name, stored[:length])


@pytest.mark.parametrize("name", COMPRESSIONS)
def test_uncompressed_bytes_raise(name: str) -> None:
    with pytest.raises(DataError, match=f"^{name}: .*(damaged|truncated)"):
        unpacked(name, b"not compressed at all, but plain text " * 3)


@pytest.mark.parametrize("name", COMPRESSIONS)
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(byte=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_flipped_bit_raises_data_error_or_stays_within_the_limit(name: str, byte: int, bit: int) -> None:
    stored = bytearray(compress(name, TEXT[:3000]))
    stored[byte % len(stored)] ^= 1 << bit
    try:
        content = unpacked(name, bytes(stored), limit=10**6)
    except DataError:
        content = b""
    assert len(content) <= 10**6  # br and snappy have no checksum of their own: digests of the index are for that


@pytest.mark.parametrize("name", ["gz", "bz2", "zstd"])
def test_consecutive_members_are_read_as_one_stream(name: str) -> None:
    stored = compress(name, TEXT) + compress(name, b"") + compress(name, b"end")
    assert unpacked(name, stored) == TEXT + b"end"
    assert unpacked(name, *(bytes([byte]) for byte in stored)) == TEXT + b"end"
    with pytest.raises(DataError, match="ends too early"):
        unpacked(name, stored[:-3])


def test_zero_padding_after_gzip_is_accepted_and_other_bytes_refused() -> None:
    stored = compress("gz", TEXT)
    assert unpacked("gz", stored, bytes(512), bytes(512)) == TEXT
    with pytest.raises(DataError, match="gz: cannot be decompressed"):
        unpacked("gz", stored, b"trailing words")


@pytest.mark.parametrize("name", ["br", "bz2", "zstd"])
def test_trailing_bytes_raise(name: str) -> None:
    with pytest.raises(DataError, match=name):
        unpacked(name, compress(name, TEXT), b"trailing words")


@pytest.mark.parametrize("name", COMPRESSIONS)
def test_output_above_the_limit_raises_before_it_fills_memory(name: str) -> None:
    stored = compress(f"{name}:1" if name == "br" else name, bytes(2**26))
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match=f"{name}: decompresses to more than 1000 bytes"):
            unpacked(name, stored, limit=1000)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < 2**25


@pytest.mark.parametrize("name", ["br", pytest.param("bz2", marks=pytest.mark.slow), "gz", "zstd"])
def test_large_file_is_decompressed_in_bounded_memory(name: str) -> None:
    times = 2**15 if name == "bz2" else 2**18  # it is slow
    stored = compress(f"{name}:1", bytes(range(256)) * times)
    tracemalloc.start()
    try:
        done = 0
        for raw in decompress(name, [stored]):
            assert raw[:256] == bytes(byte % 256 for byte in range(done, done + min(256, len(raw))))
            done += len(raw)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert done == 256 * times
    assert most < 2**25


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lz4", "compression 'lz4' is unknown. Use one of br, bz2, gz, snappy, zstd"),
        ("zstd:23", "the level of zstd must be 1 to 22"),
        ("zstd:", "the level of zstd must be 1 to 22"),
        ("gz:-1", "the level of gz must be 0 to 9"),
        ("br:²", "the level of br must be 0 to 11"),
        ("snappy:1", "snappy has no levels"),
    ],
)
def test_unknown_compression_name_or_level_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_compression(text)
    with pytest.raises(ConfigError, match=message):
        compress(text, b"")


def test_decompression_with_an_unknown_compression_is_refused() -> None:
    with pytest.raises(ConfigError, match="compression 'lz4' is unknown"):
        unpacked("lz4", b"")


@pytest.mark.parametrize(("name", "package"), [("zstd", "zstandard"), ("br", "brotli"), ("snappy", "snappy")])
def test_missing_package_is_named_with_its_extra(name: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, package, None)
    for use in (lambda: check_compression(name), lambda: compress(name, b""), lambda: unpacked(name, b"")):
        with pytest.raises(ConfigError, match=rf'compression {name} needs .* pip install "dtrain\[compression\]"'):
            use()
