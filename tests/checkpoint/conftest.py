"""Checkpoints of every layout, saved once for all tests that read them."""

from pathlib import Path

import pytest

from checkpoint.filled import LAYOUTS, save_filled


@pytest.fixture(scope="session")
def saved(tmp_path_factory, ranks) -> dict[tuple[int, str], tuple[Path, list[str]]]:
    """Return a checkpoint for each world size and strategy, and the next draws of each rank's generators."""
    root = tmp_path_factory.mktemp("saved")
    roots = {}
    for world, strategies in LAYOUTS.items():
        for strategy in strategies:
            results = ranks(world).run(save_filled, str(root / f"{world}-{strategy}"), strategy)
            assert len({(path, nbytes) for path, nbytes, _ in results}) == 1
            roots[world, strategy] = Path(results[0][0]), [drawn for _, _, drawn in results]
    return roots
