"""Blocks of documents: packing and unpacking is the identity, and every label is the next token of the same document."""

import pickle
from dataclasses import replace
from itertools import chain, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import Tensor

from documents import LENGTHS, SEQ, documents, plain, unpacked
from dtrain.data.loader import build_loader
from dtrain.data.packed_tokens import PackedTokens
from dtrain.data.sample_order import BlockShuffle, ElasticSampler
from dtrain.data.stream.sharded_dataset import ShardedDataset
from dtrain.data.stream.write_shards import write_shards
from dtrain.errors import ConfigError, DataError


def packed(lengths: list[int], seq: int, **options) -> PackedTokens:
    return PackedTokens(documents(lengths), seq=seq, lengths=lengths, **options)


@given(lengths=LENGTHS.filter(any), seq=SEQ, at_once=st.booleans())
@settings(max_examples=200, deadline=None)
def test_unpacked_blocks_equal_the_documents(lengths, seq, at_once):
    blocks = packed(lengths, seq)
    every = blocks.__getitems__(range(len(blocks))) if at_once else list(blocks)
    assert unpacked(every, len(lengths)) == documents(lengths)
    assert all(values.shape == (seq,) and values.dtype == torch.int64 for block in every for values in block.values())


@given(lengths=LENGTHS.filter(any), seq=SEQ)
@settings(max_examples=200, deadline=None)
def test_labels_are_the_next_tokens_of_the_same_document(lengths, seq):
    pairs = [
        (token, label)
        for block in packed(lengths, seq)
        for token, label in zip(block["input_ids"].tolist(), block["labels"].tolist(), strict=True)
        if label != -100
    ]
    assert pairs == [(a, b) for document in documents(lengths) for a, b in pairwise(document)]


@given(lengths=LENGTHS.filter(any), seq=SEQ)
@settings(max_examples=100, deadline=None)
def test_positions_start_at_zero_in_each_document_part(lengths, seq):
    for block in packed(lengths, seq):
        places = list(zip(block["positions"].tolist(), block["documents"].tolist(), strict=True))
        for index, (position, document) in enumerate(places):
            same = index > 0 and places[index - 1][1] == document
            assert position == (places[index - 1][0] + 1 if same else 0)


@given(lengths=LENGTHS.filter(lambda lengths: sum(lengths) >= 3), seq=st.integers(1, 3))
@settings(max_examples=100, deadline=None)
def test_drop_omits_only_an_incomplete_last_block(lengths, seq):
    whole, dropped = plain(packed(lengths, seq)), plain(packed(lengths, seq, last_block="drop"))
    assert dropped == whole[: sum(lengths) // seq]
    assert len(whole) == -(-sum(lengths) // seq)


def test_padding_belongs_to_no_document():
    block = packed([3], 5, pad_token=7)[0]
    assert plain([block]) == [
        {
            "input_ids": [1, 2, 3, 7, 7],
            "labels": [2, 3, -100, -100, -100],
            "positions": [0, 1, 2, 0, 1],
            "documents": [0, 0, 0, -1, -1],
        }
    ]


def as_file(tmp_path) -> list:
    path = tmp_path / "tokens.bin"
    np.array([65_000, 2, 3, 4, 5], dtype=np.uint16).tofile(path)
    tokens = np.memmap(path, dtype=np.uint16, mode="r")
    return [tokens[:3], tokens[3:]]


@pytest.mark.parametrize(
    "make",
    [
        lambda path: [[65_000, 2, 3], [4, 5]],
        lambda path: [torch.tensor([65_000, 2, 3], dtype=torch.int32), torch.tensor([4, 5])],
        as_file,
        lambda path: [{"input_ids": [65_000, 2, 3], "attention_mask": [1, 1, 1]}, {"input_ids": [4, 5]}],
        lambda path: [TensorDict({"input_ids": torch.tensor(tokens)}) for tokens in ([65_000, 2, 3], [4, 5])],
    ],
    ids=["lists", "tensors", "memory map", "mappings", "tensordicts"],
)
def test_packed_tokens_accepts_several_document_types(make, tmp_path):
    blocks = PackedTokens(make(tmp_path), seq=4, lengths=[3, 2])
    assert [block["input_ids"].tolist() for block in blocks] == [[65_000, 2, 3, 4], [5, 0, 0, 0]]


def test_tokens_with_ignored_labels_are_context_only():
    chat = {"input_ids": [1, 2, 3, 4], "labels": [-100, -100, 3, 4]}
    blocks = list(PackedTokens([chat, chat], seq=3, lengths=[4, 4]))
    assert [block["labels"].tolist() for block in blocks] == [[-100, 3, 4], [-100, -100, 3], [4, -100, -100]]
    assert [block["input_ids"].tolist() for block in blocks] == [[1, 2, 3], [4, 1, 2], [3, 4, 0]]


@pytest.mark.parametrize(
    "lengths",
    [[3, 0, 2], torch.tensor([3, 0, 2], dtype=torch.int32), np.array([3, 0, 2], dtype=np.uint8), [3, 0, 2].__getitem__],
    ids=["list", "tensor", "array", "function"],
)
def test_packed_tokens_accepts_several_length_types(lengths):
    assert len(PackedTokens(documents([3, 0, 2]), seq=2, lengths=lengths)) == 3


class Counted:
    """Documents that count the reads of each document, and record the requests for fetching."""

    def __init__(self, lengths: list[int]) -> None:
        self.documents = documents(lengths)
        self.read: list[int] = []
        self.told: list[int] = []
        self.closed = False

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, index: int) -> list[int]:
        raise AssertionError("one by one")

    def __getitems__(self, indices: list[int]) -> list[list[int]]:
        self.read += indices
        return [self.documents[index] for index in indices]

    def prefetch(self, indices: Tensor) -> None:
        self.told += indices.tolist()

    def fingerprint(self) -> dict:
        return {"files": 3}

    def close(self) -> None:
        self.closed = True


def test_document_is_read_once_per_call_for_all_blocks():
    source = Counted([9, 2, 9])
    blocks = PackedTokens(source, seq=4, lengths=[9, 2, 9])
    samples = blocks.__getitems__([4, 0, 1, 2])
    assert sorted(source.read) == [0, 1, 2]
    assert plain(samples) == plain([packed([9, 2, 9], 4)[index] for index in (4, 0, 1, 2)])


def test_packed_tokens_forwards_prefetch_close_and_fingerprint():
    source = Counted([9, 2, 9])
    blocks = PackedTokens(source, seq=4, lengths=[9, 2, 9])
    blocks.prefetch(torch.tensor([4, 2]))
    blocks.close()
    assert source.told == [2, 0, 1]
    assert source.closed
    assert blocks.fingerprint()["documents"] == {"files": 3}


def test_packed_tokens_accepts_documents_without_optional_methods():
    blocks = packed([3, 4], 2)
    blocks.prefetch(torch.tensor([0]))
    blocks.close()
    assert blocks.fingerprint()["documents"] == {"count": 2}


def test_fingerprint_differs_for_different_blocks():
    prints = [
        packed(lengths, seq, **options).fingerprint()
        for lengths, seq, options in [([3, 4], 2, {}), ([4, 3], 2, {}), ([3, 4], 3, {}), ([3, 4], 2, {"last_block": "drop"})]
    ]
    assert prints[0] == packed([3, 4], 2).fingerprint()
    assert all(prints.count(fingerprint) == 1 for fingerprint in prints)


def test_blocks_can_be_pickled():
    blocks = packed([3, 4], 2)
    assert plain(pickle.loads(pickle.dumps(blocks))) == plain(blocks)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_loader_shuffles_blocks_over_ranks_and_resumes(ranks):
    lengths = [5, 0, 13, 7, 1, 1, 9]

    def loaders() -> list:
        made = [build_loader(packed(lengths, 4), global_batch_size=3, seed=0) for _ in range(ranks)]
        for rank, loader in enumerate(made):
            loader._source.options = replace(loader._source.options, rank=rank, ranks=ranks)
        return made

    first, second = loaders(), loaders()
    batches = [batch for loader in first for batch in loader.until(2)]
    for loader in second:
        loader.load_state_dict(first[0].state_dict())
        batches += list(loader.until("1ep"))
    rows = [
        {name: batch[name][index] for name in ("input_ids", "documents")} for batch in batches for index in range(len(batch))
    ]
    assert len(rows) == 9
    assert sorted(chain(*unpacked(rows, len(lengths)))) == sorted(chain(*documents(lengths)))


class Sharded(Counted):
    """Documents that lie in shards."""

    shard_sizes = (0, 3, 1, 0, 4)  # documents of each

    def order(self, seed: int, shuffle: bool | BlockShuffle) -> None:
        raise AssertionError("the order of documents is not that of blocks")


@pytest.mark.parametrize("last_block", ["pad", "drop"])
@pytest.mark.parametrize("shuffle", [BlockShuffle(block_size=1, streams=1), True, False], ids=["near by", "default", "none"])
def test_sharded_documents_are_read_shard_by_shard(shuffle, last_block):
    """Windows of one shard keep the blocks that begin in a shard together."""
    lengths = [5, 9, 3, 40, 2, 0, 8, 12]
    blocks = PackedTokens(Sharded(lengths), seq=4, lengths=lengths, last_block=last_block)
    order = blocks.order(0, shuffle)
    indices = order.indices(0, 0, order.size)
    assert indices.sort().values.equal(torch.arange(len(blocks)))
    if shuffle is False:
        assert indices.equal(torch.arange(len(blocks)))
    elif shuffle is not True:
        shard_of = torch.bucketize(indices * 4, torch.tensor([17, 57, 57, 79]), right=True)
        assert int((shard_of.diff() != 0).sum()) == 2, "three shards have blocks, each is come to once"


def test_documents_of_real_shards_are_packed_through_the_loader(tmp_path):
    lengths = [5, 9, 3, 40, 2, 1, 8, 12] * 4
    write_shards(
        ({"input_ids": np.array(document, dtype=np.int32)} for document in documents(lengths)),
        str(tmp_path / "data"),
        format="mds",
        max_shard_bytes=400,
    )
    source = ShardedDataset(tmp_path / "data", cache=tmp_path / "cache")
    blocks = PackedTokens(source, seq=16, lengths=lengths)
    assert len(source.shard_sizes) > 3
    batches = list(build_loader(blocks, global_batch_size=3, seed=0).until("1ep"))
    rows = [
        {name: batch[name][index] for name in ("input_ids", "documents")} for batch in batches for index in range(len(batch))
    ]
    blocks.close()
    assert len(rows) == len(blocks) == 20
    assert sorted(chain(*unpacked(rows, len(lengths)))) == sorted(chain(*documents(lengths)))


def test_documents_without_shards_are_shuffled_globally():
    blocks = packed([5, 9, 3], 4)
    assert blocks.order(3, True) == ElasticSampler(size=5, seed=3)
    with pytest.raises(ConfigError, match=r"the documents have no shards to shuffle within\. Use shuffle=True"):
        blocks.order(3, BlockShuffle())


@pytest.mark.parametrize("index", [-1, 3])
def test_block_index_out_of_range_raises_index_error(index):
    with pytest.raises(IndexError, match=f"index must be in 0 to 2, got {index}"):
        packed([5], 2)[index]


@pytest.mark.parametrize(
    ("docs", "options", "message"),
    [
        ([[1, 2]], {"seq": 0}, "seq must be an integer of at least 1, got 0"),
        ([[1, 2]], {"seq": True}, "seq must be an integer of at least 1, got True"),
        ([[1, 2]], {"last_block": "short"}, "last_block must be 'pad' or 'drop', got 'short'"),
        ([], {}, "0 tokens in 0 documents make no block of 4"),
        ([[], []], {}, "0 tokens in 2 documents make no block of 4"),
        ([[1, 2]], {"last_block": "drop"}, "2 tokens in 1 document make no block of 4. Use last_block='pad'"),
        ([[1, 2]], {"lengths": [2, 2]}, r"one number per document \(1\), got shape \(2,\)"),
        ([[1, 2]], {"lengths": [-2]}, "integers of at least 0, got int64, least -2"),
        ([[1, 2]], {"lengths": [2.0]}, "integers of at least 0, got float64"),
    ],
)
def test_invalid_options_are_refused(docs, options, message):
    with pytest.raises(ConfigError, match=message):
        PackedTokens(docs, **{"seq": 4, "lengths": [len(document) for document in docs], **options})


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([1, 2], "PackedTokens: document 1 has 2 tokens, but lengths has 3. Compute lengths"),
        ("abc", "document 1 must be tokens, .* got a str. Tokenize the document"),
        (torch.zeros(3, 2), r"got a Tensor of shape \(3, 2\). Tokenize the document"),
        (torch.tensor(3), "got a Tensor of shape"),
        (5, "got a int. Tokenize the document"),
        ([0.5, 1.0, 2.0], r"got float64 of shape \(2,\). Tokenize the document"),
        ([[1], [2], [3]], r"got int64 of shape \(2, 1\). Tokenize the document"),
        ({"text": "abc"}, r"document 1 must have 'input_ids', got \['text'\]"),
        ({"input_ids": [1, 2, 3], "labels": [1]}, "document 1 has 3 tokens and 1 labels. Give a label per token"),
    ],
)
def test_invalid_document_error_names_the_document(document, message):
    blocks = PackedTokens([[1, 2], document], seq=4, lengths=[2, 3])
    with pytest.raises(DataError, match=message):
        blocks[0]
