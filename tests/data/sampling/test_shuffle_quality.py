import pytest

from dtrain.data.sample_order import BlockShuffle, ElasticSampler, shard_order, shuffle_quality
from dtrain.errors import ConfigError

SIZES = [500] * 200


def quality(shuffle):
    return shuffle_quality(shard_order(SIZES, seed=0, shuffle=shuffle), SIZES, batch_size=100)


def test_full_shuffle_has_the_reference_quality():
    full = shuffle_quality(ElasticSampler(size=100_000, seed=0), SIZES, batch_size=100)
    for figure, expected in (
        (full.displacement, 1),
        (full.adjacent_correlation, 0),
        (full.shards_per_batch, 1),
        (full.batch_uniformity, 1),
    ):
        assert figure == pytest.approx(expected, abs=0.05)  # 1,000 batches: the deviation of a deviation is 2%


def test_dataset_order_has_no_shuffle_quality():
    none = quality(False)
    assert none.displacement == 0
    assert none.adjacent_correlation > 0.99
    assert none.shards_per_batch < 0.02
    assert none.batch_uniformity < 0.15


def test_wider_window_and_more_streams_improve_shuffle_quality():
    rows = [quality(BlockShuffle(block_size=window, streams=streams)) for window, streams in ((1, 2), (4, 2), (4, 16), (8, 16))]
    figures = [row.shards_per_batch for row in rows]
    assert figures == sorted(figures)
    assert figures[-1] > 0.6
    assert quality(BlockShuffle(block_size=1, streams=1)).adjacent_correlation > 0.9


def test_window_over_all_shards_equals_a_full_shuffle():
    all_of_it = quality(BlockShuffle(block_size=200, streams=1))
    assert all_of_it.shards_per_batch == pytest.approx(1, abs=0.02)
    assert all_of_it.batch_uniformity == pytest.approx(1, abs=0.05)


def test_figures_are_printed_in_one_line():
    assert str(quality(False)).startswith("displacement 0.000, adjacent correlation +1.000, shards per batch 0.0")


@pytest.mark.parametrize(("sizes", "batch_size"), [([500] * 199, 100), (SIZES, 60_000)])
def test_mismatched_sizes_or_too_few_batches_are_refused(sizes, batch_size):
    with pytest.raises(ConfigError, match="sizes must have the order's 100000 samples and two batches"):
        shuffle_quality(ElasticSampler(size=100_000), sizes, batch_size=batch_size)
