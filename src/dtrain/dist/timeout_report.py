"""Name the ranks that failed in one error line when a collective times out or loses a peer.

torch reports that a collective failed, but not who failed. So a rank whose collective failed gives a sign in the rendezvous
store, closes its connections, waits a few seconds for the signs of the other ranks (``incident``), and names those that failed.
As long as collectives succeed nothing is sent, and a call only notes where the rank is.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import TracebackType

import torch.distributed as dist

from dtrain.dist.arrival_marks import ArrivalReport, format_ranks
from dtrain.dist.context import current_context
from dtrain.dist.incident import COLLECTIVE_MODULES, TRANSPARENT_MODULES
from dtrain.errors import DistError

GRACE_S = 5.0
"""Time that a rank whose collective failed waits for the sign of another rank, in seconds."""

# A failed rank gives up writing its error note after this time.
_NOTE_TIMEOUT_S = 1.0
# Fraction of the timeout. A shorter wait means that the failure of another rank ended the collective.
_TIMEOUT_FRACTION = 0.9
# Different errors and nodes in a message. All ranks are named.
_MAX_NOTES, _MAX_NODES = 8, 8


class report_missing_ranks:
    """Context manager around collectives that names the missing ranks if a collective fails.

    Every rank must enter the same contexts in the same order. The context may contain a whole training step, because FSDP2's
    own collectives can time out. Other exceptions propagate unchanged. A collective error is recognized by its class and by the
    torch module that raised the error, never by its text.

    Args:
        caller: prefix of error messages.
        group: name of the process group in the context.

    Collective: none on success. After a failure the context waits up to ``GRACE_S`` seconds for the sign of each other rank.

    Raises:
        DistError: a collective timed out or lost a peer. The message names the ranks that failed; the cause is torch's error.
    """

    # A class with a verb as name, because every exchange of ranks enters this context. A generator takes three times as long.
    __slots__ = ("_group", "_incidents", "_outer", "caller", "start")

    def __init__(self, caller: str, *, group: str = "training") -> None:
        self.caller, self._group, self._incidents = caller, group, current_context().incidents

    def __enter__(self) -> None:
        if self._incidents is not None:
            waits = self._incidents.waits
            self._outer = waits.get(self._group)
            self.start = time.monotonic()
            waits[self._group] = self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        incidents = self._incidents
        if incidents is None:
            return
        try:
            if error is None:
                return
            if not is_collective_error(error):
                incidents.note_channel_failure(self._group, error)
                return
            waited_s = time.monotonic() - self.start
            report, is_disconnected = incidents.report_failure(self._group, waited_s, error)
        finally:
            incidents.waits[self._group] = self._outer
        if report is not None and incidents.rank in report.broken and not report.timed_out:
            # The collective failed on this rank, not by another rank.
            return
        text = format_missing_ranks(
            self.caller,
            world_size=incidents.world_size,
            timeout_s=incidents.timeout_s,
            waited_s=waited_s,
            arrivals=report,
            server_rank=incidents.server_rank,
            nodes=incidents.node_ranks(),
        )
        if text is None and is_disconnected and isinstance(error, dist.DistNetworkError):
            text = f"{self.caller}: the ranks are not connected any more, and no rank has said why. Look at their output."
        if text is not None:
            raise DistError(text) from error


def is_collective_error(error: BaseException) -> bool:
    """Return True if torch's communication raised ``error``: a class of torch.distributed, or a RuntimeError of its modules.

    gloo has no class for a lost connection, so the module of the innermost frame decides. Frames of torch's operator call
    (``torch._ops``) and of our interceptor are skipped. Other modules of DTensor and FSDP2 raise for local reasons.
    """
    if isinstance(error, dist.DistError):
        return True
    return type(error) is RuntimeError and _raising_module(error.__traceback__) in COLLECTIVE_MODULES


def _raising_module(trace: TracebackType | None) -> str:
    module = ""
    while trace is not None:
        name = trace.tb_frame.f_globals.get("__name__", "")
        module = module if name in TRANSPARENT_MODULES else name
        trace = trace.tb_next
    return module


def leave_error_note(error: BaseException) -> None:
    """Tell the other ranks that this rank leaves with ``error``. Never raises, and gives up after a short timeout."""
    incidents = current_context().incidents
    if incidents is not None:
        # Without the note the other ranks still name this rank.
        incidents.leave(error, _NOTE_TIMEOUT_S)


def format_missing_ranks(
    caller: str,
    *,
    world_size: int,
    timeout_s: float,
    waited_s: float,
    arrivals: ArrivalReport | None,
    server_rank: int | None = 0,
    nodes: Mapping[int, range] | None = None,
) -> str | None:
    """Format the message, or return None if no rank is the cause, because then the call is wrong. Pure.

    Args:
        caller: prefix of the message.
        world_size: number of ranks.
        timeout_s: time that a collective waits, in seconds.
        waited_s: time until this rank's collective failed, in seconds.
        arrivals: ranks that caused the failure, None if the store did not answer.
        server_rank: rank that serves the store, None if another process serves the store.
        nodes: ranks of each node, if there are several nodes.
    """
    # Another rank may have timed out first, which ended the collective of this rank.
    timed_out = waited_s >= _TIMEOUT_FRACTION * timeout_s or (arrivals is not None and arrivals.timed_out)
    longest = max(waited_s, timeout_s) if timed_out and waited_s < _TIMEOUT_FRACTION * timeout_s else waited_s
    outcome = (
        f"did not arrive within {longest:.3g} s" if timed_out else f"did not arrive, connection lost after {longest:.3g} s"
    )
    advice = "Look at their output" + (", or raise timeout_s of init_dist if they are only slow." if timed_out else ".")
    if arrivals is None and server_rank is None:
        return f"{caller}: some ranks {outcome}. The rendezvous store, which knows these ranks, does not answer. {advice}"
    if arrivals is None:
        unknown = "this rank serves the store, so other ranks may be missing, too"
        return f"{caller}: ranks [{server_rank}] of {world_size} {outcome} ({unknown}). {advice}"
    if arrivals.missing:
        return f"{caller}: {_name_missing(arrivals, world_size, nodes or {})} {outcome}.{_list_errors(arrivals)} {advice}"
    if arrivals.pairs:
        pairs = ", ".join(f"{first} and {second}" for first, second in arrivals.pairs)
        which = "the connection between ranks" if len(arrivals.pairs) == 1 else "connections between living ranks"
        return (
            f"{caller}: {which} {pairs} of {world_size} was lost after {longest:.3g} s, and all ranks live. "
            "Check the network between them."
        )
    if timed_out and arrivals.late:
        late = format_ranks(arrivals.late)
        return f"{caller}: ranks {late} of {world_size} came too late. The first rank gave up after {longest:.3g} s. {advice}"
    elsewhere = {rank: place for rank, place in sorted(arrivals.callers.items()) if place != caller}
    if timed_out and elsewhere:
        rank, place = next(iter(elsewhere.items()))
        return (
            f"{caller}: rank {rank} was at {place!r} instead, and the ranks waited for each other for {longest:.3g} s. Let all "
            "ranks take the same steps, as loader.until does, and run collectives in one order."
        )
    if timed_out:
        return (
            f"{caller}: all {world_size} ranks arrived, but no data passed between them for {longest:.3g} s. Check the network."
        )
    if not arrivals.broken:
        return None
    first, error = min(arrivals.broken.items())
    failed = f"a collective failed on ranks {format_ranks(arrivals.broken)} of {world_size}, and all ranks live"
    return f"{caller}: {failed}. Rank {first}: {error.rstrip('.')}."


def _name_missing(arrivals: ArrivalReport, world_size: int, nodes: Mapping[int, range]) -> str:
    """Name the missing ranks. A node none of whose ranks gave a sign is gone."""
    silent = set(arrivals.silent)
    gone = {node: ranks for node, ranks in nodes.items() if silent.issuperset(ranks)}
    rest = [rank for rank in arrivals.missing if not any(rank in ranks for ranks in gone.values())]
    names = [f"node {node} is gone (ranks {format_ranks(ranks)[1:-1]})" for node, ranks in list(gone.items())[:_MAX_NODES]]
    if len(gone) > _MAX_NODES:
        names.append(f"{len(gone) - _MAX_NODES} more nodes are gone")
    if not gone:
        return f"ranks {format_ranks(rest)} of {world_size}"
    others = f", and ranks {format_ranks(rest)}" if rest else ": its ranks" if len(gone) == 1 else ": their ranks"
    return f"{', '.join(names)}{others} of {world_size}"


def _list_errors(arrivals: ArrivalReport) -> str:
    """Return the different errors of the ranks that failed by themselves."""
    notes = [(rank, note.rstrip(".")) for rank, note in sorted(arrivals.notes.items())]
    text = "".join(f" Rank {rank} left with {note}." for rank, note in notes[:_MAX_NOTES])
    return f"{text} {len(notes) - _MAX_NOTES} more ranks left with other errors." if len(notes) > _MAX_NOTES else text
