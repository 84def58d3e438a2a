import itertools

from hypothesis import given
from hypothesis import strategies as st

from dtrain.data.sample_order import rank_positions, rank_share


def test_rank_shares_are_contiguous_and_even():
    for count in range(1, 9):
        shares = [rank_share(10, 31, index, count) for index in range(count)]
        assert shares[0][0] == 10
        assert shares[-1][1] == 31
        assert all(a[1] == b[0] for a, b in itertools.pairwise(shares))
        sizes = [end - first for first, end in shares]
        assert max(sizes) - min(sizes) <= 1


@given(start=st.integers(0, 50), length=st.integers(0, 50), count=st.integers(1, 9), streams=st.integers(1, 9))
def test_rank_positions_partition_the_range_evenly(start, length, count, streams):
    positions = range(start, start + length)
    parts = [rank_positions(start, start + length, index, count, streams) for index in range(count)]
    assert sorted(itertools.chain(*parts)) == list(positions)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    if streams > 1:
        assert all(position % count == index for index, share in enumerate(parts) for position in share)
