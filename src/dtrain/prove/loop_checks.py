"""Find mistakes of a loop in the record of one run, by the facts of ``loop_facts``: each check yields contradictions. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from dtrain.arguments import format_count
from dtrain.prove.compare import Difference
from dtrain.prove.run_records import Row, RunRecord


def check_loop(record: RunRecord) -> Iterator[Difference]:
    """Yield the contradictions of a run: an order that repeats, workers that read the same, early clipping, lost parameters."""
    yield from _check_epochs(record)
    yield from _check_workers(record)
    yield from _check_clips(record)
    yield from _check_criteria(record)
    yield from _check_kept_weights(record)


def _training_passes(record: RunRecord) -> Iterator[Row]:
    """Yield the passes over loaders that have updates, or all passes if the steps do not say their loaders.

    A pass after the last step has no batch, and may be one of training.
    """
    passes = [(place, row) for place, row in enumerate(record.ranks[0]) if row["kind"] == "pass"]
    steps = [(place, row.get("loaders", ())) for place, row in enumerate(record.ranks[0]) if row["kind"] == "step"]
    if not any(loaders for _, loaders in steps):
        yield from (row for _, row in passes)
        return
    of_training = {loader for _, loaders in steps for loader in loaders}
    for begin, row in passes:
        loader = row["loader"]
        end = next((place for place, other in passes if place > begin and other["loader"] == loader), len(record.ranks[0]))
        has_step = any(begin < place < end and loader in loaders for place, loaders in steps)
        if has_step or (row.get("is_over") and row.get("grad") and loader in of_training):
            yield row


def _check_epochs(record: RunRecord) -> Iterator[Difference]:
    """Two passes over a sampler that shuffles must have two epochs."""
    last: dict[int, Row] = {}
    for row in _training_passes(record):
        before, last[row["loader"]] = last.get(row["loader"]), row
        if before is None:
            continue
        if row["shuffle"] and row["epoch"] is not None and (before["epoch"], before["seed"]) == (row["epoch"], row["seed"]):
            text = f"have the order of epoch {row['epoch']} in two passes of {row['sampler']}"
        elif row.get("repeats") and before.get("order") == row["order"]:
            text = f"have one order in two passes of {row['ordered_by']}, and its set_epoch gives another one"
        else:
            continue
        yield Difference(code="shuffle_without_epoch", step=row["step"], kind="samples", name="", text=text)


def _check_workers(record: RunRecord) -> Iterator[Difference]:
    """The workers of a stream must read other samples, unless the stream has one batch."""
    workers = {(row["loader"], row["number"]): row.get("workers", 0) for row in _training_passes(record)}
    for (loader, number), count in workers.items():
        batches = [
            tuple(row["samples"])
            for row in record.rows("read")
            if (row["loader"], row.get("number")) == (f"loader-{loader}", number) and row["samples"]
        ]
        rounds = [batches[begin : begin + count] for begin in range(0, len(batches) - count + 1, count)] if count > 1 else []
        if rounds and all(len(set(one)) == 1 for one in rounds) and len(set(batches)) > 1:
            text = (
                f"of all {count} workers of the loader are the same, in {format_count(len(rounds), 'batch', 'batches')} of each"
            )
            yield Difference(code="workers_read_the_same", step=0, kind="samples", name="", text=text)


def _check_clips(record: RunRecord) -> Iterator[Difference]:
    for row in record.rows("early_clip"):
        text = f"is clipped after {row['after']} of {row['backwards']} backwards that add to it"
        yield Difference(code="clip_before_accumulation", step=row["step"], kind="gradient", name="the step", text=text)


def _check_criteria(record: RunRecord) -> Iterator[Difference]:
    """A parameter of a loss that gets a gradient until the end must be in an optimizer."""
    last = max(record.steps, default=0)
    for row in record.rows("untrained"):
        if row["step"] == last:
            text = f"gets a gradient with the norm {row['norm']:.3g}, and no optimizer has it"
            yield Difference(code="loss_parameter_not_trained", step=row["step"], kind="parameter", name=row["name"], text=text)


def _check_kept_weights(record: RunRecord) -> Iterator[Difference]:
    for row in record.rows("stale_weights"):
        taken = format_count(row["taken"], "update")
        text = f"was taken after {taken}, and has the weights after {row['used']} of them in {row['place']}"
        yield Difference(code="kept_weights_change", step=row["used"], kind="state dict", name="", text=text)
