"""A stream of blocks: the same as with known lengths, wherever it stops and on any source that continues it."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import default_collate
from torchdata.nodes import Batcher, IterableWrapper, Loader, Mapper

from documents import LENGTHS, SEQ, documents, plain, unpacked
from dtrain.data.loader import build_loader
from dtrain.data.packed_tokens import PackedTokens
from dtrain.data.token_stream import TokenStream, pack_tokens
from dtrain.errors import CheckpointMismatchError, ConfigError, DataError

TAILS = st.sampled_from(["pad", "drop"])


class Repeated:
    """An iterable that only knows how to begin."""

    def __init__(self, lengths: list[int]) -> None:
        self.documents = documents(lengths)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.documents)


class Stateful(Repeated):
    """An iterable with a position of its own, which begins at the start unless one was just loaded."""

    offset = begin = 0

    def __iter__(self) -> Iterator[list[int]]:
        begin, self.begin = self.begin, 0
        for number in range(begin, len(self.documents)):
            self.offset = number + 1
            yield self.documents[number]

    def state_dict(self) -> dict[str, int]:
        return {"at": self.offset}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.offset = self.begin = state["at"]


SOURCES: dict[str, Callable[[list[int]], Any]] = {
    "sequence": documents,
    "iterable": Repeated,
    "stateful": Stateful,
    "node": lambda lengths: Mapper(IterableWrapper(Repeated(lengths)), torch.tensor),
}


@given(lengths=LENGTHS, seq=SEQ, last_block=TAILS)
@settings(max_examples=200, deadline=None)
def test_token_stream_equals_blocks_packed_from_known_lengths(lengths, seq, last_block):
    blocks = plain(pack_tokens(documents(lengths), seq=seq, last_block=last_block))
    enough = sum(lengths) >= (seq if last_block == "drop" else 1)
    assert blocks == (
        plain(PackedTokens(documents(lengths), seq=seq, lengths=lengths, last_block=last_block)) if enough else []
    )


@pytest.mark.parametrize("source", SOURCES)
@given(lengths=LENGTHS, seq=SEQ, last_block=TAILS, stops=st.lists(st.integers(0, 6), max_size=6))
@settings(max_examples=60, deadline=None)
def test_chained_resumes_give_the_same_blocks(source, lengths, seq, last_block, stops):
    """Each leg has a source of its own, takes some blocks, and hands its state on as text."""
    seen, state = [], None
    for stop in [*stops, None]:
        stream = pack_tokens(SOURCES[source](lengths), seq=seq, last_block=last_block)
        if state is not None:
            stream.load_state_dict(json.loads(state))
        for block in stream if stop is None else taken(stream, stop):
            seen.append(block)
        state = json.dumps(stream.state_dict())
    assert plain(seen) == plain(pack_tokens(documents(lengths), seq=seq, last_block=last_block))
    if last_block == "pad":
        assert unpacked(seen, len(lengths)) == documents(lengths)


def taken(stream: TokenStream, count: int) -> Iterator[Any]:
    for _ in range(count):
        block = next(stream, None)
        if block is not None:
            yield block


@pytest.mark.parametrize("source", SOURCES)
def test_position_stays_small_and_exact_after_many_documents(source):
    lengths = [1, 2, 0, 5] * 100
    blocks = plain(pack_tokens(documents(lengths), seq=7))
    for stop in (90, 100, 113):
        stream, resumed = (pack_tokens(SOURCES[source](lengths), seq=7) for _ in range(2))
        assert plain(taken(stream, stop)) == blocks[:stop]
        state = stream.state_dict()
        assert len(json.dumps(state)) < 200
        assert state["skip"] < 70
        resumed.load_state_dict(state)
        assert plain(resumed) == blocks[stop:]


def test_position_stores_a_document_count_and_an_offset():
    stream = pack_tokens(documents([3, 0, 9]), seq=4)
    next(stream)
    assert stream.state_dict() == {"seq": 4, "documents": 2, "offset": 1, "skip": 2, "source": None}


@pytest.mark.parametrize("source", SOURCES)
def test_new_loop_starts_at_the_first_block(source):
    stream = pack_tokens(SOURCES[source]([3, 0, 9]), seq=4)
    first = plain(stream)
    assert len(first) == 3
    assert plain(stream) == first
    assert plain(islice(stream, 2)) == first[:2]
    assert plain(stream) == first


def test_next_continues_after_an_unfinished_loop():
    stream = pack_tokens(documents([3, 0, 9]), seq=4)
    head = plain(islice(stream, 1))
    assert head + plain(taken(stream, 9)) == plain(stream)


def test_loaded_position_applies_to_one_loop_only():
    stream = pack_tokens(documents([3, 0, 9]), seq=4)
    whole = plain(stream)
    next(iter(stream))
    stream.load_state_dict(stream.state_dict())
    assert plain(stream) == whole[1:]
    assert plain(stream) == whole


@pytest.mark.parametrize("source", ["sequence", "iterable", "stateful"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_loader_distributes_blocks_over_ranks_and_resumes(source, ranks):
    lengths = [5, 0, 13, 7, 1, 1, 9]

    def loaders() -> list:
        stream = [pack_tokens(SOURCES[source](lengths), seq=4) for _ in range(ranks)]
        made = [build_loader(blocks, global_batch_size=2, seed=0, shuffle=False) for blocks in stream]
        for rank, loader in enumerate(made):
            loader._source.options = replace(loader._source.options, rank=rank, ranks=ranks)
        return made

    def steps(members: list, length: str) -> list[list[int]]:
        batches = zip(*[loader.until(length) for loader in members], strict=True)
        return [row for parts in batches for batch in parts for row in batch["input_ids"].tolist()]

    first, second = loaders(), loaders()
    begun = steps(first, "3ba")
    for loader in second:
        loader.load_state_dict(json.loads(json.dumps(first[0].state_dict())))
    expected = [block["input_ids"] for block in plain(pack_tokens(documents(lengths), seq=4))]
    assert begun + steps(second, "2ep") == expected * 2


class Flaky(Repeated):
    """Documents of which the third cannot be read at first."""

    fails = 1

    def __iter__(self) -> Iterator[list[int]]:
        for number, document in enumerate(self.documents):
            if number == 2 and self.fails:
                self.fails -= 1
                raise OSError("disk")
            yield document


def test_failed_document_read_loses_no_token():
    stream = pack_tokens(Flaky([3, 2, 4, 1]), seq=4)
    head = [next(stream)]
    with pytest.raises(OSError, match="disk"):
        next(stream)
    assert stream.state_dict()["documents"] == 1
    assert unpacked([*head, *taken(stream, 9)], 4) == documents([3, 2, 4, 1])


def test_token_stream_works_as_a_torchdata_node():
    lengths = [5, 0, 13, 7, 1, 1, 9]

    def loader() -> Loader:
        return Loader(Mapper(Batcher(pack_tokens(documents(lengths), seq=4), 2, drop_last=False), default_collate))

    whole = [batch["input_ids"].tolist() for batch in loader()]
    first, second = loader(), loader()
    stream = iter(first)
    head = [next(stream)["input_ids"].tolist() for _ in range(2)]
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert head + [batch["input_ids"].tolist() for batch in second] == whole


def resumed(stream: TokenStream, state: dict[str, Any]) -> Any:
    stream.load_state_dict(state)
    return next(stream)


@pytest.mark.parametrize(
    ("lengths", "change", "message"),
    [
        ([4, 9], {"seq": 3}, "must have seq=4"),
        ([4, 9], {"offset": None}, "must have seq=4"),
        ([4], {}, "after token 4 of document 1, which has 0. Resume with the same documents"),
        ([4, 3], {}, "after token 4 of document 1, which has 3. Resume with the same documents"),
        ([], {}, "the source ends before document 1 of the saved position"),
    ],
    ids=["other seq", "malformed", "fewer documents", "a shorter document", "no documents"],
)
@pytest.mark.parametrize("source", ["sequence", "iterable"])
def test_position_of_different_documents_is_refused(source, lengths, change, message):
    stream = pack_tokens(SOURCES[source]([4, 9]), seq=4)
    list(taken(stream, 2))
    state = {**stream.state_dict(), **change}
    state = {name: value for name, value in state.items() if value is not None or name == "source"}
    with pytest.raises(CheckpointMismatchError, match=message):
        resumed(pack_tokens(SOURCES[source](lengths), seq=4), state)


@pytest.mark.parametrize(
    ("docs", "options", "message"),
    [
        ([], {"seq": 0}, "pack_tokens: seq must be an integer of at least 1, got 0"),
        ([], {"seq": 4, "last_block": "short"}, "pack_tokens: last_block must be 'pad' or 'drop', got 'short'"),
        (5, {"seq": 4}, "documents must be an iterable of tokens, got a int"),
    ],
)
def test_invalid_options_are_refused(docs, options, message):
    with pytest.raises(ConfigError, match=message):
        pack_tokens(docs, **options)


def test_invalid_document_error_names_the_document():
    with pytest.raises(DataError, match=r"document 1 must be tokens, .* got a str"):
        list(pack_tokens([[1, 2], "abc"], seq=2))
