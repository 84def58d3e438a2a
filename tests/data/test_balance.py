"""Batches balanced by tokens: the same global batches on any number of ranks, nearly equal costs, and the same gradients."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

import dtrain as dt
from dtrain.data.balance import deal_by_cost, group_ranks
from dtrain.data.batch import to_device
from dtrain.data.sample_lengths import known_lengths
from dtrain.errors import CheckpointMismatchError, ConfigError, DataError
from samples import Texts, pad

# Each parallelism sums in another order. Float64, relative.
TOLERANCE = 1e-12
COSTS: dict[str, Any] = {"tokens": "tokens", "squared": "squared_tokens", "function": lambda tokens: tokens * (40 + tokens)}


def log_normal(count: int, seed: int = 0) -> np.ndarray:
    """Lengths of samples as they are in data: log-normal, from 50 to 8,000 tokens."""
    draw = np.random.default_rng(seed)
    lengths = np.exp(draw.normal(np.log(700), 1.0, 4 * count)).astype(np.int64)
    return lengths[(lengths >= 50) & (lengths <= 8000)][:count]


def build(sizes: Any, /, *, rank: int = 0, ranks: int = 1, **options: Any) -> dt.data.Loader:
    options = {"global_batch_size": 16, "seed": 1, "balance": "tokens", "collate": pad, "lengths": list(sizes)} | options
    loader = dt.build_loader(Texts(sizes), **options)
    loader._source.options = replace(loader._source.options, rank=rank, ranks=ranks)
    return loader


def indices_of(batch: Any) -> list[int]:
    parts = batch if isinstance(batch, dt.data.MicrobatchList) else [batch]
    return [index for part in parts for index in part["index"].tolist()]


def on_ranks(sizes: Any, ranks: int, /, length: str = "2ep", **options: Any) -> list[list[list[int]]]:
    """Return the indices of each rank by batch."""
    loaders = [build(sizes, rank=rank, ranks=ranks, **options).until(length) for rank in range(ranks)]
    return [[indices_of(batch) for batch in batches] for batches in zip(*loaders, strict=True)]


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("seed", range(3))
def test_spread_of_costs_is_below_one_percent_on_log_normal_lengths(ranks, seed):
    loader = build(log_normal(20 * 256, seed), ranks=ranks, global_batch_size=256, collate=len)
    spreads = [loader.balance.spread for _ in loader.until("1ep")]
    assert len(spreads) == 20
    assert max(spreads) < 0.01


def test_spread_without_balance_shows_what_balance_is_for():
    loader = build(log_normal(5 * 256), ranks=8, global_batch_size=256, collate=len, balance=None, max_tokens=8192)
    assert min(loader.balance.spread for _ in loader.until("1ep")) > 0.1


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("options", [{}, {"max_tokens": 90}, {"max_tokens": 90, "padded": False}, {"last_batch": "pad"}])
def test_global_batches_are_the_same_on_every_number_of_ranks(cost, options):
    lengths = np.random.default_rng(0).integers(1, 80, 41)
    plain = [
        sorted(batch) for batch in map(indices_of, build(lengths, balance=None, lengths=None, **cut(options)).until("2ep"))
    ]
    for ranks in (1, 2, 4, 8):
        dealt = on_ranks(lengths, ranks, balance=COSTS[cost], **options)
        assert [sorted(chain.from_iterable(batch)) for batch in dealt] == plain


def cut(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that have a meaning without lengths."""
    return {name: value for name, value in options.items() if name == "last_batch"}


def test_max_tokens_without_balance_leaves_ranks_their_samples():
    lengths = np.random.default_rng(0).integers(1, 80, 41)
    plain = on_ranks(lengths, 4, balance=None, lengths=None)
    split = on_ranks(lengths, 4, balance=None, max_tokens=90)
    assert [[sorted(rank) for rank in batch] for batch in split] == [[sorted(rank) for rank in batch] for batch in plain]


@given(
    seed=st.integers(0, 3),
    size=st.integers(1, 60),
    batch=st.integers(1, 12),
    max_tokens=st.sampled_from([None, 40]),
    last_batch=st.sampled_from(["short", "pad"]),
    legs=st.lists(st.tuples(st.integers(1, 6), st.sampled_from([1, 2, 3, 4, 8])), min_size=1, max_size=6),
)
@settings(max_examples=60, deadline=None)
def test_chained_resumes_on_any_ranks_read_the_same_samples(seed, size, batch, max_tokens, last_batch, legs):
    lengths = np.random.default_rng(seed).integers(0, 40, size)
    options: dict[str, Any] = {"global_batch_size": batch, "last_batch": last_batch, "max_tokens": max_tokens}
    plain = build(lengths, balance=None, lengths=None, global_batch_size=batch, last_batch=last_batch)
    steps = sum(count for count, _ in legs)
    expected = [sorted(indices_of(issued)) for issued in plain.until(steps)]
    seen, state = [], None
    for count, ranks in legs:
        group = [build(lengths, rank=rank, ranks=ranks, **options) for rank in range(ranks)]
        for loader in group:
            if state is not None:
                loader.load_state_dict(state)
        streams = [loader.until(loader.position.batches + count) for loader in group]
        seen += [sorted(chain.from_iterable(map(indices_of, parts))) for parts in zip(*streams, strict=True)]
        states = [loader.state_dict() for loader in group]
        state = states[0]
        assert all(other == state for other in states)
    assert seen == expected


@given(costs=st.lists(st.floats(0, 1e9), max_size=50), ranks=st.integers(1, 9))
@settings(max_examples=200, deadline=None)
def test_each_sample_is_dealt_once_and_ranks_have_samples_if_there_are_enough(costs, ranks):
    owners = deal_by_cost(np.array(costs), ranks)
    assert sorted(set(owners.tolist())) == list(range(min(len(costs), ranks)))
    assert len(owners) == len(costs)


@given(
    lengths=st.lists(st.lists(st.integers(0, 30), max_size=20), min_size=1, max_size=5),
    max_tokens=st.integers(30, 120),
    padded=st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_microbatches_keep_the_limit_and_are_as_many_on_each_rank(lengths, max_tokens, padded):
    lengths = [sorted(own, reverse=True) for own in lengths]
    groups = group_ranks(lengths, max_tokens, padded=padded)
    count = max(map(len, groups))
    for own, sizes in zip(lengths, groups, strict=True):
        assert sum(sizes) == len(own)
        assert len(sizes) == min(count, len(own))
        first = 0
        for size in sizes:
            group = own[first : first + size]
            assert (max(group) * size if padded else sum(group)) <= max_tokens
            first += size


def test_each_microbatch_is_padded_to_its_own_longest_sample():
    lengths = [3, 50, 4, 49, 5, 6, 2, 48]
    loader = build(lengths, global_batch_size=8, max_tokens=100)
    (batch,) = loader.until("1ep")
    assert isinstance(batch, dt.data.MicrobatchList)
    assert [list(part["tokens"].shape) for part in batch] == [[2, 50], [2, 48], [4, 5]]
    assert loader.balance.padded_tokens == (100 + 96 + 20,)
    assert loader.balance.padding == pytest.approx(1 - sum(lengths) / 216)


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("limit", [1, 49, 60, 99, 100, None])
def test_smaller_limit_splits_microbatches_into_parts_in_order(padded, limit):
    lengths = [3, 50, 4, 49, 5, 6, 2, 48]
    (batch,) = build(lengths, global_batch_size=8, max_tokens=100, padded=padded).until("1ep")
    for copy in (batch, pickle.loads(pickle.dumps(batch)), to_device(batch, torch.device("cpu"))):
        parts = dt.data.split_batch(copy.with_max_tokens(limit), 8)
        assert indices_of(dt.data.MicrobatchList(parts)) == indices_of(batch)
        for part in parts:
            tokens = [lengths[index] for index in part["index"].tolist()]
            width = part["tokens"].shape[1] if padded else 0
            assert len(tokens) == 1 or max(len(tokens) * width, sum(tokens)) <= (limit or 100)
        if limit in (None, 100):
            assert len(parts) == len(batch)


# Sources of lengths


def test_lengths_of_a_column_a_function_an_array_and_the_dataset_agree():
    sizes = [5, 9, 1, 7, 3, 8, 2, 6]
    columns = {"x": torch.zeros(8, 2), "length": torch.tensor(sizes)}

    class Knowing(Texts):
        def sample_lengths(self, column: str | None) -> list[int]:
            return self.sizes

    kinds: list[tuple[Any, Any]] = [
        (Texts(sizes), sizes),
        (Texts(sizes), np.array(sizes, dtype=np.int16)),
        (Texts(sizes), torch.tensor(sizes)),
        (Texts(sizes), lambda number: sizes[number]),
        (Texts(sizes), lambda number: torch.tensor(sizes)[number]),
        (Knowing(sizes), None),
        (columns, "length"),
        (TensorDict(columns, batch_size=[8]), "length"),
        (dt.data.mix({"a": Knowing(sizes)}, weights={"a": 1}), None),
    ]
    for dataset, lengths in kinds:
        loader = dt.build_loader(
            dataset, global_batch_size=8, seed=0, balance="tokens", lengths=lengths, max_tokens=18, collate=len
        )
        next(loader.until("1ep"))
        assert loader.balance.tokens == (41,)
        assert loader.balance.microbatches == (4,)


def test_lengths_of_a_hugging_face_column_are_numbers_or_lengths_of_lists():
    datasets = pytest.importorskip("datasets")
    sizes = [5, 9, 1, 7]
    rows = {"input_ids": [[1] * size for size in sizes], "length": sizes}
    dataset = datasets.Dataset.from_dict(rows).select([3, 1, 0])
    for column in ("input_ids", "length"):
        assert known_lengths(dataset, column).parts.tolist() == [7, 9, 5]


def test_lengths_of_a_mixture_are_those_of_its_sources():
    packed = dt.data.PackedTokens([[1] * 5, [2] * 3], seq=4, lengths=[5, 3])
    mixture = dt.data.mix({"a": packed, "b": {"x": torch.zeros(2), "length": torch.tensor([6, 7])}}, weights={"a": 1, "b": 1})
    with pytest.raises(ConfigError, match=r"balance and max_tokens need lengths, which a ColumnDataset does not know"):
        mixture.sample_lengths()
    both = dt.data.mix({"a": packed, "b": packed}, weights={"a": 1, "b": 1}).sample_lengths()
    parts, counts = both.parts_of(np.array([3, 0, 1]))
    assert (parts.tolist(), counts.tolist()) == ([1, 3, 4, 1, 3], [2, 1, 2])


def test_shards_have_the_lengths_that_their_writer_counted(tmp_path):
    texts = Texts([5, 9, 1, 7])
    samples = [{"tokens": texts[number]["tokens"].numpy(), "count": texts.sizes[number]} for number in range(4)]
    for lengths in ("tokens", "count"):
        dt.data.write_shards(samples, tmp_path / lengths, format="mds", max_shard_bytes=200, lengths=lengths)
        dataset = dt.data.ShardedDataset(tmp_path / lengths)
        assert len(dataset.entries) > 1
        assert dataset.sample_lengths().parts.tolist() == [5, 9, 1, 7]
        loader = dt.build_loader(dataset, global_batch_size=4, seed=0, balance="tokens", max_tokens=9, collate=len)
        next(loader.until("1ep"))
        assert loader.balance.tokens == (22,)
    with pytest.raises(ConfigError, match=r"lengths must be None, got 'tokens', because shards have lengths of one column"):
        dataset.sample_lengths("tokens")


def test_shards_without_lengths_or_with_damaged_lengths_are_refused(tmp_path):
    samples = [{"tokens": np.ones(3)}, {"tokens": np.ones(2)}]
    dt.data.write_shards(samples, tmp_path / "without", format="mds")
    with pytest.raises(ConfigError, match=r"has no lengths of its samples. Pass lengths= to build_loader, or write"):
        dt.build_loader(dt.data.ShardedDataset(tmp_path / "without"), global_batch_size=2, seed=0, balance="tokens")
    dt.data.write_shards(samples, tmp_path / "with", format="mds", lengths="tokens")
    path = tmp_path / "with" / "_lengths.npy"
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole[:20], b"", b"x" * len(whole)):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=r"_lengths.npy: (cannot be read|must have a length)"):
            dt.data.ShardedDataset(tmp_path / "with").sample_lengths()
    np.save(path, np.array([3, 2, 1], dtype=np.int32))
    with pytest.raises(DataError, match=r"_lengths.npy: must have a length of at least 0 for each of 2 samples"):
        dt.data.ShardedDataset(tmp_path / "with").sample_lengths()


def test_writer_refuses_a_column_without_lengths_and_leaves_nothing(tmp_path):
    for samples, message in (
        ([{"x": 1}], r"lengths must name a column of each sample, but sample 0 has no 'tokens', only \['x'\]"),
        ([{"tokens": 1.5}], r"write_shards: lengths must return an integer of at least 0, got 1.5 for sample 0"),
        ([{"tokens": 2**31}], r"lengths must be below 2\*\*31"),
    ):
        with pytest.raises(ConfigError, match=message):
            dt.data.write_shards(samples, tmp_path / "new", format="jsonl", lengths="tokens")
        assert not list((tmp_path / "new").glob("*"))


# Packing


def test_packed_blocks_are_balanced_by_the_squares_of_their_documents():
    """Each block has as many tokens, but attention costs the squares of the documents' parts."""
    draw = np.random.default_rng(0)
    sizes = log_normal(2000) // 10
    packed = dt.data.PackedTokens([np.zeros(size, dtype=np.int64) for size in sizes], seq=256, lengths=sizes)
    table = packed.sample_lengths()
    for number in draw.integers(0, len(packed), 20).tolist():
        documents = packed[number]["documents"]
        expected = torch.unique_consecutive(documents[documents >= 0], return_counts=True)[1]
        assert table.parts_of(np.array([number]))[0].tolist() == expected.tolist()

    def spread(balance: str | None) -> float:
        loader = dt.build_loader(packed, global_batch_size=64, seed=0, balance=balance, max_tokens=2**14)
        loader._source.options = replace(loader._source.options, ranks=8)
        return packed_squares(packed, loader)

    assert spread("squared_tokens") < 0.02 < spread(None)


def packed_squares(packed: dt.data.PackedTokens, loader: dt.data.Loader) -> float:
    """Return the spread of the sums of squares over the ranks of the first batch."""
    sums = []
    for rank in range(8):
        loader.load_state_dict({**loader.state_dict(), "epoch": 0, "samples": 0, "batches": 0, "total": 0})
        loader._source.options = replace(loader._source.options, rank=rank)
        parts = next(loader.until("1ep"))
        blocks = [row for part in parts for row in part["documents"]]
        counts = [torch.unique_consecutive(row[row >= 0], return_counts=True)[1] for row in blocks]
        sums.append(sum(int(count.square().sum()) for count in counts))
    return (max(sums) - min(sums)) * 8 / sum(sums)


# Iterable datasets


class Stream:
    """The samples of ``Texts`` as a stream."""

    def __init__(self, lengths: Any) -> None:
        self.texts = Texts(lengths)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter([self.texts[index] for index in range(len(self.texts))])


def token_count(sample: dict[str, Any]) -> int:
    return len(sample["tokens"])


@pytest.mark.costly
@pytest.mark.parametrize("lengths", [token_count, "tokens"])
@pytest.mark.parametrize("max_tokens", [None, 90])
@pytest.mark.parametrize("workers", [0, 1])
def test_streams_are_balanced_by_a_function_of_a_sample(lengths, max_tokens, workers):
    sizes = np.random.default_rng(0).integers(1, 80, 40)
    options: dict[str, Any] = {
        "global_batch_size": 16,
        "seed": 0,
        "shuffle": False,
        "collate": pad,
        "num_workers": workers,
        "start_method": "fork",
    }

    def stream(rank: int, ranks: int) -> tuple[dt.data.Loader, Iterator[Any]]:
        loader = dt.build_loader(Stream(sizes), balance="tokens", lengths=lengths, max_tokens=max_tokens, **options)
        loader._source.options = replace(loader._source.options, rank=rank, ranks=ranks)
        return loader, loader.until("1ep")

    for ranks in (1, 2, 8):
        loaders = [stream(rank, ranks) for rank in range(ranks)]
        for start, *batches in zip((0, 16, 32), *(batches for _, batches in loaders), strict=True):
            assert sorted(chain.from_iterable(map(indices_of, batches))) == list(range(start, min(start + 16, 40)))
            balance = loaders[0][0].balance
            assert all(loader.balance == balance for loader, _ in loaders)
            assert sum(balance.samples) == min(16, 40 - start)


def test_stream_samples_have_the_transform_of_their_position():
    sizes = np.random.default_rng(0).integers(1, 80, 40)

    def noisy(sample: dict[str, Any], generator: torch.Generator) -> dict[str, Any]:
        return {**sample, "tokens": sample["tokens"][:1] + torch.rand(1, generator=generator, dtype=torch.float64)}

    def seen(**options: Any) -> dict[int, float]:
        loader = dt.build_loader(
            Stream(sizes), global_batch_size=16, seed=0, shuffle=False, transform=noisy, collate=pad, **options
        )
        parts = chain.from_iterable(
            batch if isinstance(batch, dt.data.MicrobatchList) else [batch] for batch in loader.until("1ep")
        )
        return {
            i: value for part in parts for i, value in zip(part["index"].tolist(), part["tokens"][:, 0].tolist(), strict=True)
        }

    assert seen() == seen(balance="tokens", lengths="tokens", max_tokens=100)


# Reading


def test_workers_and_the_rank_itself_read_the_same_microbatches():
    lengths = np.random.default_rng(0).integers(1, 80, 41)

    def shapes(**options: Any) -> list[list[tuple[list[int], list[int]]]]:
        loader = build(lengths, max_tokens=90, **options)
        return [[(part["index"].tolist(), list(part["tokens"].shape)) for part in batch] for batch in loader.until("2ep")]

    assert shapes() == shapes(num_workers=2, start_method="fork")


def test_samples_that_cannot_be_read_leave_their_microbatch():
    lengths = [10] * 8

    class Damaged(Texts):
        def __getitem__(self, index: int) -> dict[str, Any]:
            if index in (2, 5):
                raise ValueError("damaged")
            return super().__getitem__(index)

    loader = dt.build_loader(
        Damaged(lengths),
        global_batch_size=8,
        seed=0,
        shuffle=False,
        collate=pad,
        lengths=lengths,
        max_tokens=20,
        on_error="skip",
    )
    (batch,) = loader.until("1ep")
    assert [part["index"].tolist() for part in batch] == [[0, 1], [3], [4], [6, 7]]
    assert [index for index, _ in loader.skipped.samples] == [2, 5]


def test_rank_without_samples_has_an_empty_microbatch():
    loader = build([5, 6], rank=3, ranks=4, max_tokens=10)
    (batch,) = loader.until("1ep")
    assert isinstance(batch, dt.data.MicrobatchList)
    assert [len(part["tokens"]) for part in batch] == [0]
    assert loader.balance.samples == (1, 1, 0, 0)


def test_resume_may_balance_in_another_way():
    lengths = np.random.default_rng(0).integers(1, 80, 41)
    whole = [sorted(indices_of(batch)) for batch in build(lengths).until("1ep")]
    first = build(lengths)
    begun = [sorted(indices_of(batch)) for batch in first.until(1)]
    again = build(lengths, balance="squared_tokens", max_tokens=100)
    again.load_state_dict(first.state_dict())
    assert begun + [sorted(indices_of(batch)) for batch in again.until("1ep")] == whole
    other = build(lengths, seed=2)
    with pytest.raises(CheckpointMismatchError):
        other.load_state_dict(first.state_dict())


# Errors

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "unknown name": ({"balance": "words"}, r"balance must be 'tokens' or 'squared_tokens', got 'words'"),
    "a number": ({"balance": 2}, r"balance must be 'tokens' or 'squared_tokens', got 2"),
    "no lengths": ({"lengths": None}, r"balance and max_tokens need lengths, which a Texts does not know. Pass lengths=\[len"),
    "no column": ({"lengths": "length"}, r"lengths must name a column of the dataset, but a Texts has no 'length'"),
    "lengths alone": (
        {"balance": None},
        r"lengths must come with balance or max_tokens, got lengths alone. Pass balance='tokens'",
    ),
    "too few": ({"lengths": [1, 2]}, r"lengths must have one length per sample \(3\), got shape \(2,\)"),
    "negative": ({"lengths": [1, -2, 3]}, r"lengths must be at least 0, got -2 for sample 1"),
    "fractions": ({"lengths": [1.0, 2.5, 3.0]}, r"lengths must be integers, got float64"),
    "long sample": ({"max_tokens": 30}, r"max_tokens must be at least the longest sample, got 30 and a sample of 31 tokens"),
    "no tokens": ({"max_tokens": 0}, r"max_tokens must be an integer of at least 1, got 0"),
    "negative cost": ({"balance": lambda t: 10 - t}, r"balance must return finite costs of at least 0, got -21 for 31 tokens"),
    "NaN": ({"balance": lambda t: (10.0 - t).sqrt()}, r"balance must return finite costs of at least 0, got nan for 31 tokens"),
    "one cost": (
        {"balance": lambda t: t.sum()},
        r"balance must return a cost per length, a tensor \[5\], got Tensor of shape \(\)",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_invalid_arguments_are_refused_before_the_first_batch(name):
    options, message = WRONG[name]
    with pytest.raises(ConfigError, match=message):
        dt.build_loader(
            Texts([3, 31, 5]), global_batch_size=2, seed=0, **({"balance": "tokens", "lengths": [3, 31, 5]} | options)
        )


LATE: dict[str, tuple[Any, dict[str, Any], str]] = {
    "negative": (lambda number: -1, {}, r"lengths must return an integer of at least 0, got -1 for sample"),
    "fraction": (lambda number: 1.5, {}, r"lengths must return an integer of at least 0, got 1.5 for sample"),
    "long sample": (
        lambda number: 12,
        {"max_tokens": 10},
        r"max_tokens must be at least the longest sample, got 10 and .* 12 tokens",
    ),
    "negative cost": (lambda number: 12, {"balance": lambda t: -t}, r"balance must return finite costs of at least 0, got -12"),
}


@pytest.mark.parametrize("name", LATE)
def test_invalid_results_of_a_length_function_are_refused_with_their_batch(name):
    lengths, options, message = LATE[name]
    loader = dt.build_loader(
        Texts([3, 4]), global_batch_size=2, seed=0, **({"balance": "tokens", "lengths": lengths} | options)
    )
    with pytest.raises(ConfigError, match=message):
        next(loader.until("1ep"))


@pytest.mark.parametrize("lengths", [None, [1, 2]])
def test_streams_without_a_length_function_are_refused(lengths):
    with pytest.raises(ConfigError, match=r"lengths must be a function of a sample, or a key of it, .* got (None|a list)"):
        dt.build_loader(Stream([1]), global_batch_size=2, seed=0, shuffle=False, balance="tokens", lengths=lengths)


def test_streams_that_are_split_already_are_refused():
    with pytest.raises(ConfigError, match="balance and max_tokens must be left out for a dataset that is split over ranks"):
        dt.build_loader(
            Stream([1]), global_batch_size=2, seed=0, shuffle=False, pre_sharded=True, balance="tokens", lengths=token_count
        )


def test_methods_that_select_samples_refuse_microbatches():
    batch = dt.data.MicrobatchList([torch.ones(2, 3), torch.ones(1, 2)])
    with pytest.raises(ConfigError, match=r"needs tensors with a row per sample, got 2 microbatches. Leave max_tokens out"):
        dt.data.batch.select_samples(batch, torch.tensor([0]))
