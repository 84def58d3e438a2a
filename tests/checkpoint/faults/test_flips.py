"""Single flipped bits."""

from checkpoint.faults import flips
from checkpoint.faults.samples import KINDS

WHERE = ("a bit of the manifest", "a bit of an index", "a bit of data")


def test_flipped_bit_is_refused_by_verify_and_load(collect):
    found = collect(flips.draw, count=2000)
    assert found.wrong == []
    assert found.count >= 2000
    assert set(found.kinds) == {f"{where}, {kind}" for where in WHERE for kind in KINDS}


def test_flipped_restores_byte_on_exit(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"\x00\xff")
    with flips.flipped(path, 9):
        assert path.read_bytes() == b"\x00\xfd"
    assert path.read_bytes() == b"\x00\xff"
