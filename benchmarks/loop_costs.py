"""Count the messages of a rank over the control plane in each part of a training loop, on 2 to 16 real ranks.

    python benchmarks/loop_costs.py                    # 2, 4, 8 and 16 ranks
    python benchmarks/loop_costs.py --ranks 2 4

Prints the Markdown table of ``docs/scale.md``. All figures are counts, so a busy machine does not change them. The collectives
of the model's tensors are not counted: sharding decides them, see ``dtrain plan``.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

import dtrain as dt
from dtrain.dist.control_plane import Channel
from dtrain.testing import run_ranks

TIMEOUT_S = 600.0
LARGE = (512, 4096)
NODE_SIZE = 8
# At most, between nodes; see tests/dist/test_control_costs.py.
RECORD_BYTES = 600
WIDTH, SAMPLES = 16, 4


@dataclass(slots=True)
class Sent:
    """Messages and bytes that one rank has sent over all channels."""

    exchanges: int = 0
    messages: int = 0
    bytes: int = 0
    # Of these, exchanges and bytes of the records of steps, which are reduced between nodes.
    records: int = 0
    record_bytes: int = 0


@contextlib.contextmanager
def count_sent() -> Iterator[Sent]:
    """Count the exchanges of this rank, and the messages and bytes that it sends, in all of its threads."""
    sent = Sent()
    send = Channel._send

    def counted_send(channel: Channel, to: int, message: bytes, timeout_s: float) -> None:
        sent.messages += 1
        sent.bytes += len(message)
        send(channel, to, message, timeout_s)

    def counted(exchange: Callable[..., Any], *, record: bool) -> Callable[..., Any]:
        def counting(channel: Channel, *args: Any, **options: Any) -> Any:
            sent.exchanges += 1
            before = sent.bytes
            result = exchange(channel, *args, **options)
            if record:
                sent.records += 1
                sent.record_bytes += sent.bytes - before
            return result

        return counting

    with contextlib.ExitStack() as patches:
        patches.enter_context(patch.object(Channel, "_send", counted_send))
        for name in ("all_gather", "gather", "reduce_rows"):
            patches.enter_context(patch.object(Channel, name, counted(getattr(Channel, name), record=name == "reduce_rows")))
        yield sent


# One loop, part by part


class Block(nn.Module):
    """A unit of sharding with a buffer that changes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x))


def loss_fn(model: nn.Module, batch: Tensor) -> dt.LossSum:
    return dt.LossSum(total=model(batch).square().sum(), weight=len(batch))


def run_parts(root: str) -> list[list[Any]]:
    """Run a loop on this rank. Return the name of each part, and the numbers of ``Sent``.

    Some parts run twice, because a first step compares more between the ranks than a later step.
    """
    rows: list[list[Any]] = []

    @contextlib.contextmanager
    def part(name: str) -> Iterator[None]:
        with count_sent() as sent:
            yield
        rows.append([name, asdict(sent)])

    batch = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(torch.distributed.get_rank()))
    torch.manual_seed(0)
    with part("`shard_model`"):
        model = dt.shard_model(nn.Sequential(Block(), Block()), dt.build_mesh(), blocks=(Block,))
    step = dt.compose_step(loss_fn)
    with part("`Step.init`"):
        state = step.init(model, torch.optim.AdamW(model.parameters()))
    for name in ("first step", "second step", "a later step"):
        with part(name):
            state, metrics = step(state, batch)
    with part("`reduce_metrics`"):
        dt.reduce_metrics(metrics)
    with part("`evaluate`, 2 batches"):
        dt.evaluate(model, [batch, batch], loss_fn)
    with part("`evaluate`, 2 batches, in parts"):
        dt.evaluate(model, [batch, batch], loss_fn, microbatch_size="auto")
    with part("`check_desync`"):
        dt.monitors.check_desync(state)
    with part("`open_run`"):
        dt.open_run(Path(root) / "run")
    for name in ("`save_sharded`, first", "`save_sharded`, later"):
        with part(name):
            dt.save_sharded(Path(root) / "checkpoints", state)
        state, _ = step(state, batch)
    with part("`load_sharded`"):
        dt.load_sharded(Path(root) / "checkpoints", state)
    guarded = dt.compose_step(loss_fn, [dt.auto_microbatch(initial_size=2, grow_every=None)])
    state = guarded.init(model, torch.optim.AdamW(model.parameters()))
    for name in ("`auto_microbatch`, first step", "`auto_microbatch`, a later step"):
        with part(name):
            state, _ = guarded(state, batch)
    return rows


# Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Costs of one part of the loop on some numbers of ranks.

    Args:
        name: name of the part.
        by_world: messages of the rank that sends the most, by number of ranks.
    """

    name: str
    by_world: dict[int, Sent]

    @property
    def bytes_per_rank(self) -> int:
        """The law of the bytes on one node: a rank sends at most this many for each rank of the job."""
        return self._round_up(sent.bytes / world for world, sent in self.by_world.items())

    def bytes_at(self, world: int) -> int:
        """Bytes that the leader of a node sends to other nodes: all that is gathered, and one record a round."""
        gathered = self._round_up((sent.bytes - sent.record_bytes) / size for size, sent in self.by_world.items())
        records = max(sent.records for sent in self.by_world.values())
        return gathered * world + records * RECORD_BYTES * math.ceil(math.log2(world / NODE_SIZE))

    def _round_up(self, values: Iterable[float]) -> int:
        """Round the largest value up to two digits. Texts, such as a path or a host name, may be a fifth longer."""
        most = math.ceil(max(values) * 1.2)
        unit = 10 ** max(len(str(most)) - 2, 0)
        return math.ceil(most / unit) * unit


def measure_costs(worlds: Sequence[int]) -> list[Cost]:
    """Run the loop on each number of ranks, and return the costs of its parts in the order of the loop."""
    costs: dict[str, Cost] = {}
    for world in worlds:
        with tempfile.TemporaryDirectory() as root:
            results = run_ranks(run_parts, world, root, timeout_s=TIMEOUT_S)
        for rows in zip(*results, strict=True):
            sent = [Sent(**numbers) for _, numbers in rows]
            cost = costs.setdefault(rows[0][0], Cost(name=rows[0][0], by_world={}))
            cost.by_world[world] = max(sent, key=lambda sending: sending.bytes)
    return list(costs.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16])
    worlds = parser.parse_args().ranks
    head = (
        "part of the loop",
        "exchanges",
        "bytes that a rank sends, at most",
        f"measured at {', '.join(map(str, worlds))} ranks",
    )
    print("\n".join(format_table(measure_costs(worlds), head)))


def format_table(costs: Sequence[Cost], head: Sequence[str]) -> list[str]:
    """Return the lines of the table in Markdown."""
    lines = [f"| {' | '.join([*head, *(f'at {world:,}' for world in LARGE)])} |", "|" + "---|" * (len(head) + len(LARGE))]
    for cost in costs:
        sent = cost.by_world.values()
        exchanges = " or ".join(map(str, dict.fromkeys(sending.exchanges for sending in sent)))
        law = f"{cost.bytes_per_rank} N" if cost.bytes_per_rank else "0"
        measured = ", ".join(f"{sending.bytes:,}" for sending in sent)
        large = [f"{cost.bytes_at(world) / 1000:,.1f} KB" for world in LARGE]
        lines.append(f"| {' | '.join([cost.name, exchanges, law, measured, *large])} |")
    return lines


if __name__ == "__main__":
    main()
