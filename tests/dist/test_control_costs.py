"""Costs of the control plane on real ranks: requests to the store, open files and messages grow no faster than their laws."""

from __future__ import annotations

import math
import os
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from dtrain.dist import init, rendezvous
from dtrain.dist.collectives import all_gather_json, all_gather_numbers, gather_json
from dtrain.dist.context import current_context
from dtrain.dist.control_plane import Channel
from dtrain.dist.init import init_dist
from dtrain.dist.mesh import build_mesh
from dtrain.dist.step_sync import ForwardRecord, sync_after_backward, sync_before_forward
from dtrain.machine import open_files_needed

# Requests of a rank in init_dist: to find the other ranks, to agree on the nodes, and to connect.
MAX_REQUESTS = 20
# Open files of a rank beyond the groups of its tensors.
MAX_FILES = 64
WORLDS = [2, 4, 8, pytest.param(16, marks=pytest.mark.slow)]


class CountingStore(dist.Store):
    """Store that passes requests on, and counts the messages that a ``TCPStore`` sends for them."""

    def __init__(self, inner: dist.Store) -> None:
        super().__init__()
        self.inner, self.count = inner, 0

    def set(self, key: str, value: str) -> None:
        self.count += 1
        self.inner.set(key, value)

    def get(self, key: str) -> bytes:
        self.count += 2  # the client waits for the key, and then reads it
        return self.inner.get(key)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.count += 2
        return self.inner.multi_get(keys)

    def add(self, key: str, value: int) -> int:
        self.count += 1
        return self.inner.add(key, value)

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        self.count += 1
        return self.inner.compare_set(key, expected_value, desired_value)

    def check(self, keys: list[str]) -> bool:
        self.count += 1
        return self.inner.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self.count += 1
        self.inner.wait(keys) if timeout is None else self.inner.wait(keys, timeout)

    def set_timeout(self, timeout: timedelta) -> None:
        self.inner.set_timeout(timeout)

    def has_extended_api(self) -> bool:
        return False


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def exchanges() -> dict[str, object]:
    return {
        "before forward": lambda: sync_before_forward(ForwardRecord(samples=1, tokens=0, microbatches=1)),
        "after backward": lambda: sync_after_backward(
            unit_order=[], params_without_grad=[], changed_buffers=[], weights_mismatch=False
        ),
        "numbers": lambda: all_gather_numbers([1.0]),
        "JSON": lambda: all_gather_json({"a": 1}),
        "background": lambda: all_gather_json({"a": 1}, group="background"),
        "gather": lambda: gather_json(1, dst=1),
    }


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("node_size", [None, 2])
@pytest.mark.parametrize("world", WORLDS)
def test_costs_of_a_rank_follow_their_laws(forked, monkeypatch, world, node_size):
    real_store, real_group, real_send = rendezvous._open_store, init.open_default_group, Channel._send
    files, messages = [], []

    def open_group(info, store):
        files.append(open_files())
        real_group(info, store)
        files.append(open_files())

    def send(self, to, message, timeout_s):
        messages.append(len(message))
        real_send(self, to, message, timeout_s)

    def body(rank: int) -> list:
        if node_size is not None:
            os.environ.update(LOCAL_RANK=str(rank % node_size), LOCAL_WORLD_SIZE=str(node_size))
        before, sent = open_files(), {}
        with init_dist(device="cpu"):
            context = current_context()
            requests = context.earlier.store.count
            for name, exchange in exchanges().items():
                messages.clear()
                exchange()
                sent[name] = [len(messages), sum(messages)]
            tensors = files[1] - files[0]
            peers = len(context.control_plane["control"]._connections)
            # A process starts with about ten files, and a report of a failure connects each rank once more.
            enough = 10 + open_files() - before + world <= open_files_needed(world)
            return [requests, context.earlier.store.count - requests, open_files() - before - tensors, enough, peers, sent]

    monkeypatch.setattr(rendezvous, "_open_store", lambda *args: CountingStore(real_store(*args)))
    monkeypatch.setattr(init, "open_default_group", open_group)
    monkeypatch.setattr(Channel, "_send", send)
    answers = forked.run(body, world, results_of=range(world))
    ranks_of_a_node = node_size or world
    local, remote = (math.ceil(math.log2(n)) for n in (ranks_of_a_node, world // ranks_of_a_node))
    for rank, (requests, later_requests, files_beyond, enough, peers, sent) in answers.items():
        assert requests <= MAX_REQUESTS
        assert later_requests == 0
        assert enough
        # Rank 0 serves the store, with a connection of each rank.
        assert files_beyond <= MAX_FILES + (world if rank == 0 else 0)
        assert peers <= 2 * local + remote
        for name, (number, size) in sent.items():
            # A rank sends to a tree below it, or once in each round; a gather of JSON follows a first exchange.
            assert number <= (local + remote + 1) * (2 if name == "gather" else 1), name
            # The record of a step does not grow between nodes; JSON and numbers do, because every rank gets all of them.
            row = 12 * 8 if name == "before forward" else 64
            limit = (
                world * row * 2
                if name not in ("before forward", "after backward") or remote == 0
                else 600 * (remote + local + 1)
            )
            assert size <= limit + 60 * number, name


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("world", WORLDS)
def test_gloo_beside_an_accelerator_connects_when_it_is_used(forked, monkeypatch, world):
    """``cpu:gloo`` takes the way of ``cpu:gloo,cuda:nccl``, without a GPU."""
    real_store = rendezvous._open_store

    def body(rank: int) -> list:
        with init_dist(device="cpu"):
            store = current_context().earlier.store
            requests, files = store.count, open_files()
            mesh = build_mesh(dp_replicate=2, dp_shard=world // 2)
            files_of_mesh = open_files() - files
            x = torch.tensor([float(rank)])
            sums = []
            for group in (None, *mesh.get_all_groups()):
                dist.all_reduce(y := x.clone(), group=group)
                sums.append(y.item())
            return [requests, files_of_mesh, sums, os.environ.get("TORCH_GLOO_LAZY_INIT")]

    monkeypatch.setattr(rendezvous, "_open_store", lambda *args: CountingStore(real_store(*args)))
    monkeypatch.setattr(init, "_default_backend", lambda device: "cpu:gloo")
    half = world // 2
    for rank, (requests, files_of_mesh, sums, lazy) in forked.run(body, world, results_of=range(world)).items():
        assert requests <= MAX_REQUESTS
        assert files_of_mesh <= 16  # two groups, without connections
        first = rank // half * half
        assert sums == [sum(range(world)), rank % half * 2 + half, sum(range(first, first + half))]
        assert lazy is None
