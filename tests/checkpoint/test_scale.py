"""Bytes and requests of a load as ranks are added: counted on real ranks, planned at 512, opened at 4,096.

The figures themselves are printed by ``benchmarks/scale_checkpoint.py``.
"""

import contextlib
import tracemalloc
from dataclasses import replace

import fsspec.config
import msgspec
import pytest
import torch

import scale_checkpoint as scale
from checkpoint.states import plain_state, watching
from dtrain.checkpoint import layout, reader
from dtrain.checkpoint.checkpoint_info import list_steps
from dtrain.checkpoint.index import PlacedShards
from dtrain.checkpoint.reader import verify
from dtrain.checkpoint.save import save_sharded
from places import servers

MANY = pytest.param(8, marks=pytest.mark.slow)


@pytest.mark.parametrize("world", [2, 4, MANY])
def test_resume_reads_little_beyond_its_own_shards(tmp_path, ranks, world):
    ranks(world).run(scale.save, str(tmp_path))
    for other, at_most in ((world, 1.05), (world // 2, 1.15)):
        for sizes in ranks(other).run(scale.load, str(tmp_path)):
            assert sizes["own"] <= sizes["read"] <= at_most * sizes["own"], (other, sizes)


def test_resume_on_more_ranks_reads_little_beyond_its_own_shards(tmp_path, ranks):
    ranks(2).run(scale.save, str(tmp_path))
    for sizes in ranks(4).run(scale.load, str(tmp_path)):
        assert sizes["own"] <= sizes["read"] <= 1.15 * sizes["own"]


@pytest.fixture(scope="module")
def s3():
    with contextlib.ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        server = stack.enter_context(servers.s3())
        patch.setitem(fsspec.config.conf, "s3", server.options)
        yield server


@pytest.mark.parametrize("world", [2, 4, MANY])
def test_requests_beyond_the_data_do_not_grow_with_the_number_of_ranks(s3, ranks, world):
    root = s3.root()
    ranks(world).run(scale.save_to_server, root, s3.environment)
    first, *others = [
        counts["requests"] - counts["data"] for counts in ranks(world).run(scale.load_from_server, root, s3.environment)
    ]
    assert 0 < first <= 11, "rank 0 finds the step, and looks at the names of all files"
    assert set(others) == {4}, "the manifest and its size, the index, the index of the rank"


@pytest.mark.parametrize("world", [2, 4, MANY])
def test_exchanges_of_a_save_and_a_load_are_as_many_at_any_number_of_ranks(tmp_path, ranks, world):
    for rank, messages in enumerate(ranks(world).run(scale.messages, str(tmp_path))):
        calls = {what: [function for function, *_ in messages[what]] for what in messages}
        assert {what: len(names) for what, names in calls.items()} == {"save": 11, "load": 8}
        assert calls["save"].count("gather") == 1, "the parts of all ranks, for rank 0 only"
        assert max(sent for what in messages.values() for _, _, sent, _ in what) < 700, rank


@pytest.mark.parametrize(
    ("ranks", "other", "at_most"), [(512, 512, 1.05), (512, 256, 1.15), (512, 384, 1.15), (512, 1024, 1.15)]
)
def test_planned_resume_of_512_ranks_reads_little_beyond_its_own_shards(ranks, other, at_most):
    model = scale.Model(width=4096, inner=11008, layers=8)
    planned = scale.Planned(shapes=model.shapes(), ranks=ranks)
    for rank in (0, other // 2):
        plan = planned.resume(rank, other)
        assert plan["own"] > 10e6
        assert plan["ratio"] <= at_most, (rank, plan)
        assert plan["files"] <= (1 if other == 512 else 8)


def test_index_grows_with_ranks_by_their_files_only():
    shapes = {f"layers.{number}.weight": (4096, 64) for number in range(20)}
    sizes = [scale.Planned(shapes=shapes, ranks=ranks).index_bytes for ranks in (64, 128, 256)]
    assert sizes[2] - sizes[1] <= 2 * (sizes[1] - sizes[0]) + 200 <= 2 * 64 * 100 + 200


def test_list_reads_manifests_only_which_do_not_grow(tmp_path, monkeypatch):
    for step in range(2):
        save_sharded(tmp_path, replace(plain_state(), clock=replace(plain_state().clock, step=step)))
    sizes = [path.stat().st_size for path in tmp_path.glob("*/manifest.json")]
    with watching(kind="preadv") as watched:
        assert len(list_steps(tmp_path)) == 2
    assert len(watched.calls) == 2
    manifest = layout.parse_manifest((tmp_path / "step-00000000" / layout.MANIFEST).read_bytes())
    wide = msgspec.structs.replace(manifest, world_size=4096, bytes=2**50, index_bytes=2**20)
    assert len(layout.encode_manifest(wide)) < sizes[0] + 50


def test_verify_holds_one_chunk_and_the_index_of_one_rank(tmp_path, monkeypatch):
    """Memory does not grow with the data, nor with the ranks."""
    path = save_sharded(tmp_path, plain_state(), extra={"table": torch.zeros(12 * 2**20)}).path
    kept = []
    original = reader.RankFilesReader.placed

    def placed(self: reader.RankFilesReader, rank: int) -> PlacedShards:
        kept.append(len(self._placed))
        return original(self, rank)

    monkeypatch.setattr(reader.RankFilesReader, "placed", placed)
    tracemalloc.start()
    try:
        verify(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (path / "rank-00000.safetensors").stat().st_size > 48 * 2**20
    assert peak < layout.CHUNK_BYTES + 2 * 2**20
    assert max(kept) <= 1


@pytest.mark.slow
def test_checkpoint_of_4096_ranks_is_opened_in_little_memory(tmp_path):
    folder = tmp_path / "step-00000001"
    scale.write_wide(folder, 4096, 3000, 7)
    costs = scale.open_wide(folder, 4096, 3000, 7, check_files=True)
    assert costs["reads"] == 3000
    assert costs["bytes"] < 300e6
    assert costs["cpu"] < 30, "the target is 3 s on a machine that does nothing else"
