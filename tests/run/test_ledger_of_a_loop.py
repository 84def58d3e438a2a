"""A loop as users write it: its ledger has the time of each of its parts, and its events."""

import json
from collections import Counter

import pytest
import torch
from torch import nn

from dtrain import spans
from dtrain.checkpoint.load import load_sharded
from dtrain.checkpoint.save import save_sharded
from dtrain.data.loader import build_loader
from dtrain.dist.collectives import all_gather_json
from dtrain.dist.context import current_context
from dtrain.dist.mesh import build_mesh
from dtrain.losses import mean_loss
from dtrain.monitors.reduce_metrics import reduce_metrics
from dtrain.run import run_files
from dtrain.run.run_dir import open_run
from dtrain.shard.activations import compile_blocks
from dtrain.shard.fsdp import shard_model
from dtrain.shard.unshard import full_params
from dtrain.state import init_state
from dtrain.step.auto_microbatch import auto_microbatch
from dtrain.step.compose import compose_step
from dtrain.step.evaluate import evaluate
from dtrain.step.microbatch_step import microbatch_step
from dtrain.step.optimizer import optimizer_step
from dtrain.transforms.gradients.clipping import clip_by_norm

DATA = torch.arange(32.0).reshape(16, 2)
LOSS = mean_loss(lambda model, x: model(x).mean(), weight=len)


@pytest.fixture(autouse=True)
def recorder(monkeypatch):
    monkeypatch.setattr(spans, "_RECORDER", spans._SpanRecorder())


def made():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 1))


def loop(folder, steps=4):
    """Run each part once; return the ledger's content: how often each span was entered, and the events."""
    spans._RECORDER = spans._SpanRecorder()
    run = open_run(f"{folder}/run", every=1)
    mesh = build_mesh()
    model = shard_model(made(), mesh, blocks=(nn.Linear,))
    loader = build_loader(DATA, mesh=mesh, global_batch_size=4, seed=0, collate=torch.stack)
    step = compose_step(LOSS, [clip_by_norm(1.0)])
    state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1), loader=loader)
    state = load_sharded(f"{folder}/ckpt", state, missing_ok=True)
    for batch in loader.until(f"{state.step + steps}ba"):
        state, metrics = step(state, batch)
    reduce_metrics(metrics)
    evaluate(model, loader, LOSS)
    dict(full_params(state))
    save_sharded(f"{folder}/ckpt", state, mode="async")
    all_gather_json(1)
    current_context().shutdown_hooks.run(None)
    left = len(spans._RECORDER.stack)
    lines = [json.loads(line) for line in (run / run_files.LEDGER / run_files.ledger_name(run.rank)).read_text().splitlines()]
    lines = [line for line in lines if line["attempt"] == run.attempt]
    counts = Counter()
    for line in lines:
        counts.update({name: count for name, (count, _) in line.get("spans", {}).items()})
    events = [(line["name"], line.get("step")) for line in lines if line["kind"] == "event"]
    return left, dict(counts), events, [line["step"] for line in lines if line["kind"] == "sum"]


def test_single_process_loop_counts_spans_by_part(ranks, tmp_path):
    ((left, counts, events, sums),) = ranks(1).run(loop, str(tmp_path))
    assert left == 0
    assert counts == {
        "other": 0, "setup": 0, "shard": 1, "load": 1, "data": 5, "step": 4, "evaluate": 1, "collective": 4, "save": 2,
    }  # fmt: skip
    assert {tuple(event) for event in events} == {("model", None), ("evaluated", 4), ("save", 4), ("committed", 4)}
    assert sums[:4] == [1, 2, 3, 4]


def test_two_rank_loop_counts_waiting_between_ranks(ranks, tmp_path):
    for rank, (left, counts, events, _) in enumerate(ranks(2).run(loop, str(tmp_path))):
        assert left == 0
        assert counts["step"] == 4
        assert counts["agree"] == 8  # before each step, and after its backward
        assert counts["collective"] >= 1
        assert [name for name, _ in events if name == "committed"] == ["committed"] * (rank == 0)
    resumed = ranks(2).run(loop, str(tmp_path))
    assert [events[:2] for _, _, events, _ in resumed] == [[["model", None], ["resumed", 4]]] * 2
    assert [sums[:4] for _, _, _, sums in resumed] == [[4, 5, 6, 7]] * 2  # the first sum has the load


def test_handwritten_step_counts_once():
    model = made()
    state = init_state(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(3):
        state, metrics = microbatch_step(state, DATA, loss_fn=LOSS)
        state, metrics = optimizer_step(state, metrics)
    assert spans.totals()["step"].count == 3
    assert spans.totals()["step"].seconds > 0
    assert spans.position() == (3, 48, 0)


def test_failed_step_leaves_no_span_open():
    def broken(model, x):
        raise KeyError("x")

    model = made()
    step = compose_step(broken)
    state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(KeyError):
        step(state, DATA)
    assert spans._RECORDER.stack == []
    assert spans.totals()["step"].count == 0


def test_loop_left_early_leaves_no_span_open():
    loader = build_loader(DATA, global_batch_size=4, seed=0, collate=torch.stack)
    for _ in loader.until("2ep"):
        break
    for _ in loader.one_epoch():
        break
    assert spans._RECORDER.stack == []
    assert spans.totals()["data"].count >= 1


@pytest.mark.costly
def test_out_of_memory_retries_count_as_search_time():
    def loss(model, x):
        if len(x) > 4:
            raise torch.OutOfMemoryError("made up")
        return LOSS(model, x)

    model = made()
    step = compose_step(loss, [auto_microbatch()])
    state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1))
    state, _ = step(state, DATA)
    events = spans.set_listener(None) or list(spans._RECORDER.events)
    assert events[0]["name"] == "model"
    assert (events[1]["name"], events[1]["size"]) == ("out_of_memory", 16)
    assert spans.totals()["search"].count >= 2
    assert spans.totals()["step"].count == 1
    assert spans._RECORDER.stack == []


class Twice(nn.Module):
    def forward(self, x):
        return x * 2


def test_compile_time_is_counted_separately():
    model = compile_blocks(nn.Sequential(Twice()), blocks=(Twice,), backend="eager")
    with spans.span("step"):
        model(DATA)
    assert spans.totals()["compile"].count >= 1
    assert spans.totals()["compile"].seconds > 0
    assert spans._RECORDER.stack == []
    torch.compiler.reset()
