import itertools

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from dtrain.dist.dtensor import compute_shard_box, full_tensor, global_norm, lerp_, scale_, shard_box
from dtrain.dist.mesh import build_mesh
from dtrain.dist.rendezvous import gather_over_gloo
from dtrain.errors import ConfigError
from dtrain.testing import run_ranks


@pytest.mark.parametrize(("rows", "places"), list(itertools.product([1, 3, 4, 7, 8], [1, 2, 3, 4])))
def test_shard_boxes_match_torch_chunk(rows, places):
    pieces = torch.arange(rows).chunk(places)
    for index in range(places):
        box = compute_shard_box((rows, 2), (places,), (index,), (Shard(0),))
        expected = pieces[index].tolist() if index < len(pieces) else []
        assert list(range(box.offset[0], box.offset[0] + box.size[0])) == expected


def test_mesh_shard_boxes_cover_each_element_once_per_replica():
    seen = torch.zeros(5, 6)
    for coordinate in itertools.product(range(2), range(3), range(2)):
        box = compute_shard_box((5, 6), (2, 3, 2), coordinate, (Replicate(), Shard(1), Shard(0)))
        assert (box.replica, box.num_replicas) == (coordinate[0], 2)
        seen[box.offset[0] : box.offset[0] + box.size[0], box.offset[1] : box.offset[1] + box.size[1]] += 1
    assert seen.eq(2).all()


def test_shard_box_of_a_plain_tensor_is_the_whole_tensor():
    box = shard_box(torch.zeros(2, 3))
    assert (box.shape, box.offset, box.size, box.num_replicas) == ((2, 3), (0, 0), (2, 3), 1)


def pieces_of_pieces(rows: int, data: int, tensor: int) -> list[list[int]]:
    """Return rows by (data rank, tensor rank), cut with ``torch.chunk`` as FSDP2 cuts a rank's tensor-parallel shard."""
    outer = torch.arange(rows).chunk(tensor)
    chunks = [[piece.chunk(data) for piece in outer][t] for t in range(tensor)]
    return [chunks[t][d].tolist() if d < len(chunks[t]) else [] for d in range(data) for t in range(tensor)]


@pytest.mark.parametrize(("rows", "data", "tensor"), [(8, 3, 2), (6, 2, 2), (12, 2, 4), (4, 4, 2)])
def test_strided_shard_boxes_match_fsdp_over_tensor_parallelism(rows, data, tensor):
    strided = _StridedShard(0, split_factor=tensor)
    for place, expected in enumerate(pieces_of_pieces(rows, data, tensor)):
        coordinate = divmod(place, tensor)
        for shape, where, placements in (
            ((data, tensor), coordinate, (strided, Shard(0))),
            ((2, data, tensor), (1, *coordinate), (Replicate(), strided, Shard(0))),
        ):
            box = compute_shard_box((rows, 3), shape, where, placements)
            assert list(range(box.offset[0], box.offset[0] + box.size[0])) == expected
            assert (box.offset[1], box.size[1], box.num_replicas) == (0, 3, len(shape) - 1)


def test_strided_shard_with_a_wrong_split_factor_is_refused():
    with pytest.raises(ConfigError, match="Use Replicate or Shard"):
        compute_shard_box((8, 2), (2, 3), (0, 0), (_StridedShard(0, split_factor=2), Shard(0)))


def test_unknown_placement_is_refused():
    with pytest.raises(ConfigError, match="Use Replicate or Shard"):
        compute_shard_box((4,), (2,), (0,), (Partial(),))


def test_global_norm_of_plain_tensors():
    assert global_norm([torch.tensor([3.0]), torch.tensor([[4.0]])]) == 5.0
    assert global_norm([]) == 0.0
    assert global_norm([torch.zeros(0), torch.ones(1)]) == 1.0


def test_global_norm_of_low_precision_accumulates_in_higher_precision():
    # 4096 ones of bfloat16 have norm 64; a bfloat16 sum of squares sticks at 256.
    assert global_norm([torch.ones(4096, dtype=torch.bfloat16)]) == 64.0


def test_scale_keeps_each_dtype():
    tensors = [torch.ones(2, dtype=torch.float64), torch.ones(2, dtype=torch.bfloat16), torch.ones(2)]
    scale_(tensors, torch.tensor(0.5, dtype=torch.float64))
    assert [t.dtype for t in tensors] == [torch.float64, torch.bfloat16, torch.float32]
    assert all(t.eq(0.5).all() for t in tensors)


def test_lerp_moves_towards_the_source():
    target = torch.tensor([0.0, 10.0])
    lerp_([target], [torch.tensor([10.0, 10.0])], 0.25)
    assert target.tolist() == [2.5, 10.0]
    lerp_([], [], 0.5)


def norms_on_two_meshes() -> list[float]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    world = torch.distributed.get_world_size()
    flat = init_device_mesh("cpu", (world,))
    square = init_device_mesh("cpu", (world // 2, 2))
    full = torch.arange(1.0, 31.0, dtype=torch.float64).reshape(5, 6)
    tensors = [
        distribute_tensor(full, flat, [Shard(0)]),
        distribute_tensor(full, flat, [Replicate()]),
        distribute_tensor(full, square, [Replicate(), Shard(1)]),
        distribute_tensor(full, square, [Shard(0), Shard(1)]),
        full,
    ]
    return [global_norm([t]).item() for t in tensors] + [global_norm(tensors).item()]


def test_global_norm_counts_each_element_once_on_any_mesh(ranks):
    one = torch.arange(1.0, 31.0, dtype=torch.float64).norm().item()
    for row in ranks(4).run(norms_on_two_meshes):
        assert row == pytest.approx([one] * 5 + [one * 5**0.5], rel=1e-14)


def gathered_over_gloo() -> list:
    """Gather shards where gloo's coalesced all-gather fails, as for tensors of a GPU; here the tensors are on the CPU."""

    def crash(*args: object, **options: object) -> None:
        raise RuntimeError("reads memory of a GPU")

    fault = torch.library.Library("c10d", "IMPL")
    fault.impl("allgather_into_tensor_coalesced_", crash, "BackendSelect")
    whole = torch.arange(24.0).view(4, 6)
    shards = [distribute_tensor(whole, build_mesh()["dp_shard"], [Shard(dim)]) for dim in (0, 1)]
    with pytest.raises(RuntimeError, match="reads memory of a GPU"):
        full_tensor(shards[0])
    gather_over_gloo("cpu")
    return [full_tensor(shard).equal(whole) for shard in shards]


def test_shards_are_gathered_over_gloo_without_its_coalesced_gather():
    """gloo would read memory of a GPU as memory of the host, and the rank would die by SIGSEGV."""
    assert run_ranks(gathered_over_gloo, 2) == [[True, True]] * 2
