"""Single flipped bits."""

import pytest

from checkpoint.faults import flips
from checkpoint.faults.samples import KINDS

WHERE = ("a bit of the manifest", "a bit of an index", "a bit of data")


@pytest.mark.costly
@pytest.mark.parametrize("count", [400, pytest.param(2000, marks=pytest.mark.slow)])
def test_flipped_bit_is_refused_by_verify_and_load(collect, count):
    tally = collect(flips.draw, count=count)
    assert tally.wrong == []
    assert tally.count >= count
    assert set(tally.kinds) == {f"{where}, {kind}" for where in WHERE for kind in KINDS}


def test_flipped_restores_byte_on_exit(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"\x00\xff")
    with flips.flipped(path, 9):
        assert path.read_bytes() == b"\x00\xfd"
    assert path.read_bytes() == b"\x00\xff"
