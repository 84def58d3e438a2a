"""Rendezvous of the ranks: read the launcher's environment, connect to the key-value store, wait for all ranks, open a group.

gloo connects all ranks of a group. For that each rank reads a key of each other rank, so the requests to the store grow with
the square of the number of ranks. If gloo carries the training, the ranks gather these keys in two exchanges of the control
plane instead. Beside an accelerator gloo carries few tensors, so a rank connects to another one when a collective needs it.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from dtrain import launch_protocol
from dtrain.arguments import warn
from dtrain.device import find_accelerator, is_accelerator
from dtrain.dist.context import current_context
from dtrain.dist.incident import ask_store, call_with_timeout, clone_store, run_protocol
from dtrain.dist.incident_protocol import Read, add_mark, format_ranks, mark_of, read_marks
from dtrain.errors import ConfigError, DistError
from dtrain.launch_protocol import GLOO_INTERFACE

if TYPE_CHECKING:
    from dtrain.dist.control_plane import Channel
    from dtrain.dist.init import DistInfo


_LAZY_GLOO = "TORCH_GLOO_LAZY_INIT"
_OPEN, _FAILED, _OVER = b"open", b"failed", b"over"
# Fraction of the timeout that must remain for another attempt.
_MIN_RETRY_FRACTION = 0.1
# A store call that exceeds its own timeout by this margin has lost its server.
_STORE_MARGIN_S = 5.0
# torch tries to connect once more after the timeout, after a pause of up to 2.4 s in our tests.
_TORCH_RETRY_S = 5.0


def read_rank_from_env() -> dict[str, int]:
    """Return rank and sizes from the launcher's environment; without a launcher, a world of one.

    If the user has opened a default group, the rank is that of the group, and an environment that disagrees is refused.
    """
    env = dict(os.environ)
    if dist.is_initialized():
        for name, value in ((launch_protocol.RANK, dist.get_rank()), (launch_protocol.WORLD_SIZE, dist.get_world_size())):
            if env.setdefault(name, str(value)) != str(value):
                raise ConfigError(
                    f"init_dist: {name} must match the open process group ({value}), got {env[name]}. Unset the variable."
                )
    elif launch_protocol.RANK not in env and launch_protocol.WORLD_SIZE not in env:
        return {"rank": 0, "world_size": 1, "local_rank": 0, "local_world_size": 1, "node_rank": 0}
    for name in (launch_protocol.RANK, launch_protocol.WORLD_SIZE):
        if name not in env:
            raise ConfigError(
                f"init_dist: RANK and WORLD_SIZE must be set together, but {name} is not set. "
                "Start the script with `dtrain launch`."
            )
    try:
        rank, world = int(env[launch_protocol.RANK]), int(env[launch_protocol.WORLD_SIZE])
        local_rank = int(env.get(launch_protocol.LOCAL_RANK, rank))
        local_world = int(env.get(launch_protocol.LOCAL_WORLD_SIZE, world))
        node = int(env.get(launch_protocol.NODE_RANK, "0"))
    except ValueError as error:
        raise ConfigError(
            f"init_dist: rank variables must be whole numbers ({error}). Unset the variable or use `dtrain launch`."
        ) from None
    if not 0 <= rank < world:
        raise ConfigError(
            f"init_dist: RANK must be from 0 to WORLD_SIZE - 1, got RANK={rank} WORLD_SIZE={world}. "
            "Start the ranks with dtrain launch or torchrun, which set both."
        )
    return {
        "rank": rank,
        "world_size": world,
        "local_rank": local_rank,
        "local_world_size": local_world,
        "node_rank": node,
    }


def read_stop_signals() -> list[int]:
    """Return the signals that ask a rank to save and stop: SIGTERM, and the signal chosen at launch.

    Raises:
        ConfigError: the variable is not the number of a signal that a process can handle.
    """
    text = os.environ.get(launch_protocol.STOP_SIGNAL)
    if text is None:
        return [signal.SIGTERM]
    number = int(text) if text.isascii() and text.isdecimal() else 0
    if number not in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        raise ConfigError(
            f"init_dist: {launch_protocol.STOP_SIGNAL} must be the number of a signal that a process can handle, got {text!r}. "
            f"Set {launch_protocol.STOP_SIGNAL}={signal.SIGUSR1:d} for SIGUSR1."
        )
    return [signal.SIGTERM, number]


def select_device(device: str | None, rank_info: dict[str, int], *, share: bool = False) -> torch.device:
    """Select the device of this rank: ``device`` if given, else the accelerator if the node has one for each of its ranks.

    Args:
        device: ``"cpu"``, the type of the accelerator, or None.
        rank_info: local rank and number of ranks on this node.
        share: if True, several ranks may use one device of the accelerator that ``device`` names.

    Raises:
        ConfigError: ``device`` is the accelerator, and the node has too few of its devices.
    """
    accelerator = find_accelerator()
    # On CUDA device_count() asks NVML. is_available() would start CUDA, and a process with CUDA must not fork.
    ranks, gpus = rank_info["local_world_size"], 0 if accelerator is None else torch.accelerator.device_count()
    shared = share and device not in ("cpu", None) and 0 < gpus < ranks
    if device not in ("cpu", None) and gpus < ranks and not shared:
        fewer = f"Start at most {gpus} ranks, or pass backend='gloo' so that ranks share a GPU in a test."
        advice = fewer if gpus else "Pass device='cpu' or None."
        raise ConfigError(
            f"init_dist: device={device!r} needs one GPU per rank, got {gpus} GPUs for {ranks} ranks on this node. {advice}"
        )
    if device == "cpu" or accelerator is None or gpus == 0:
        return torch.device("cpu")
    if gpus < ranks and not shared:
        if rank_info["local_rank"] == 0:
            warn(f"init_dist: {ranks} ranks but {gpus} GPUs on this node: running on the CPU with gloo")
        return torch.device("cpu")
    chosen = torch.device(accelerator.type, rank_info["local_rank"] % gpus)
    torch.accelerator.set_device_index(chosen)
    return chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreAddress:
    """Address of the store.

    Args:
        host: host name or address.
        port: TCP port.
        is_server: if True, this process serves the store.
        loopback_only: if True, the server may listen on loopback only.
        served_by_launcher: if True, a process of the launcher serves the store, and no rank does.
    """

    host: str
    port: int
    is_server: bool
    loopback_only: bool
    served_by_launcher: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RendezvousConfig:
    """Rank, world size and store address of one rendezvous. Equal configs share a store.

    ``address`` is the address of the store, a torch rendezvous address (``"file:///path"``), or None in a world of one.
    """

    rank: int
    world_size: int
    address: StoreAddress | str | None

    @property
    def server_name(self) -> str:
        """Name of the process that serves the store, for messages."""
        return "rank 0" if self.server_rank == 0 else "the launcher"

    @property
    def server_rank(self) -> int | None:
        """Rank that serves the store, None if a process of the launcher does."""
        return None if isinstance(self.address, StoreAddress) and self.address.served_by_launcher else 0


def read_master_address(rank: int, world: int) -> StoreAddress | None:
    """Return the store address from the launcher's environment, or None for a world of one."""
    env = os.environ
    if world == 1:
        return None
    try:
        host, port = env[launch_protocol.MASTER_ADDR], int(env[launch_protocol.MASTER_PORT])
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"init_dist: {launch_protocol.MASTER_ADDR} and {launch_protocol.MASTER_PORT} must be set for {world} ranks "
            f"({error}). Use `dtrain launch`."
        ) from None
    launcher = env.get(launch_protocol.AGENT_STORE) == "True"
    loopback = env.get(launch_protocol.LOOPBACK) == "1"
    return StoreAddress(
        host=host, port=port, is_server=rank == 0 and not launcher, loopback_only=loopback, served_by_launcher=launcher
    )


def connect_store(rendezvous: RendezvousConfig, *, timeout_s: float) -> dist.Store:
    """Connect to the store of ``rendezvous``. The rank that serves the store starts the server.

    Raises:
        DistError: rank 0 could not be reached, or does not answer; on rank 0, the port cannot be opened.
    """
    limit, address, server = timedelta(seconds=timeout_s), rendezvous.address, rendezvous.server_name
    if address is None:
        return dist.HashStore()
    location = address if isinstance(address, str) else f"{address.host}:{address.port}"
    silent = (
        f"init_dist: {server} at {location} does not answer rank {rendezvous.rank} within {timeout_s:g} s. "
        f"Check that {server} is not stopped."
    )
    try:
        return call_with_timeout(
            lambda: _open_store(address, rendezvous, limit),
            timeout_s=timeout_s + _TORCH_RETRY_S + _STORE_MARGIN_S,
            message=silent,
        )
    except dist.DistError as error:
        reason = str(error).splitlines()[0]
        # The server itself failed, so the port could not be opened.
        if isinstance(address, StoreAddress) and address.is_server:
            raise DistError(
                f"init_dist: rank {rendezvous.rank} cannot open the rendezvous at {location} ({reason}). Give all ranks "
                "another MASTER_PORT, or start them with dtrain launch, which finds a free port."
            ) from None
        raise DistError(
            f"init_dist: rank {rendezvous.rank} could not reach {server} at {location} within {timeout_s:g} s ({reason}). "
            f"Check that {server} is running and that the port is reachable from this host."
        ) from None


def _open_store(address: StoreAddress | str, rendezvous: RendezvousConfig, limit: timedelta) -> dist.Store:
    if isinstance(address, str):
        store: dist.Store = next(iter(dist.rendezvous(address, rendezvous.rank, rendezvous.world_size, timeout=limit)))[0]
        return store
    listener = None
    if address.is_server and address.loopback_only:
        # torch's own store listens on every interface, without authentication.
        loopback = socket.socket()
        # The launcher reserves the port with an idle socket.
        loopback.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        loopback.bind((address.host, address.port))
        loopback.listen(1024)
        listener = loopback.detach()
    return dist.TCPStore(
        address.host, address.port, None, address.is_server, limit, wait_for_workers=False, master_listen_fd=listener
    )


def join_rendezvous(
    store: dist.Store, rendezvous: RendezvousConfig, *, prefix: str, timeout_s: float
) -> tuple[dist.Store, str]:
    """Wait until every rank has arrived; return the part of the store for this rendezvous, and the prefix of its keys.

    Each attempt has one outcome for all ranks, written once. The last rank to arrive writes *open*. The first rank that times
    out writes *failed*. Ranks that arrive after the outcome, or that read *failed*, start the next attempt. So a rank that
    retries joins the other ranks, and no rank opens groups with a rank that has left.

    Args:
        store: store from ``connect_store``.
        rendezvous: this rank and its store address.
        prefix: prefix of the keys of all attempts, equal on all ranks.
        timeout_s: time to wait, in seconds.

    Raises:
        ConfigError: two processes have the same rank.
        DistError: ranks that did not arrive in time, by number; or the process that serves the store was stopped or has ended.
    """
    start = time.monotonic()
    server = f"init_dist: {rendezvous.server_name}, which serves the store of {rendezvous.world_size} ranks,"
    for attempt in itertools.count():
        attempt_prefix = f"{prefix}/{attempt}"
        remaining_s = max(0.001, start + timeout_s - time.monotonic())
        attempt_store = dist.PrefixStore(attempt_prefix, store)
        trial = partial(_try_rendezvous, attempt_store, rendezvous, remaining_s=remaining_s, timeout_s=timeout_s)
        try:
            outcome = call_with_timeout(
                trial, timeout_s=remaining_s + _STORE_MARGIN_S, message=f"{server} stopped answering. Look at its output."
            )
        except dist.DistError:
            raise DistError(f"{server} has ended. Look at its output.") from None
        except KeyboardInterrupt:
            _withdraw(store, attempt_prefix)
            raise
        if outcome == _OPEN:
            return dist.PrefixStore(attempt_prefix, store), attempt_prefix
    raise AssertionError("the count of attempts has no end")


def _try_rendezvous(store: dist.Store, rendezvous: RendezvousConfig, *, remaining_s: float, timeout_s: float) -> bytes:
    """Make one attempt, and return its outcome."""
    rank, world = rendezvous.rank, rendezvous.world_size
    if store.check(["outcome"]):
        return _OVER
    if mark_of(int(ask_store(store, add_mark("here", rank)) or 0), rank) > 1:
        raise ConfigError(
            f"init_dist: each process must have its own RANK, but two processes have RANK={rank} of {world}. "
            "Start the ranks with dtrain launch or torchrun, which number them."
        )
    if store.add("arrived", 1) == world and store.compare_set("outcome", "", _OPEN.decode()) == _OPEN:
        return _OPEN
    start, timed_out = time.monotonic(), False
    try:
        store.wait(["outcome"], timedelta(seconds=remaining_s))
    except dist.DistStoreError:
        timed_out = store.compare_set("outcome", "", _FAILED.decode()) == _FAILED
    outcome = bytes(store.get("outcome"))
    remaining_s -= time.monotonic() - start
    # Ranks that started together time out together. The second rank to time out has no time for another attempt.
    if outcome == _FAILED and (timed_out or remaining_s < _MIN_RETRY_FRACTION * timeout_s):
        missing = _read_missing_ranks(store, world)
        raise DistError(
            f"init_dist: {len(missing)} of {world} ranks did not arrive within {timeout_s:g} s: "
            f"missing {format_ranks(missing)}. Look at their output, or raise init_timeout_s."
        )
    return outcome


def _read_missing_ranks(store: dist.Store, world: int) -> list[int]:
    """Return the ranks that have not arrived. One rank reads the marks, and the other ranks its result."""
    if store.add("readers", 1) > 1 and (text := ask_store(store, Read("missing", _STORE_MARGIN_S / 2))) is not None:
        return [int(rank) for rank in json.loads(str(text))]
    marks = run_protocol(read_marks("here", world), partial(ask_store, store))
    missing = [rank for rank, mark in enumerate(marks) if not mark]
    store.set("missing", json.dumps(missing))
    return missing


def _withdraw(store: dist.Store, prefix: str) -> None:
    """Fail an attempt that this rank leaves, because the thread of the attempt would still count as this rank."""

    def withdraw() -> None:
        # The waiting thread occupies the connection of ``store``.
        dist.PrefixStore(prefix, clone_store(store)).compare_set("outcome", "", _FAILED.decode())

    message = "init_dist: interrupted, and rank 0 does not answer. Check that rank 0 is not stopped."
    call_with_timeout(withdraw, timeout_s=_STORE_MARGIN_S, message=message)


def open_default_group(info: DistInfo, store: dist.Store) -> None:
    """Open the default group of torch over ``store``.

    Mutates: the current context.
    Collective: every rank must call it; two exchanges on the background channel, if gloo carries the group.
    """
    context = current_context()
    if info.world_size == 1 and GLOO_INTERFACE not in os.environ:
        # A single process has no peers. Listen on loopback only, so that an unresolvable host name does no harm.
        os.environ[GLOO_INTERFACE] = "lo0" if sys.platform == "darwin" else "lo"
        context.set_gloo_interface = True
    gathered: _GatheredStore | None = None
    # A backend of an accelerator uses threads of its own that read the store, so its group keeps ``store``.
    if info.backend == "gloo" and info.world_size > 1 and context.control_plane is not None:
        # torch holds the C++ half of the object only.
        context.group_store = store = gathered = _GatheredStore(store, context.control_plane["background"])
    if info.backend == "gloo" and is_accelerator(info.device):
        gather_over_gloo(info.device.type)
    with connect_on_demand(info):
        dist.init_process_group(
            backend=info.backend,
            store=store,
            rank=info.rank,
            world_size=info.world_size,
            timeout=timedelta(seconds=info.timeout_s),
            device_id=info.device if is_accelerator(info.device) and info.backend != "gloo" else None,
        )
    if gathered is not None:
        gathered.finish()


@cache
def gather_over_gloo(device_type: str) -> torch.library.Library:
    """Make the functional all-gather of tensors on ``device_type`` safe over gloo, as in ``DTensor.full_tensor``.

    torch issues it as a coalesced all-gather. gloo's reads memory of an accelerator as memory of the host, and the process dies
    by SIGSEGV (pytorch/pytorch issue 152645). gloo's plain all-gather copies through the host.

    Returns:
        Owner of the registration, which lasts as long as the process. Other backends than gloo run as before.

    Mutates: torch's dispatcher.
    """

    def gather(x: Tensor, group_size: int, group_name: str) -> Tensor:
        resolve: Callable[[str], dist.ProcessGroup] = dist.distributed_c10d._resolve_process_group  # type: ignore[assignment]
        group = resolve(group_name)
        if group._get_backend(x.device).name() != "gloo":
            gathered: Tensor = torch.ops._c10d_functional.all_gather_into_tensor_coalesced([x], group_size, group_name)[0]
            return gathered
        out = x.new_empty((x.shape[0] * group_size, *x.shape[1:]))
        dist.all_gather_into_tensor(out, x.contiguous(), group=group)
        return out

    library = torch.library.Library("_c10d_functional", "IMPL")
    library.impl("all_gather_into_tensor", gather, torch._C._dispatch_key_for_device(device_type))
    return library


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
        messages = [
            json.loads(text) for text in self._channel.all_gather(json.dumps([done, mine]).encode(), caller="init_dist")
        ]
        for _, keys in messages:
            self._keys.update((key, base64.b64decode(value)) for key, value in keys.items())
        others_done = all(rank_done for rank, (rank_done, _) in enumerate(messages) if rank != self._channel.layout.rank)
        if others_done and not done and not any(keys for _, keys in messages):
            raise dist.DistStoreError("init_dist: no rank has set a key that this rank needs.")
        return all(rank_done for rank_done, _ in messages)

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
