"""Datasets, sample orders, mixtures, sequence packing and sharded streaming, all resumable on any number of ranks.

    dataset = dt.data.ShardedDataset("s3://bucket/c4", cache="/tmp/cache")
    loader = dt.build_loader(dataset, mesh=mesh, global_batch_size=256, seed=1)
    for batch in loader.until("1ep"):
        ...

A checkpoint saves the position of a loader. Global batch ``k`` has the same samples on every number of ranks.
"""

from typing import TYPE_CHECKING

from dtrain.lazy_imports import attach

if TYPE_CHECKING:
    from dtrain.data.balance import BatchBalance as BatchBalance
    from dtrain.data.batch import MicrobatchList as MicrobatchList
    from dtrain.data.batch import prefetch_to_device as prefetch_to_device
    from dtrain.data.batch import split_batch as split_batch
    from dtrain.data.dataset import MapDataset as MapDataset
    from dtrain.data.dataset import memory_map as memory_map
    from dtrain.data.fetcher import SampleTransform as SampleTransform
    from dtrain.data.fetcher import collate as collate
    from dtrain.data.fetcher import seed_per_sample as seed_per_sample
    from dtrain.data.loader import Loader as Loader
    from dtrain.data.mixture import mix as mix
    from dtrain.data.packed_tokens import DocumentBounds as DocumentBounds
    from dtrain.data.packed_tokens import PackedTokens as PackedTokens
    from dtrain.data.packed_tokens import document_bounds as document_bounds
    from dtrain.data.packed_tokens import document_mask as document_mask
    from dtrain.data.position import SkippedSamples as SkippedSamples
    from dtrain.data.rollouts import RolloutBuffer as RolloutBuffer
    from dtrain.data.sample_order import BlockShuffle as BlockShuffle
    from dtrain.data.sample_order import ElasticSampler as ElasticSampler
    from dtrain.data.sample_order import SampleOrder as SampleOrder
    from dtrain.data.sample_order import ShuffleQuality as ShuffleQuality
    from dtrain.data.sample_order import shard_order as shard_order
    from dtrain.data.sample_order import shuffle_quality as shuffle_quality
    from dtrain.data.stream.sharded_dataset import ShardedDataset as ShardedDataset
    from dtrain.data.stream.write_shards import WriteShardsResult as WriteShardsResult
    from dtrain.data.stream.write_shards import write_shards as write_shards
    from dtrain.data.token_stream import TokenStream as TokenStream
    from dtrain.data.token_stream import pack_tokens as pack_tokens

__getattr__, __dir__ = attach(__name__, __file__)
