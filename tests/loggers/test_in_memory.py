"""Metrics in memory."""

import math

import pytest
import torch

from dtrain.dist.init import get_dist_info
from dtrain.errors import ConfigError
from dtrain.loggers.records import in_memory


def test_records_and_columns_hold_plain_values():
    kept = in_memory()
    kept(2, {"loss": torch.tensor(1.0), "step": 7})
    kept(1, {"loss": math.inf})
    kept(2, {"loss": 0.5, "map": torch.ones(2)})
    assert [(record["step"], record["metrics"]) for record in kept.records] == [
        (2, {"loss": 1.0, "step": 7}),
        (1, {"loss": math.inf}),
        (2, {"loss": 0.5, "map": {"unloggable": "Tensor [2]"}}),
    ]
    assert kept.column("loss") == {1: math.inf, 2: 0.5}
    assert list(kept.column("loss")) == [1, 2]
    assert kept.column("other") == {}
    assert kept.names == ["loss", "step", "map"]


def keep(ranks) -> list:
    kept = in_memory(ranks=ranks)
    kept(get_dist_info().rank, {})
    return [record["step"] for record in kept.records]


def test_only_rank_0_keeps_records_by_default(ranks):
    assert ranks(2).run(keep, 0) == [[0], []]
    assert ranks(2).run(keep, "all") == [[0], [1]]


def test_invalid_ranks_are_refused():
    with pytest.raises(ConfigError, match="in_memory: ranks must be 0 or 'all', got 'none'"):
        in_memory(ranks="none")
