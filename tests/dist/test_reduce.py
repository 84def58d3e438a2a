"""reduce_sum, reduce_mean and reduce_max of numbers and tensors."""

from __future__ import annotations

import math

import pytest
import torch
from torch.distributed.tensor import distribute_tensor

from dtrain.dist.collectives import reduce_max, reduce_mean, reduce_sum
from dtrain.dist.init import get_dist_info
from dtrain.dist.mesh import build_mesh
from dtrain.errors import ConfigError


def tensors() -> list:
    rank = get_dist_info().rank
    x = torch.tensor([[1.0 + rank, -rank], [0.5, 2.0 * rank]])
    results = [reduce(x).tolist() for reduce in (reduce_sum, reduce_mean, reduce_max)]
    strided = torch.arange(6).reshape(2, 3).t() * (rank + 1)  # not contiguous, integers
    results += [reduce_sum(strided).tolist(), reduce_max(strided).tolist()]
    results += [reduce_sum(torch.ones(0)).tolist(), reduce_sum(torch.tensor(2.0, requires_grad=True) * 1).requires_grad]
    results.append(x.tolist() == [[1.0 + rank, -rank], [0.5, 2.0 * rank]])
    return results


def test_tensors_are_reduced_elementwise_without_changing_inputs(ranks):
    total = [[6.0, -3.0], [1.5, 6.0]]
    expected = [total, [[2.0, -1.0], [0.5, 2.0]], [[3.0, 0.0], [0.5, 4.0]]]
    expected += [[[0, 18], [6, 24], [12, 30]], [[0, 9], [3, 12], [6, 15]], [], False, True]
    assert ranks(3).run(tensors) == [expected] * 3


def numbers() -> list:
    rank = get_dist_info().rank
    return [reduce_sum(rank + 1), reduce_mean(rank + 1), reduce_max(-rank), reduce_sum(2.0**51 if rank else 1)]


def test_numbers_are_reduced_as_float64(ranks):
    assert ranks(3).run(numbers) == [[6.0, 2.0, 0.0, 2.0**52 + 1]] * 3


def for_rank_1() -> list:
    x = torch.full((2,), get_dist_info().rank + 1.0)
    results = [reduce(x, dst=1) for reduce in (reduce_sum, reduce_mean, reduce_max)]
    return [None if y is None else y.tolist() for y in results] + [reduce_mean(3.0, dst=1), x.tolist()]


def test_reduce_returns_result_only_on_the_destination_rank(ranks):
    first, second, third = ranks(3).run(for_rank_1)
    assert first == [None] * 4 + [[1.0, 1.0]]
    assert second == [[6.0, 6.0], [2.0, 2.0], [3.0, 3.0], 3.0, [2.0, 2.0]]
    assert third == [None] * 4 + [[3.0, 3.0]]


def largest_with_nan() -> list:
    rank = get_dist_info().rank
    x = torch.tensor([math.nan if rank == 1 else 1.0, -math.inf, math.inf if rank == 1 else 0.0])
    return [str(reduce_max(x).tolist()), str(reduce_max(math.nan if rank == 1 else 0.0))]


def test_reduce_max_propagates_nan_from_any_rank(ranks):
    assert ranks(2).run(largest_with_nan) == [["[nan, -inf, inf]", "nan"]] * 2


@pytest.mark.parametrize("reduce", [reduce_sum, reduce_mean, reduce_max])
def test_one_process_needs_no_groups(reduce):
    x = torch.tensor([1.5, -2.0])
    y = reduce(x)
    assert y.equal(x)
    assert y.data_ptr() != x.data_ptr()
    assert (reduce(3), type(reduce(3)), reduce(3, dst=0)) == (3.0, float, 3.0)


@pytest.mark.parametrize("reduce", [reduce_sum, reduce_mean, reduce_max])
@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.tensor([True]), "x must be a floating or integer tensor, got torch.bool"),
        (torch.tensor([1j]), "x must be a floating or integer tensor, got torch.complex64"),
        (torch.ones(2).to_sparse(), r"x must be a dense tensor, got torch.sparse_coo. Pass x.to_dense\(\)"),
        (True, "x must be a tensor or a number, got bool"),
        (None, "x must be a tensor or a number, got NoneType"),
        ([1.0], "x must be a tensor or a number, got list"),
    ],
)
def test_unsupported_tensors_are_refused(reduce, x, message):
    with pytest.raises(ConfigError, match=f"{reduce.__name__}: {message}"):
        reduce(x)


def test_reduce_mean_of_integers_is_refused():
    with pytest.raises(
        ConfigError, match=r"reduce_mean: the mean of torch.int64 has no dtype. Convert x first, .*x.double\(\)"
    ):
        reduce_mean(torch.ones(2, dtype=torch.int64))


@pytest.mark.parametrize("dst", [-1, 1])
def test_out_of_range_destination_rank_is_refused(dst):
    with pytest.raises(ConfigError, match=f"reduce_sum: dst must be from 0 to 0 .the ranks., got {dst}"):
        reduce_sum(1.0, dst=dst)


def reduce_a_dtensor() -> str:
    from torch.distributed.tensor import Shard

    x = distribute_tensor(torch.ones(4), build_mesh(), [Shard(0), Shard(0)])
    try:
        reduce_sum(x)
    except ConfigError as error:
        return str(error)
    return "no error"


def test_a_dtensor_is_refused(ranks):
    assert (
        ranks(2).run(reduce_a_dtensor)
        == ["reduce_sum: x must be a plain tensor, got a DTensor. Pass x.full_tensor() or x.to_local()."] * 2
    )
