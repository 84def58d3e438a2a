"""``local_rank_zero_first``: one rank of each node prepares what the others then find."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from dtrain.dist.collectives import all_gather_json, one_line
from dtrain.dist.init import current
from dtrain.errors import DistError, PeerError


@contextmanager
def local_rank_zero_first(where: str = "local_rank_zero_first") -> Iterator[bool]:
    """A block that local rank 0 of each node runs first, and the other ranks when all of those are done.

    For what is done once per node and then found by everybody: a download, a cache that is built. The block must hold no
    collective, since its ranks are not in it at the same time. It must end within ``timeout_s`` of ``init_dist``.

        with dt.local_rank_zero_first("tokenise") as first:
            tokens = tokenise_or_read_cache(path)  # first: this rank is one of those that go ahead

    Collective: one exchange of JSON on the control group, at the end of the block for the ranks that go first, and at its
        beginning for the others.

    Raises:
        PeerError: the block raised on a rank that went first (anything, Ctrl-C and ``sys.exit`` too); that rank is named, and
            raises its own error. The others do not enter the block.
    """
    first = current().local_rank == 0
    if not first:
        _agree(where, None)
    try:
        yield first
    except BaseException as error:
        if first:
            _report(where, error)
        raise
    if first:
        _agree(where, None)


def _agree(where: str, report: str | None) -> None:
    reports = all_gather_json(report, where=where)
    for rank, failure in enumerate(reports):
        if failure is not None:
            raise PeerError(f"{where}: rank {rank}, which goes first on its node, failed: {failure}")


def _report(where: str, error: BaseException) -> None:
    """Release the ranks that wait with the reason; ``error`` is raised afterwards, whatever comes of this."""
    try:
        all_gather_json(one_line(error), where=where)
    except DistError as trouble:
        error.add_note(f"{where}: the other ranks could not be told: {trouble}")
