"""Open the default group, and let gloo find its peers with few requests to the rendezvous store.

gloo connects all ranks of a group. For that each rank reads a key of each other rank, so the requests to the store grow with
the square of the number of ranks. If gloo carries the training, the ranks gather these keys in two exchanges of the control
plane instead. Beside an accelerator gloo carries few tensors, so a rank connects to another one when a collective needs it.
"""

from __future__ import annotations

import base64
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from dtrain.device import is_accelerator
from dtrain.dist.context import current_context
from dtrain.launch_protocol import GLOO_INTERFACE

if TYPE_CHECKING:
    from dtrain.dist.control_plane import Channel
    from dtrain.dist.init import DistInfo

_CALLER = "init_dist"
_LAZY_GLOO = "TORCH_GLOO_LAZY_INIT"


@contextmanager
def connect_on_demand(info: DistInfo) -> Iterator[None]:
    """Open groups in the context whose gloo halves connect two ranks when a collective first needs it.

    Groups of gloo alone connect at once, because a rank that waits in their first collective for another rank may not time out
    otherwise (pytorch/gloo issue 520).

    Mutates: an environment variable of torch, in the context.
    """
    if info.backend == "gloo" or _LAZY_GLOO in os.environ:
        yield
        return
    os.environ[_LAZY_GLOO] = "1"
    try:
        yield
    finally:
        del os.environ[_LAZY_GLOO]


@contextmanager
def group_store(info: DistInfo, store: dist.Store) -> Iterator[dist.Store]:
    """Give a store for the group that is opened in the context. It is ``store``, except that gloo's keys are gathered.

    A backend of an accelerator uses threads of its own that read the store, so its group keeps ``store``.

    Collective: two exchanges on the background channel, if gloo carries the group.
    """
    plane = current_context().control_plane
    if info.backend != "gloo" or info.world_size == 1 or plane is None:
        with connect_on_demand(info):
            yield store
        return
    gathered = _GatheredStore(store, plane["background"])
    # torch holds the C++ half of the object only.
    current_context().group_store = gathered
    yield gathered
    gathered.finish()


class _GatheredStore(dist.Store):
    """Store whose keys are gathered from all ranks when a rank reads a key that it does not have.

    All ranks gather together: a rank that lacks a key, or that has opened its group, gathers until all have opened theirs.
    Afterwards the store is ``inner``, with the gathered keys in front.
    """

    def __init__(self, inner: dist.Store, channel: Channel) -> None:
        super().__init__()
        self._inner, self._channel = inner, channel
        self._keys: dict[str, bytes] = {}
        self._unsent: dict[str, bytes] = {}
        self._open = True

    def finish(self) -> None:
        """Gather until all ranks have opened the group."""
        while not self._gather(done=True):
            pass
        self._open = False
        # Reports count the exchanges from the first one after init_dist.
        self._channel.count = 0

    def _gather(self, *, done: bool) -> bool:
        """Exchange the new keys of all ranks. Return True if all ranks are done. Collective: one exchange."""
        mine = {key: base64.b64encode(value).decode() for key, value in self._unsent.items()}
        self._unsent = {}
        found = [json.loads(text) for text in self._channel.all_gather(json.dumps([done, mine]).encode(), caller=_CALLER)]
        for _, keys in found:
            self._keys.update((key, base64.b64decode(value)) for key, value in keys.items())
        others_done = all(rank_done for rank, (rank_done, _) in enumerate(found) if rank != self._channel.layout.rank)
        if others_done and not done and not any(keys for _, keys in found):
            raise dist.DistStoreError(f"{_CALLER}: no rank has set a key that this rank needs.")
        return all(rank_done for rank_done, _ in found)

    def _find(self, key: str) -> None:
        while self._open and key not in self._keys:
            self._gather(done=False)

    def set(self, key: str, value: str | bytes) -> None:
        if not self._open:
            self._inner.set(key, value)  # type: ignore[arg-type]
            return
        self._keys[key] = self._unsent[key] = value.encode() if isinstance(value, str) else bytes(value)

    def get(self, key: str) -> bytes:
        self._find(key)
        return self._keys[key] if key in self._keys else self._inner.get(key)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self._find(key)
        if rest := [key for key in keys if key not in self._keys]:
            self._inner.wait(rest) if timeout is None else self._inner.wait(rest, timeout)

    def check(self, keys: list[str]) -> bool:
        rest = [key for key in keys if key not in self._keys]
        return not rest or self._inner.check(rest)

    def add(self, key: str, value: int) -> int:
        return self._inner.add(key, value)

    def append(self, key: str, value: str) -> None:
        self._inner.append(key, value)  # type: ignore[attr-defined]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        return self._inner.compare_set(key, expected_value, desired_value)

    def delete_key(self, key: str) -> bool:
        return self._inner.delete_key(key)

    def num_keys(self) -> int:
        return self._inner.num_keys() + len(self._keys)

    def set_timeout(self, timeout: timedelta) -> None:
        self._inner.set_timeout(timeout)

    def clone(self) -> dist.Store:
        return self._inner.clone()  # type: ignore[attr-defined,no-any-return]

    def has_extended_api(self) -> bool:
        return False


def open_default_group(info: DistInfo, store: dist.Store) -> None:
    """Open the default group of torch over ``store``. Collective: every rank must call it. Mutates: the current context."""
    if info.world_size == 1 and GLOO_INTERFACE not in os.environ:
        # A single process has no peers. Listen on loopback only, so that an unresolvable host name does no harm.
        os.environ[GLOO_INTERFACE] = "lo0" if sys.platform == "darwin" else "lo"
        current_context().set_gloo_interface = True
    with group_store(info, store) as keys:
        dist.init_process_group(
            backend=info.backend,
            store=keys,
            rank=info.rank,
            world_size=info.world_size,
            timeout=timedelta(seconds=info.timeout_s),
            device_id=info.device if is_accelerator(info.device) and info.backend != "gloo" else None,
        )
