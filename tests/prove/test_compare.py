"""Two records are compared in program order, and the first difference gets its cause from the evidence in the records."""

import numpy as np
import pytest
import safetensors.torch

from dtrain.prove.causes import EXPERIMENTS, OF_REACH, OF_SEEDS, OF_SLOPE, OF_WIDTH
from dtrain.prove.checks import (
    FAR,
    check_record,
    check_training,
    compare_precision,
    computed_samples,
    rounding_hides,
    rounding_of,
)
from dtrain.prove.compare import compare_records, unstable_keys
from dtrain.prove.evaluations import ExportCheck
from dtrain.prove.explain import explain, seeds_of_rank_0
from dtrain.prove.run_config import BASE, RunConfig
from dtrain.prove.run_log import RunLog, column_hashes, digest, field_digests, flatten, sample_hashes, sketch
from dtrain.prove.run_records import RunRecord, read_record
from dtrain.prove.script_values import ScriptModels, moves_toward

torch = pytest.importorskip("torch")

STEP = {
    "kind": "step",
    "step": 0,
    "optimizer_index": 0,
    "samples": [],
    "losses": [],
    "forwards": 1,
    "backwards": 1,
    "modules": "",
    "ties": [],
}
STEP |= {"events": [], "rng": "r", "draws": 0, "epochs": [], "shapes": [], "lr": [0.1], "fields": {}, "lines": {}}


def write_run(folder, ranks, *, gradient=None, tensors=(), of_ranks=None, rows=(), rows_of_ranks=None):
    """Write a run of one step: ``ranks`` are the changes of each rank's row, ``tensors`` (kind, name, values and step).

    ``of_ranks`` has further tensors of each rank.
    """
    folder.mkdir()
    for rank, changes in enumerate(ranks):
        log = RunLog(folder, rank)
        log.whole = {} if len(ranks) > 1 else None
        for row in rows if rows_of_ranks is None else rows_of_ranks[rank]:
            log.write(**row)
        row = STEP | changes
        log.write(row.pop("kind"), **row)
        if gradient is not None:
            values = gradient[rank] if isinstance(gradient[0], list) else gradient
            log.write_tensor(
                "gradient", "weight", torch.tensor(values, dtype=torch.float64), step=0, optimizer_index=0, order=0
            )
        for kind, name, values, *step in (*tensors, *(of_ranks[rank] if of_ranks else ())):
            log.write_tensor(
                kind, name, torch.tensor(values, dtype=torch.float64), step=step[0] if step else 0, optimizer_index=0, order=0
            )
        log.close()
    return read_record(folder.name, folder)


def explain_first(reference, record, ranks=2, *, resumed=False, same_layout=False):
    comparison = compare_records(reference, record, same_layout=same_layout)
    config = RunConfig(name="run", folder="", script="", ranks=ranks)
    causes = explain(comparison.differences[0], record, reference, config, resumed)
    # Without an experiment, nothing speaks for a gradient that is not that of the loss.
    return next(cause for cause in causes if cause.code != OF_SLOPE)


def first_cause(*args, **options):
    return explain_first(*args, **options).code


@pytest.mark.parametrize(("rate", "other", "differs"), [(1e-14, 2e-14, True), (1e9, 1e9 + 1e-3, False)], ids=["small", "large"])
def test_numbers_are_compared_relative_to_their_size(tmp_path, rate, other, differs):
    first, second = (write_run(tmp_path / str(value), [{"lr": [value]}]) for value in (rate, other))
    differences = compare_records(first, second, same_layout=False).differences
    assert [difference.kind for difference in differences] == ["lr"] * differs


def test_equal_records_are_equal_bit_for_bit(tmp_path):
    runs = [write_run(tmp_path / name, [{"losses": [[6.0, 3.0]]}], gradient=[1.0, 2.0]) for name in "ab"]
    assert compare_records(*runs, same_layout=True).verdict == "bitwise"


def test_rounding_is_within_the_tolerance(tmp_path):
    a = write_run(tmp_path / "a", [{}], gradient=[1.0, 2.0])
    b = write_run(tmp_path / "b", [{}], gradient=[1.0, 2.0 + 1e-12])
    comparison = compare_records(a, b, same_layout=False)
    assert comparison.verdict == "tolerance"
    assert 0 < comparison.largest < 1e-11


def test_the_first_difference_is_the_first_in_program_order(tmp_path):
    a = write_run(tmp_path / "a", [{"losses": [[6.0, 3.0]], "lr": [0.1]}], gradient=[1.0])
    b = write_run(tmp_path / "b", [{"losses": [[6.0, 3.0]], "lr": [0.2]}], gradient=[3.0])
    comparison = compare_records(a, b, same_layout=False)
    assert [difference.kind for difference in comparison.differences] == ["gradient", "lr"]


@pytest.mark.parametrize(("rates", "kinds"), [([0.1, 0.2, 0.2], []), ([0.1, 0.2, 0.3], ["lr"])], ids=["split", "another rate"])
def test_groups_that_a_strategy_splits_have_the_rates_of_the_whole(tmp_path, rates, kinds):
    a = write_run(tmp_path / "a", [{"losses": [[6.0, 3.0]], "lr": [0.1, 0.2]}], gradient=[1.0])
    b = write_run(tmp_path / "b", [{"losses": [[6.0, 3.0]], "lr": rates}], gradient=[1.0])
    comparison = compare_records(a, b, same_layout=False)
    assert [difference.kind for difference in comparison.differences] == kinds


def test_samples_are_compared_over_all_ranks_in_any_order(tmp_path):
    a = write_run(tmp_path / "a", [{"samples": ["1/x", "2/y", "3/z"]}])
    b = write_run(tmp_path / "b", [{"samples": ["3/z"]}, {"samples": ["2/y", "1/x"]}])
    assert compare_records(a, b, same_layout=False).verdict == "bitwise"


def test_difference_of_samples_names_the_tensors_and_the_line_that_reads_them(tmp_path):
    whole = torch.arange(12).reshape(4, 3), torch.arange(4)
    changed = torch.arange(12).reshape(4, 3), torch.tensor([0, 1, 2, 5])

    def step(rows, batch):
        part = tuple(tensor[rows] for tensor in batch)
        return {"samples": sample_hashes(part), "fields": field_digests(part), "lines": {"read": "loop.py:7"}}

    a = write_run(tmp_path / "a", [step(slice(4), whole)])
    b = write_run(tmp_path / "b", [step([3, 0], changed), step([1, 2], changed)])
    (difference,) = compare_records(a, b, same_layout=False).differences
    assert difference.text == "are others: 1 of 4 are not in the other run; only batch[1] differs"
    assert difference.other.line == "loop.py:7"


def test_losses_of_ranks_are_added_before_they_are_divided(tmp_path):
    a = write_run(tmp_path / "a", [{"losses": [[6.0, 3.0]]}])
    b = write_run(tmp_path / "b", [{"losses": [[1.0, 2.0]]}, {"losses": [[5.0, 1.0]]}])
    assert compare_records(a, b, same_layout=False).verdict != "differs"


def test_a_tensor_of_rounding_noise_is_equal(tmp_path):
    """The bias of a key in attention has a gradient that cancels to noise."""
    a, b = (
        write_run(tmp_path / name, [{}], tensors=[("parameter", "large", [1.0]), ("parameter", "bias", [noise])])
        for name, noise in (("a", 1e-17), ("b", -3e-17))
    )
    assert compare_records(a, b, same_layout=False).verdict == "tolerance"


def log(step=0, **numbers):
    return {"kind": "metrics", "step": step, "source": "log", "at": 1, "numbers": numbers, "events": []}


def test_metrics_that_differ_between_equal_runs_are_unstable_in_all_steps(tmp_path):
    a, b = (
        write_run(tmp_path / name, [{}], rows=[log(loss=2.0, x=x), log(1, loss=1.0, x=3.0)])
        for name, x in zip("ab", (1.0, 2.0), strict=True)
    )
    assert {key[3] for key in unstable_keys(a, b)} == {"x"}
    assert {key[0] for key in unstable_keys(a, b)} == {0, 1}


@pytest.mark.parametrize("name", ["embedding_accuracy", "mean_rank", "per_sample_accuracy", "memory_loss"])
def test_metrics_are_compared_whatever_their_names(tmp_path, name):
    a, b = (write_run(tmp_path / run, [{}], rows=[log(**{name: x})]) for run, x in zip("ab", (0.5, 0.7), strict=True))
    assert compare_records(a, b, same_layout=False).verdict == "differs"


def test_metrics_that_are_numbers_of_the_layout_are_named_and_not_compared(tmp_path):
    rows = [log(ranks=1.0, share=4.0, accuracy=1.0), log(1, ranks=1.0, share=4.0, accuracy=0.5)]
    others = [log(ranks=2.0, share=2.0, accuracy=2.0), log(1, ranks=2.0, share=2.0, accuracy=0.6)]
    samples = ["1/a", "2/b", "3/c", "4/d"]
    a = write_run(tmp_path / "a", [{"samples": samples}], rows=rows)
    b = write_run(tmp_path / "b", [{"samples": samples[:2]}, {"samples": samples[2:]}], rows=others)
    comparison = compare_records(a, b, same_layout=False)
    assert comparison.of_layout == {"ranks", "share"}
    assert {difference.name for difference in comparison.differences} == {"accuracy"}


@pytest.mark.parametrize(
    ("values", "others", "differs"),
    [
        ((-1.39e-16, 2e-17), (-1.25e-16, 1e-17), False),  # terms that cancel
        ((3.0, 1e-9), (3.0, 2e-9), False),  # rounding, by the scale of the run
        ((3.0, 0.1), (3.0, 0.2), True),
        ((1e-9, 1e-9), (2e-9, 2e-9), True),
    ],
)
def test_metrics_are_compared_with_their_scale_over_the_run(tmp_path, values, others, differs):
    a, b = (
        write_run(tmp_path / name, [{}], rows=[log(step, x=x) for step, x in enumerate(numbers)])
        for name, numbers in (("a", values), ("b", others))
    )
    assert (compare_records(a, b, same_layout=False).verdict == "differs") is differs


def variable(step, digest, value=None):
    return {"kind": "variable", "step": step, "name": "x", "type": "number" if value else "tensor", "digest": digest} | {
        "value": value,
        "weights": False,
    }


@pytest.mark.parametrize(
    ("reference", "resumed", "loss", "differs"),
    [
        ("abcd", "a0cd", 1.0, False),  # filled again before it is read
        ("abcd", "a012", 1.0, True),
        ("abcd", "a0cd", 2.0, True),  # read before
    ],
)
def test_scratch_that_a_step_overwrites_is_not_lost_by_a_resume(tmp_path, reference, resumed, loss, differs):
    a, b = (
        write_run(tmp_path / name, [{"step": 1, "losses": [[value, 1.0]]}], rows=[variable(*row) for row in enumerate(rows)])
        for name, rows, value in (("a", reference, 1.0), ("b", resumed, loss))
    )
    assert (compare_records(a, b, same_layout=True, first_steps={0: 1}).verdict == "differs") is differs


def test_a_number_that_is_no_number_in_the_other_run_has_other_values(tmp_path):
    a, b = (
        write_run(tmp_path / name, [{"step": 1, "losses": [[1.0, 1.0]]}], rows=[variable(*row) for row in rows])
        for name, rows in (("a", [(0, "a"), (1, "b", 1.0), (2, "c", 2.0)]), ("b", [(0, "a"), (1, "x"), (2, "y")]))
    )
    differences = compare_records(a, b, same_layout=True, first_steps={0: 1}).differences
    assert next(difference.text for difference in differences if difference.kind == "variable") == "has other values"


@pytest.mark.parametrize("is_cut", [True, False])
def test_steps_behind_the_end_of_a_loop_that_the_proof_ends_are_not_missing(tmp_path, is_cut):
    notes = [{"kind": "note", "code": "loop_cut"}] * is_cut
    a = write_run(tmp_path / "a", [{}], rows=notes)
    b = write_run(tmp_path / "b", [{}], rows=[STEP | {"step": 1}, *notes])
    assert [difference.kind for difference in compare_records(a, b, same_layout=True).differences] == ["steps"] * (not is_cut)


def test_sparse_gradient_has_the_elements_of_the_dense_one():
    gradient = torch.tensor([[0.0, 3.0], [0.0, 0.0], [4.0, 0.0]]).to_sparse()
    assert flatten(gradient).tolist() == [0.0, 3.0, 0.0, 0.0, 4.0, 0.0]


def evaluation(*by_rank):
    """Return the changes of an evaluation's rows: for each rank the batches that it ran, as lists of samples."""
    return [{"kind": "evaluation", "step": 0, "batches": batches} for batches in by_rank]


def write_evaluations(folder, rows):
    folder.mkdir()
    for rank, row in enumerate(rows):
        log = RunLog(folder, rank)
        log.write("step", **{key: value for key, value in STEP.items() if key != "kind"})
        log.write(**row)
        log.close()
    return read_record(folder.name, folder)


@pytest.mark.parametrize(
    ("ranks", "equal"),
    [
        ([[["a", "b"]], [["c"]]], True),  # shares
        ([[["a", "b"], ["c"]], [["a", "b"], ["c"]]], True),  # all ranks run everything, as to generate text
        ([[["a", "b"]], [["c", "a"]]], False),  # a sample twice
        ([[["a", "b"]], [["a", "b"]]], False),  # a sample is missing
    ],
)
def test_samples_of_evaluations_are_counted_once(tmp_path, ranks, equal):
    one = write_evaluations(tmp_path / "a", evaluation([["a", "b", "c"]]))
    several = write_evaluations(tmp_path / "b", evaluation(*ranks))
    assert (compare_records(one, several, same_layout=False).verdict != "differs") is equal


def test_equal_samples_on_all_ranks_are_no_repetition_if_their_number_agrees(tmp_path):
    """Even random numbers make all generated samples of a step equal."""
    one = write_evaluations(tmp_path / "a", evaluation([["a", "a"]]))
    two = write_evaluations(tmp_path / "b", evaluation([["a"]], [["a"]]))
    assert compare_records(one, two, same_layout=False).verdict != "differs"


def test_evaluation_before_the_first_step_of_a_resume_is_not_compared(tmp_path):
    a, b = (
        write_evaluations(tmp_path / name, [row | {"step": 2}])
        for name, row in zip("ab", evaluation([["a"]], [["b"]]), strict=True)
    )
    assert compare_records(a, b, same_layout=True, first_steps={0: 1}).verdict == "differs"
    assert compare_records(a, b, same_layout=True, first_steps={0: 2}).verdict != "differs"


WEIGHT = (0, 0, "gradient", "weight")


def test_rounding_is_measured(tmp_path):
    a, b, c = (write_run(tmp_path / name, [{}], gradient=[1.0, x]) for name, x in (("a", 2.0), ("b", 2.001), ("c", 2.01)))
    rounding = rounding_of(a, [b])
    assert rounding[WEIGHT] == pytest.approx(FAR * 0.001 / 5**0.5, rel=1e-2)
    assert compare_records(a, c, same_layout=False).verdict == "differs"
    assert compare_records(a, c, same_layout=False, rounding=rounding).verdict == "differs"
    assert compare_records(a, b, same_layout=False, rounding=rounding).verdict == "tolerance"
    # Sums in float32 have other roundings than the outputs of modules.
    assert rounding_of(a, [a])[WEIGHT] == pytest.approx(256 * 2.0**-24)


def test_rounding_of_one_tensor_does_not_hide_others(tmp_path):
    def run(name, *values_of):
        tensors = [("parameter", str(number), values) for number, values in enumerate(values_of)]
        return write_run(tmp_path / name, [{}], gradient=[1.0], tensors=tensors)

    a, b = run("a", [1.0], [1.0], [1.0]), run("b", [1.001], [1.001], [0.5])
    rounding = rounding_of(a, [b])
    assert [rounding[0, 0, "parameter", name] < 0.01 for name in "012"] == [True, True, False]
    hidden = compare_records(a, run("c", [1.0], [1.0], [7.0]), same_layout=False, rounding=rounding)
    assert (hidden.verdict, rounding_hides(hidden)[1]) == ("tolerance", False)
    assert rounding_hides(hidden)[0].startswith("rounding hides 1 of 10 facts")
    assert compare_records(a, run("d", [1.0], [1.2], [1.0]), same_layout=False, rounding=rounding).verdict == "differs"


def test_comparison_whose_tolerance_is_as_large_as_the_gradients_shows_nothing(tmp_path):
    a, b = (write_run(tmp_path / name, [{}], gradient=[x]) for name, x in (("a", 1.0), ("b", 0.8)))
    assert rounding_hides(compare_records(a, b, same_layout=False, rounding=rounding_of(a, [b])))[1]


@pytest.mark.parametrize(("gradient", "codes"), [(1.001, []), (0.0, ["gradient_lost"]), (float("nan"), ["gradient_lost"])])
def test_count_that_overflows_is_found_by_the_gradients_of_modules(tmp_path, gradient, codes):
    def run(name, gradient):
        log = {"kind_of": "Linear", "own": True, "leaf": True}
        folder = tmp_path / name
        folder.mkdir()
        file = RunLog(folder, 0)
        file.write_tensor("activation", "head", torch.tensor([1.0]).half(), **log)
        file.write_tensor("activation_gradient", "head", torch.tensor([gradient]).half())
        file.close()
        return read_record(name, folder)

    exact, written, rounded = run("a", 1.0), run("b", gradient), run("c", gradient)
    assert [difference.code for difference in compare_precision(exact, written, rounded)] == codes


def test_samples_that_a_model_computes_change_with_the_rounding(tmp_path):
    a, b = (write_run(tmp_path / name, [{"samples": [sample, "2/x"]}]) for name, sample in (("a", "1/x"), ("b", "1/y")))
    assert computed_samples(a, [a]) == set()
    assert computed_samples(a, [a, b]) == {(0, 0, "samples", "")}


CAUSES = {
    "batch_grows_with_ranks": ([{"samples": ["1/a"]}], [{"samples": ["1/a"]}, {"samples": ["2/b"]}]),
    "sampler_without_rank": ([{"samples": ["1/a", "2/b"]}], [{"samples": ["1/a"]}, {"samples": ["1/a"]}]),
    "augmentation_by_worker": ([{"samples": ["1/a", "2/b"]}], [{"samples": ["1/c"]}, {"samples": ["2/d"]}]),
    "loss_weighting": ([{"losses": [[2.0, 1]]}], [{"losses": [[2.0, 1]]}, {"losses": [[3.0, 1]]}]),
    "padding_in_loss": (
        [{"losses": [[2.0, 20]], "shapes": [[5]]}],
        [{"losses": [[1.0, 10]], "shapes": [[5]]}, {"losses": [[1.0, 8]], "shapes": [[4]]}],
    ),
    "schedule_by_world_size": (
        [{"events": ["schedule"], "lr": [0.1]}],
        [{"events": ["schedule", "schedule"], "lr": [0.2]}, {"events": ["schedule", "schedule"], "lr": [0.2]}],
    ),
    "rate_by_world_size": ([{"lr": [0.1]}], [{"lr": [0.2]}, {"lr": [0.2]}]),
    "schedule_per_microbatch": (
        [{"events": ["schedule"] * 4, "backwards": 4, "lr": [0.1]}],
        [{"events": ["schedule"] * 2, "backwards": 2, "lr": [0.2]}] * 2,
    ),
}


def test_cause_without_evidence_of_its_own_is_a_guess(tmp_path):
    def shown(code):
        one, two = CAUSES[code]
        cause = explain_first(write_run(tmp_path / f"{code}-a", one), write_run(tmp_path / f"{code}-b", two))
        assert cause.advice.startswith("Possibly: ") is not cause.shown
        return cause.shown

    guesses = dict.fromkeys(("padding_in_loss", "augmentation_by_worker"), False)
    assert {code: shown(code) for code in CAUSES} == dict.fromkeys(CAUSES, True) | guesses
    # The weights of the microbatches are not 1.
    a, b = (write_run(tmp_path / name, [{"losses": [[2.0, weight]]}]) for name, weight in (("a", 6), ("b", 7)))
    assert (explain_first(a, b).code, explain_first(a, b).shown) == ("loss_weighting", False)


def test_metric_that_follows_from_the_size_of_microbatches_is_not_that_of_rank_0(tmp_path):
    a, b = (write_run(tmp_path / name, [{}], rows=[log(x=x)]) for name, x in (("a", 1.0), ("b", 2.5)))
    assert first_cause(a, b, 1) == "metric_mean_of_means"


@pytest.mark.parametrize("code", CAUSES)
def test_cause_follows_from_the_evidence(tmp_path, code):
    one, two = CAUSES[code]
    assert first_cause(write_run(tmp_path / "a", one), write_run(tmp_path / "b", two)) == code


def test_gradients_that_differ_by_the_number_of_microbatches_are_not_scaled(tmp_path):
    a = write_run(tmp_path / "a", [{"backwards": 4}], gradient=[4.0, 8.0])
    b = write_run(tmp_path / "b", [{"backwards": 2}] * 2, gradient=[2.0, 4.0])
    assert first_cause(a, b) == "accumulation_not_scaled"


def test_gradients_that_differ_by_the_number_of_ranks_are_averaged_twice(tmp_path):
    a = write_run(tmp_path / "a", [{}], gradient=[4.0, 8.0])
    b = write_run(tmp_path / "b", [{}] * 2, gradient=[2.0, 4.0])
    assert first_cause(a, b) == "gradient_scaled_by_ranks"


def test_gradients_of_which_some_have_the_number_of_ranks_as_factor_are_named(tmp_path):
    runs = [
        write_run(tmp_path / name, [{}], gradient=[1.0], tensors=[("gradient", "expert", [x])])
        for name, x in zip("ab", (1.0, 2.0), strict=True)
    ]
    cause = explain_first(*runs)
    assert (cause.code, cause.shown) == ("gradient_scaled_by_ranks", True)
    assert "expert has another factor" in cause.evidence


@pytest.mark.parametrize(("norm", "shown"), [(5.0, True), (4.0, False)], ids=["clipped", "not clipped"])
def test_gradients_with_one_factor_on_all_ranks_have_another_norm_for_clipping(tmp_path, norm, shown):
    def run(name, factor):
        later = [("gradient", "weight", [0.0, norm * factor], 1)]
        steps = [{}, STEP | {"step": 1}]
        return write_run(tmp_path / name, [{}], gradient=[3.0 * factor, 4.0 * factor], tensors=later, rows=steps[1:])

    cause = explain_first(run("a", 1.0), run("b", 0.8))
    assert (cause.code, cause.shown) == ("clip_norm_differs", shown)


@pytest.mark.parametrize(("name", "code"), [("weight", "update_of_shard"), ("another", "unknown")])
def test_update_that_differs_with_equal_gradients_is_that_of_a_shard(tmp_path, name, code):
    a = write_run(tmp_path / "a", [{}], gradient=[1.0], tensors=[("parameter", name, [1.0])])
    b = write_run(tmp_path / "b", [{}] * 2, gradient=[1.0], tensors=[("parameter", name, [2.0])])
    assert first_cause(a, b) == "unknown"
    # Only rank 0 writes a tensor with shards.
    file = tmp_path / "b" / "rank-1.jsonl"
    file.write_text("".join(line for line in file.read_text().splitlines(True) if '"parameter"' not in line))
    assert first_cause(a, read_record("b", tmp_path / "b")) == code


@pytest.mark.parametrize(("later", "code"), [(4.0, "buffer_of_rank"), (1.0, "unknown")], ids=["updated", "constant"])
def test_buffer_that_differs_between_ranks_and_changes_is_that_of_a_rank(tmp_path, later, code):
    for name, values in (("a", [1.0]), ("b", [2.0, 3.0])):
        write_run(tmp_path / name, [{}] * len(values))
        for rank, value in enumerate(values):
            log = RunLog(tmp_path / name, rank)
            log.write(**STEP)
            for step, number in enumerate((value, later)):
                log.write_tensor("buffer", "mean", torch.tensor([number], dtype=torch.float64), step=step, buffer=True)
            log.close()
    assert first_cause(*(read_record(name, tmp_path / name) for name in "ab")) == code


PARTS = [{"samples": ["1/a"], "parts": [part], "losses": [[2.0, None]], "targets": 5} for part in ("1/b", "2/c")]


@pytest.mark.parametrize(
    ("rows", "agree"),
    [
        (PARTS, True),
        ([{"samples": ["1/a"], "losses": [[2.0, None]], "events": ["all_reduce:forward"]}] * 2, True),
        ([{"samples": ["1/a"], "losses": [[2.0, None]]}] * 2, False),
    ],
    ids=["parts of sequences", "parts of the model", "the same samples"],
)
def test_ranks_of_a_loop_by_hand_that_share_a_batch_have_its_samples_once(tmp_path, rows, agree):
    a = write_run(tmp_path / "a", [{"samples": ["1/a"], "losses": [[2.0, None]]}])
    assert (compare_records(a, write_run(tmp_path / "b", rows), same_layout=False).verdict != "differs") is agree


@pytest.mark.parametrize(
    ("targets", "rows", "code", "shown"),
    [
        (10, [1.0, 1.0, 0.0, 0.0], "positions_restart", True),
        (12, [1.0, 2.0, 3.0, 4.0], "targets_lost", True),
        (10, [1.0, 2.0, 3.0, 4.0], "sequence_part_alone", False),
    ],
)
def test_causes_of_another_loss_of_parts_of_sequences(tmp_path, targets, rows, code, shown):
    whole = [{"samples": ["1/a"], "losses": [[3.0, None]], "targets": targets}]
    a = write_run(tmp_path / "a", whole, tensors=[("gradient", "position", [[1.0], [1.0], [1.0], [1.0]])])
    b = write_run(tmp_path / "b", PARTS, tensors=[("gradient", "position", [[row] for row in rows])])
    cause = explain_first(a, b)
    assert (cause.code, cause.shown) == (code, shown)


def test_gradients_with_one_factor_per_rank_are_clipped_by_a_local_norm(tmp_path):
    values = [float(number) for number in range(1, 9)]
    a = write_run(tmp_path / "a", [{}], gradient=values)
    b = write_run(tmp_path / "b", [{}] * 2, gradient=[value * (0.5 if value < 5 else 0.25) for value in values])
    assert first_cause(a, b) == "clip_local_norm"


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"ties": []}, "tied_weights_untied"),
        ({"lr": [0.3]}, "schedule_not_saved"),
        ({"rng": "other", "draws": 2}, "rng_not_saved"),
    ],
)
def test_causes_of_a_resume(tmp_path, changes, code):
    a = write_run(tmp_path / "a", [{"ties": ["head = embed"], "draws": 2}])
    b = write_run(tmp_path / "b", [{"ties": ["head = embed"], "draws": 2} | changes])
    assert first_cause(a, b, 1, resumed=True, same_layout=True) == code


def test_resume_with_other_parameters_than_the_run_had_is_named(tmp_path):
    a = write_run(tmp_path / "a", [{"step": 1, "losses": [[2.0, 1.0]]}], tensors=[("parameter", "head.weight", [1.0], 0)])
    b = write_run(tmp_path / "b", [{"step": 1, "losses": [[3.0, 1.0]]}], tensors=[("initial", "head.weight", [2.0], 1)])
    assert first_cause(a, b, 1, resumed=True, same_layout=True) == "parameters_not_saved"


def test_state_that_begins_again_after_a_resume_is_named(tmp_path):
    a, b = (
        write_run(tmp_path / name, [{}], tensors=[("initial", "weight", [value])]) for name, value in (("a", 1.0), ("b", 2.0))
    )
    assert first_cause(a, b, 1, resumed=True, same_layout=True) == "state_begins_again"


def codes_of_checks(record):
    return [difference.code for difference in check_record(record)]


def test_ranks_that_apply_other_gradients_are_found_without_another_run(tmp_path):
    record = write_run(tmp_path / "a", [{}, {}], gradient=[[1.0], [2.0]])
    assert codes_of_checks(record) == ["gradient_not_reduced"]
    assert check_record(record)[0].ranks == (1,)


def test_equal_random_numbers_on_ranks_with_other_samples_are_found(tmp_path):
    rows = [{"samples": ["1/a"], "draws": 1}, {"samples": ["2/b"], "draws": 1}]
    assert codes_of_checks(write_run(tmp_path / "a", [row | {"drops": 1} for row in rows])) == ["same_dropout_on_ranks"]
    noisy = write_run(tmp_path / "c", rows)
    (difference,) = check_record(noisy)
    (cause,) = explain(difference, noisy, None, RunConfig(name="run", folder="", script=""), False)
    # A script may draw noise that all ranks share.
    assert (cause.code, cause.shown) == ("same_noise_on_ranks", False)
    assert codes_of_checks(write_run(tmp_path / "b", [rows[0], rows[1] | {"rng": "s"}])) == []


def test_clipping_before_unscaling_is_found(tmp_path):
    assert codes_of_checks(write_run(tmp_path / "a", [{"events": ["scale", "clip"]}])) == ["clip_before_unscale"]
    assert codes_of_checks(write_run(tmp_path / "b", [{"events": ["scale", "unscale", "clip"]}])) == []


def test_export_of_other_weights_than_the_evaluated_is_found(tmp_path):
    def run(name, exported):
        tensors = [("evaluated_weight", "w", [1.0]), ("parameter", "w", [2.0]), ("exported", "model.w", exported)]
        return codes_of_checks(write_run(tmp_path / name, [{}], tensors=tensors))

    assert run("bug", [2.0]) == ["export_without_ema"]
    assert run("fixed", [1.0]) == []


OPTIMIZER = {
    "kind": "optimizer",
    "step": 0,
    "optimizer_index": 0,
    "optimizer": "SGD",
    "names": ["w"],
    "unknown": [],
    "params": 1,
}
MOVES = [("initial", "w", [1.0]), ("parameter", "w", [2.0])]


@pytest.mark.parametrize(
    ("changes", "gradient", "tensors", "reason"),
    [
        ({"losses": [[6.0, 3.0]]}, [1.0], MOVES, ""),
        ({"losses": [[float("nan"), 3.0]]}, [1.0], MOVES, "the loss of step 0 is nan"),
        ({"losses": [[0.0, 3.0]]}, [0.0], MOVES, "the loss is 0 in every step"),
        # The loss of a policy gradient is a sum of advantages, whose mean is 0.
        ({"losses": [[0.0, 3.0]]}, [1.0], MOVES, ""),
        ({"losses": [[6.0, 3.0]]}, [0.0], MOVES, "the gradients are 0 in every step"),
        ({"losses": [[6.0, 3.0]]}, [float("inf")], MOVES, "the gradient of weight in step 0 has the norm inf"),
        ({"losses": [[6.0, 3.0]]}, [1.0], [*MOVES[:1], ("parameter", "w", [1.0])], "no parameter of SGD changes"),
        (
            {"losses": [[6.0, 3.0]], "lr": [0.0]},
            [1.0],
            [*MOVES[:1], ("parameter", "w", [1.0])],
            "no parameter of SGD changes, because its learning rate is 0; give arguments of a longer run",
        ),
        # A closure computes the gradients after the start of the update.
        ({"losses": []}, None, MOVES, ""),
    ],
)
def test_run_that_trains_nothing_shows_nothing(tmp_path, changes, gradient, tensors, reason):
    record = write_run(tmp_path / "a", [changes], gradient=gradient, tensors=tensors, rows=[OPTIMIZER])
    assert check_training(record) == reason


def export_check(error, missing=()):
    return {"kind": "export_check", "step": 1, "path": "m.safetensors", "error": error, "missing": list(missing), "shapes": []}


def test_exported_model_with_other_outputs_is_found(tmp_path):
    assert codes_of_checks(write_run(tmp_path / "a", [{}], rows=[export_check(0.0, ["constant"])])) == []
    # A file of raw weights beside one of averages is right.
    assert codes_of_checks(write_run(tmp_path / "b", [{}], rows=[export_check(0.3), export_check(0.0)])) == []
    (difference,) = check_record(write_run(tmp_path / "c", [{}], rows=[export_check(0.3, ["mean", "var"])]))
    assert difference.code == "export_differs"
    assert difference.text == "loaded again gives outputs that differ by 0.3 of their norm; the file lacks mean and 1 more"


@pytest.fixture
def trained():
    """A model with a buffer, after a step, and the check that has seen its forwards."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)).double()
    x, check = torch.randn(8, 4, dtype=torch.float64), ExportCheck()
    check.hold(model, (x,), {})
    model(x).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return model, check


@pytest.mark.parametrize(
    ("change", "missing", "equal"),
    [
        (lambda weights: weights, [], True),
        (lambda weights: weights | {"1.weight": weights["1.weight"].T.contiguous()}, [], False),
        (
            lambda weights: {name: w for name, w in weights.items() if "running" not in name},
            ["0.running_mean", "0.running_var"],
            False,
        ),
        (lambda weights: {f"model.{name}": weight for name, weight in weights.items()}, [], True),
        (lambda weights: {name: w.bfloat16() if w.is_floating_point() else w for name, w in weights.items()}, [], True),
    ],
    ids=["all", "transposed", "no statistics", "prefix", "bfloat16"],
)
def test_export_is_loaded_again(tmp_path, trained, change, missing, equal):
    model, check = trained
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    safetensors.torch.save_file(change(dict(model.state_dict())), tmp_path / "model.safetensors")
    result = check.check(str(tmp_path / "model.safetensors"), 1)
    assert result["missing"] == missing
    assert (result["error"] < 1e-9) is equal
    assert model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_export_is_compared_with_the_evaluated_weights(tmp_path, trained):
    model, check = trained
    path = tmp_path / "model.safetensors"
    check.evaluation_begins(model, 1)
    safetensors.torch.save_file(model.state_dict(), path)
    with torch.no_grad():
        model[1].weight.mul_(2)
    assert check.check(str(path), 1)["error"] == 0.0
    safetensors.torch.save_file(model.state_dict(), path)
    assert check.check(str(path), 1)["error"] > 0.1
    # A later step, with other weights that were not evaluated.
    assert check.check(str(path), 2)["error"] == 0.0


def test_each_model_of_a_class_has_names_of_its_own():
    models, linears = ScriptModels(None), [torch.nn.Linear(2, 2) for _ in range(3)]
    for linear in linears:
        models.add(linear)
    named = models.parameters()
    assert {id(param) for param in named.values()} == {id(param) for linear in linears for param in linear.parameters()}
    assert list(named)[::2] == ["weight", "Linear.weight", "Linear2.weight"]


def test_sketch_is_linear_and_keeps_the_size_of_a_difference():
    x = torch.randn(100_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = x.clone()
    y[5] += 3.0
    assert np.linalg.norm(sketch(flatten(x)) - sketch(flatten(y))) == pytest.approx(3.0)
    np.testing.assert_allclose(sketch(flatten(2 * x)), 2 * sketch(flatten(x)))
    assert digest(flatten(x)) != digest(flatten(y))


def test_sample_hashes_do_not_depend_on_the_batch_or_on_padding():
    short = {"ids": torch.tensor([[3, 4]]), "mask": torch.tensor([[1, 1]])}
    padded = {"ids": torch.tensor([[3, 4, 0], [5, 6, 7]]), "mask": torch.tensor([[1, 1, 0], [1, 1, 1]])}
    assert sample_hashes(short)[0] == sample_hashes(padded)[0]
    assert len(set(sample_hashes(padded))) == 2


def test_a_killed_rank_leaves_a_readable_record(tmp_path):
    record = write_run(tmp_path / "a", [{}])
    with open(tmp_path / "a" / "rank-0.jsonl", "a") as file:
        file.write('{"kind": "st')
    assert isinstance(record, RunRecord)
    assert read_record("a", tmp_path / "a").steps == [0]


@pytest.mark.parametrize(
    ("losses", "code"),
    [(([4.0, None], [1.0, None], [5.0, None]), "local_loss_count"), (([4.0, 1.0], [1.0, 1.0], [5.0, 1.0]), "loss_weighting")],
    ids=["plain", "LossSum"],
)
def test_count_that_makes_the_losses_equal_shows_the_cause(tmp_path, losses, code):
    whole, *parts = ({"losses": [loss], "counts": [counts]} for loss, counts in zip(losses, COUNTS, strict=True))
    runs = write_run(tmp_path / "a", [whole], gradient=[1.0, 2.0]), write_run(tmp_path / "b", parts, gradient=[2.0, 1.0])
    found = explain_first(*runs)
    assert (found.code, found.shown) == (code, True)
    assert found.evidence == "The losses of both runs have one mean with the labels that are not -100 as weights."


COUNTS = [
    {"the labels that are not -100": 8, "the number of samples": 4},
    {"the labels that are not -100": 2, "the number of samples": 2},
    {"the labels that are not -100": 6, "the number of samples": 2},
]


def test_without_such_a_count_the_cause_is_a_guess(tmp_path):
    whole, *parts = (
        {"losses": [loss], "counts": [counts]}
        for loss, counts in zip(([4.5, None], [1.0, None], [5.0, None]), COUNTS, strict=True)
    )
    runs = write_run(tmp_path / "a", [whole], gradient=[1.0, 2.0]), write_run(tmp_path / "b", parts, gradient=[2.0, 1.0])
    found = explain_first(*runs)
    assert (found.code, found.shown, found.evidence) == ("local_loss_count", False, "")


def test_metric_with_other_numbers_on_ranks_is_that_of_rank_0(tmp_path):
    runs = []
    for name, numbers in (("a", [0.5]), ("b", [0.25, 0.75])):
        runs.append(write_run(tmp_path / name, [{} for _ in numbers], rows_of_ranks=[[log(accuracy=x)] for x in numbers]))
    found = explain_first(*runs)
    assert (found.code, found.shown) == ("metric_of_rank_0", True)
    assert found.evidence == "Ranks have other numbers: 0.25 and 0.75."


def seeds(place, *values):
    return [{"kind": "seed", "place": place, "seed": value} for value in values]


def test_seeds_that_belong_to_a_rank_differ_by_one_number():
    shuffles = [seeds("loop.py:3", 7, 8), seeds("loop.py:3", 107, 108)]
    samples = [seeds("data.py:9", 0, 1), seeds("data.py:9", 5, 2)]
    shared = [seeds("loop.py:1", 0), seeds("loop.py:1", 0)]
    ranks = [[*a, *b, *c] for a, b, c in zip(shuffles, samples, shared, strict=True)]
    assert seeds_of_rank_0(ranks) == {"loop.py:3": [7, 8]}
    assert seeds_of_rank_0(ranks[:1]) == seeds_of_rank_0([]) == {}


@pytest.mark.parametrize("shape", ["sequence first", "lanes and a state"])
def test_samples_along_the_second_axis_are_equal_on_several_ranks(shape):
    x, state = torch.randn(6, 7, 2), torch.randn(1, 6, 3)

    def part(begin, end):
        return [x[begin:end], state[:, begin:end]] if shape == "lanes and a state" else [x[begin:end].transpose(0, 1)]

    whole = column_hashes(part(0, 6))
    assert len(whole) == 6
    assert sorted(whole) == sorted(column_hashes(part(0, 2)) + column_hashes(part(2, 6)))
    assert sorted(whole) != sorted(column_hashes(part(0, 2)) + column_hashes(part(0, 4)))


def test_columns_are_not_those_of_vectors_or_large_batches():
    assert column_hashes([torch.randn(4)]) == []
    assert column_hashes([torch.zeros(2, 600)]) == []


def test_an_input_that_begins_again_after_a_resume_was_not_saved(tmp_path):
    def run(name, steps):
        rows = [
            STEP | {"step": step, "samples": [f"{x}/{state}"], "fields": {"batch[0]": x, "batch[1]": state}}
            for step, x, state in steps
        ]
        return write_run(tmp_path / name, [rows[-1]], rows=rows[:-1])

    whole = run("a", [(0, 1, 10), (1, 2, 20)])
    cause = explain_first(whole, run("b", [(1, 2, 10)]), 1, resumed=True, same_layout=True)
    assert (cause.code, cause.shown) == ("state_not_saved", True)
    assert cause.evidence == "batch[1] of the inputs begins again, and the other inputs go on."
    assert first_cause(whole, run("c", [(1, 1, 10)]), 1, resumed=True, same_layout=True) == "data_repeated_after_resume"


def test_another_gradient_with_other_lengths_may_come_from_padding(tmp_path):
    a = write_run(tmp_path / "a", [{"shapes": [[7]]}], gradient=[1.0, 2.0])
    b = write_run(tmp_path / "b", [{"shapes": [[5]]}], gradient=[1.0, 2.1])
    assert first_cause(a, b) == "padding_in_loss"


def counter(name, *values):
    """Rows of a number of the script at the begin of each step."""
    common = {"kind": "variable", "optimizer_index": 0, "name": name, "type": "number", "weights": False}
    return [common | {"step": step, "digest": repr(value), "value": value} for step, value in enumerate(values)]


@pytest.mark.parametrize(("values", "code"), [((0.0, 2.0), "counts_microbatches"), ((0.0, 3.0), "loss_weighting")])
def test_a_number_that_grows_with_the_forwards_of_a_step_counts_microbatches(tmp_path, values, code):
    a = write_run(tmp_path / "a", [{"losses": [[2.0, 6]], "forwards": 3}], rows=counter("ramp.n", 0.0, 3.0))
    b = write_run(tmp_path / "b", [{"losses": [[2.5, 6]], "forwards": 2}], rows=counter("ramp.n", *values))
    cause = explain_first(a, b)
    assert (cause.code, cause.shown) == (code, False)
    if code == "counts_microbatches":
        assert cause.evidence == "ramp.n grows by 3 and by 2 in a step, as the number of forwards."


@pytest.mark.parametrize(("labels", "code"), [(4, "samples_interact"), (5, "loss_weighting")], ids=["alike", "other labels"])
def test_samples_interact_if_no_other_weight_explains_the_loss(tmp_path, labels, code):
    def counts(samples, labels):
        return {"the number of samples": samples, "the labels": labels}

    a = write_run(tmp_path / "a", [{"losses": [[6.0, 4]], "counts": [counts(4, 8)]}])
    b = write_run(tmp_path / "b", [{"losses": [[2.0, 2], [2.0, 2]], "counts": [counts(2, 4), counts(2, labels)]}])
    assert explain_first(a, b).code == code


def test_totals_that_are_means_are_named_by_their_count(tmp_path):
    a = write_run(tmp_path / "a", [{"losses": [[2.0, 4]], "counts": [{"the number of samples": 4}]}])
    counts = [{"the number of samples": 2}] * 2
    b = write_run(tmp_path / "b", [{"losses": [[1.0, 2], [3.0, 2]], "counts": counts}])
    cause = explain_first(a, b)
    assert (cause.code, cause.shown) == ("loss_weighting", True)
    assert cause.evidence == "The totals are means: with the number of samples as weights, those of both runs agree."


@pytest.mark.parametrize(("last", "code"), [(5.0, "state_not_saved"), (9.0, "unknown")], ids=["lost", "overwritten"])
def test_a_number_that_a_resume_loses_explains_another_loss(tmp_path, last, code):
    def run(name, loss, *values):
        rows = [row | {"step": step} for step, row in zip((1, 2), counter("ramp.n", *values), strict=True)]
        return write_run(tmp_path / name, [{"step": 1, "losses": [[loss, 1]]}], rows=[*rows, STEP | {"step": 2}])

    cause = explain_first(run("a", 2.0, 6.0, 9.0), run("b", 3.0, 0.0, last), 1, resumed=True, same_layout=True)
    assert cause.code == code
    if code != "unknown":
        assert cause.evidence == "ramp.n is 0 instead of 6."


def test_each_experiment_is_of_a_cause_that_can_be_taken_out():
    from dtrain.prove.experiments import CHANGES

    assert set(EXPERIMENTS) == {*CHANGES, *OF_REACH, *OF_SEEDS, OF_SLOPE, OF_WIDTH}


def test_modes_that_differ_between_ranks_contradict(tmp_path):
    ranks = [{"evaluating": ["head"], "frozen": ["a.weight"]}, {"evaluating": [], "frozen": ["a.weight"]}]
    (found,) = check_record(write_run(tmp_path / "run", ranks))
    assert (found.code, found.ranks) == ("mode_differs", (1,))
    assert found.text == "are none instead of 1 between ranks: head differs"


@pytest.mark.parametrize(("field", "code"), [("evaluating", "mode_differs"), ("frozen", "frozen_differs")])
def test_modes_that_a_resume_changes_are_named(tmp_path, field, code):
    runs = [write_run(tmp_path / name, [{field: names}]) for name, names in (("a", []), ("b", ["a", "b", "c", "d"]))]
    (difference,) = compare_records(*runs, same_layout=True).differences
    assert difference.text == "are 4 instead of none: a, b, c and 1 more differ"
    assert first_cause(*runs, resumed=True, same_layout=True) == code


@pytest.mark.parametrize(("frozen", "found"), [(True, ["frozen_statistics_change"]), (False, [])])
def test_statistics_of_frozen_parameters_must_not_change(tmp_path, frozen, found):
    folder = tmp_path / "run"
    folder.mkdir()
    log = RunLog(folder, 0)
    one, two = torch.ones(2, dtype=torch.float64), torch.full((2,), 2.0, dtype=torch.float64)
    place = {"step": 0, "optimizer_index": 0}
    for kind, of_buffer, values in (("initial", "initial", one), ("parameter", "buffer", two)):
        log.write_tensor(kind, "norm.weight", one, trains=not frozen, **place)
        log.write_tensor(kind, "head.weight", values, trains=True, **place)
        log.write_tensor(of_buffer, "norm.running_mean", values, buffer=True, saved=True, **place)
        log.write(**STEP if kind == "initial" else {"kind": "end"})
    log.close()
    assert [difference.code for difference in check_record(read_record("run", folder))] == found


@pytest.mark.parametrize(
    ("samples", "found"), [(["9/x"], ["evaluation_with_dropout"]), (["1/x"], [])], ids=["other samples", "those of the step"]
)
def test_evaluation_with_dropout_is_found_unless_it_is_a_pass_of_the_step(tmp_path, samples, found):
    row = {"kind": "evaluation", "step": 0, "optimizer_index": 0, "batches": [samples], "dropout": ["drop", "other"]}
    record = write_run(tmp_path / "run", [{"samples": ["1/x", "2/y"]}], rows=[row])
    differences = check_record(record)
    assert [difference.code for difference in differences] == found
    assert all(difference.text == "run with dropout in drop and 1 more" for difference in differences)


@pytest.mark.parametrize(
    ("after", "moves"),
    [([0.2, 0.4, 0.8], True), ([0.2, 0.4, 0.7], False), ([1.0, 2.0, 4.0], False), ([-0.1, -0.2, -0.4], False), ([0.2], False)],
    ids=["a share of the way", "another way", "all of the way", "away", "one number"],
)
def test_average_moves_by_a_share_of_the_way_to_the_weights(after, moves):
    before, target = torch.zeros(len(after)), torch.tensor([1.0, 2.0, 4.0][: len(after)])
    assert moves_toward(before, torch.tensor(after, dtype=torch.float64), target) is moves


@pytest.mark.parametrize(
    ("changes", "codes"),
    [
        ({}, ["teacher_in_training_mode"]),
        ({"parameters": ["head.weight", "Teacher.weight"]}, []),
        ({"last": 3.0}, []),
        ({"first": 1.0, "last": 1.0}, []),
    ],
    ids=["teacher", "model that trains", "average", "copy of the model"],
)
def test_model_that_nothing_trains_must_not_drop_values(tmp_path, changes, codes):
    options = {"parameters": ["Teacher.weight"], "first": 5.0, "last": 5.0} | changes
    place = {"step": 0, "optimizer_index": 0}
    note = {"kind": "note", "code": "teacher", "modules": ["1"], "parameters": options["parameters"], **place}
    optimizer = {"kind": "optimizer", "optimizer": "SGD", "params": 1, "unknown": [], "names": ["head.weight"], **place}
    tensors = [("initial", "head.weight", [1.0]), ("parameter", "head.weight", [2.0])]
    tensors += [("initial", "Teacher.weight", [options["first"]]), ("parameter", "Teacher.weight", [options["last"]])]
    assert codes_of_checks(write_run(tmp_path / "run", [{}], tensors=tensors, rows=[note, optimizer])) == codes


def test_loss_scale_that_begins_again_is_named(tmp_path):
    row = {"kind": "variable", "optimizer_index": 0, "name": "scale", "type": "number", "weights": False, "scaler": True}
    scales = {"a": (4.0, 8.0), "b": (4.0, 4.0)}
    runs = [
        write_run(
            tmp_path / name,
            [{}],
            rows=[row | {"step": step, "value": value, "digest": str(value)} for step, value in enumerate(values)],
        )
        for name, values in scales.items()
    ]
    assert first_cause(*runs, resumed=True, same_layout=True) == "scaler_not_saved"


@pytest.mark.parametrize(("draws", "codes"), [(1, ["random_numbers_repeat"]), (0, [])], ids=["dropout", "no draws"])
def test_random_state_must_not_repeat_in_a_step_that_draws(tmp_path, draws, codes):
    rows = [STEP | {"step": step, "rng": state, "draws": draws} for step, state in enumerate("aba")]
    record = write_run(tmp_path / BASE, [{"step": 3, "rng": "c", "draws": draws}], rows=rows)
    assert codes_of_checks(record) == codes
    assert all(difference.text.startswith("is that of step 0") for difference in check_record(record))


def test_resume_that_restores_a_part_of_a_tensor_lacks_shards(tmp_path):
    began, saved, loaded = (("initial", "w", [0.0, 0.0]), ("parameter", "w", [1.0, 2.0]), ("initial", "w", [1.0, 0.0], 1))
    step = {"losses": [[2.0, None]], "step": 1}
    a = write_run(tmp_path / "a", [step], tensors=[began, saved, ("gradient", "w", [1.0, 1.0], 1)], rows=[STEP])
    b = write_run(tmp_path / "b", [step | {"losses": [[3.0, None]]}], tensors=[loaded, ("gradient", "w", [1.0, 3.0], 1)])
    cause = explain_first(a, b, resumed=True, same_layout=True)
    assert (cause.code, cause.evidence) == ("shards_not_saved", "1 of 2 elements of w have their first value.")


@pytest.mark.parametrize(
    ("events", "code"),
    [
        (["all_reduce", "evaluation", "broadcast"], "metric_of_rank_0"),
        (["evaluation", "all_reduce", "broadcast"], "metric_mean_of_means"),
        (["evaluation", "all_reduce"], "metric_mean_of_means"),
        (["all_reduce", "evaluation"], "metric_mean_of_means"),
    ],
)
def test_metric_that_rank_0_sends_is_its_own_unless_ranks_reduce_it_before(tmp_path, events, code):
    a, b = (write_run(tmp_path / name, [{}], rows=[log(x=x) | {"events": events}]) for name, x in (("a", 1.0), ("b", 2.5)))
    assert first_cause(a, b, 2) == code
