"""docs/distributed.md: its table of a rank's messages in a step equals the messages of two ranks."""

from __future__ import annotations

import re
from functools import partial

import torch

import dtrain as dt
from dtrain.testing import count_collectives
from pages.fences import DOCS
from stand_ins import GPT, VOCAB, Block, documents, loss_fn

STRATEGIES = ("replicate", "shard_grad_op", "full_shard")


def sent() -> dict[str, list[str]]:
    """Return the collectives of a rank in the third step, for each strategy: step, logging, and questions to the clock."""
    by_strategy = {}
    for strategy in STRATEGIES:
        mesh = dt.build_mesh()
        model = dt.shard_model(GPT({"vocab": VOCAB}), mesh, strategy=strategy, blocks=(Block,))
        loader = dt.build_loader(documents(48), mesh=mesh, global_batch_size=16, seed=0)
        step = dt.compose_step(loss_fn, [dt.transforms.clip_by_norm(1.0)], grad=partial(dt.microbatch_step, microbatch_size=4))
        state = step.init(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
        for batch in loader.until("1ep"):
            with count_collectives() as seen:
                state, metrics = step(state, batch)
                dt.reduce_metrics(metrics)
                _ = dt.should_stop(state), state.crossed("1ep"), state.reached("1ep")
        by_strategy[strategy] = [f"{record.op} on {record.group}" for record in seen.records]
    return by_strategy


def test_communication_table_matches_measured_traffic(ranks) -> None:
    for by_strategy in ranks(2).run(sent):
        for column, strategy in enumerate(STRATEGIES, start=1):
            table = re.findall(r"^\| (?!phase|---)(.*) \|$", (DOCS / "distributed.md").read_text().split("| phase |")[1], re.M)
            cells = [row.split("|")[column].strip() for row in table[:9]]
            said = [re.fullmatch(r"(\d) `(\w+)`( on control)?", cell).groups() for cell in cells if cell]
            expected = [
                f"{op} on {'control' if control else 'training'}" for count, op, control in said for _ in range(int(count))
            ]
            assert by_strategy[strategy] == expected, strategy
