"""Rules that name a cause: each is given records or a tiny loop that it must name, and a right one that it must not."""

import pytest

from dtrain.prove.compare import compare_records
from dtrain.prove.explain import explain
from dtrain.prove.explain_resume import lost_states
from dtrain.prove.run_config import RunConfig, choose_kills
from prove.test_compare import STEP, counter, explain_first, write_run

torch = pytest.importorskip("torch")


def state(step, tensors, norm):
    return {"kind": "optimizer_state", "step": step, "optimizer_index": 0, "tensors": tensors, "norm": repr(norm)}


def run_with_states(folder, *states, step=1):
    """Write a run of one rank for each state (tensors and norm) of the optimizer before ``step``."""
    return write_run(folder, [{"step": step} for _ in states], rows_of_ranks=[[state(step, *one)] for one in states])


@pytest.mark.parametrize(
    ("resumed", "codes", "ranks"),
    [
        ([(4, 0.5), (0, 0.0)], ["state_of_rank_lost"], [(1,)]),
        ([(4, 0.5), (4, 0.7)], ["state_of_rank_lost"], [(1,)]),
        ([(0, 0.0), (0, 0.0)], ["optimizer_not_saved"], [(0, 1)]),
        ([(4, 0.5 * (1 + 1e-12)), (4, 0.3)], [], []),
    ],
    ids=["rank 1 begins again", "state of rank 0", "all begin again", "right"],
)
def test_ranks_whose_state_a_resume_does_not_restore_are_named(tmp_path, resumed, codes, ranks):
    whole = run_with_states(tmp_path / "a", (4, 0.5), (4, 0.3))
    lost = lost_states(run_with_states(tmp_path / "b", *resumed), whole)
    assert [difference.code for difference in lost] == codes
    assert [difference.ranks for difference in lost] == ranks
    if ranks == [(1,)]:
        assert lost[0].text.endswith("instead of 4 with 0.3 on rank 1")


def test_a_run_on_other_ranks_says_nothing_of_lost_states(tmp_path):
    assert lost_states(run_with_states(tmp_path / "b", (0, 0.0)), run_with_states(tmp_path / "a", (4, 0.5), (4, 0.3))) == []


UNMATCHED = {"kind": "note", "step": 0, "optimizer_index": 0, "code": "unmatched", "unexpected": "1 names", "missing": "1"}


@pytest.mark.parametrize(
    ("samples", "tensors", "rows", "code"),
    [
        ("2/b", 3, [], "parameters_not_saved"),
        ("2/b", 0, [], "parameters_not_saved"),
        ("2/b", 3, [UNMATCHED], "names_not_matched"),
        # The first batch and no state of the optimizer: all begins again.
        ("1/a", 0, [], "state_begins_again"),
    ],
    ids=["optimizer goes on", "batches go on", "names with a prefix", "all begins again"],
)
def test_weights_that_begin_again_are_told_from_a_training_that_begins_again(tmp_path, samples, tensors, rows, code):
    began, saved, loaded = ("initial", "w", [1.0]), ("parameter", "w", [2.0]), ("initial", "w", [1.0], 1)
    step = {"losses": [[2.0, 1.0]], "step": 1, "samples": ["2/b"]}
    a = write_run(tmp_path / "a", [step], tensors=[began, saved], rows=[STEP | {"samples": ["1/a"]}])
    changes = step | {"samples": [samples], "losses": [[3.0, 1.0]]}
    b = write_run(tmp_path / "b", [changes], tensors=[loaded], rows=[*rows, state(1, tensors, 1.0)])
    difference = next(one for one in compare_records(a, b, same_layout=True).differences if one.kind == "loss")
    config = RunConfig(name="run", folder="", script="")
    (cause,) = explain(difference, b, a, config, True)
    assert cause.code == code
    assert bool(cause.evidence) == (code != "state_begins_again")


@pytest.mark.parametrize(("again", "code"), [(0.0, "state_not_saved"), (3.0, "ema_not_saved")], ids=["lost", "kept"])
def test_a_count_in_a_closure_explains_another_average(tmp_path, again, code):
    def run(name, mean, *values):
        rows = [row | {"step": 1 + index, "of_closure": True} for index, row in enumerate(counter("n of swa", *values))]
        transform = ("transform", "swa.mean", [mean], 1)
        return write_run(tmp_path / name, [{"step": 1}], rows=[*rows, STEP | {"step": 2}], tensors=[transform])

    a, b = run("a", 2.0, 3.0, 4.0), run("b", 3.0, again, again + 1.0)
    cause = explain_first(a, b, 1, resumed=True, same_layout=True)
    assert cause.code == code
    # A closure may count calls, so that it is no difference by itself.
    assert compare_records(a, run("c", 2.0, again, again + 1.0), same_layout=True).differences == ()


def test_the_second_kill_comes_before_the_last_step(tmp_path):
    saves = [{"kind": "saved", "step": step, "optimizer_index": 0, "path": "x"} for step in (1, 3)]
    record = write_run(tmp_path / "a", [{"step": 3}], rows=[STEP | {"step": step} for step in range(3)] + saves[:1])
    for seed in range(3):
        first, second = choose_kills(record, seed)
        assert 1 <= first <= second == 3
    assert choose_kills(write_run(tmp_path / "b", [{}]), 0) is None


def steps_of_samples(*steps):
    """Rows of a rank's steps: the samples of each."""
    return [STEP | {"step": step, "samples": samples, "losses": [[1.0, None]]} for step, samples in enumerate(steps)]


@pytest.mark.parametrize(
    ("ranks", "code"),
    [
        # The second half of each rank is drawn, and both ranks draw the same.
        (([["1/a", "1/x"], ["1/c", "1/y"]], [["1/b", "1/x"], ["1/d", "1/y"]]), "same_noise_on_ranks"),
        # Shuffles with other seeds have samples in common in some steps, at some places.
        (([["1/a", "1/b"], ["1/c", "1/d"]], [["1/b", "1/c"], ["1/c", "1/a"]]), "sampler_seed_per_rank"),
        (([["1/a", "1/b"], ["1/c", "1/d"]], [["1/a", "1/c"], ["1/d", "1/a"]]), "sampler_seed_per_rank"),
    ],
    ids=["copies at the same places", "at other places", "in one step"],
)
def test_copies_of_drawn_samples_are_told_from_another_shuffle(tmp_path, ranks, code):
    alone = steps_of_samples(["1/a", "1/b", "1/x", "1/z"], ["1/c", "1/d", "1/y", "1/w"])
    a = write_run(tmp_path / "a", [{"step": 2}], rows=alone)
    b = write_run(tmp_path / "b", [{"step": 2}] * 2, rows_of_ranks=[steps_of_samples(*steps) for steps in ranks])
    cause = explain_first(a, b)
    assert (cause.code, bool(cause.evidence)) == (code, code == "same_noise_on_ranks")
    assert cause.shown == (code == "same_noise_on_ranks")


@pytest.mark.parametrize(
    ("states", "code"),
    [
        (("half", "half"), "same_noise_on_ranks"),
        (("whole", "whole"), "sampler_without_rank"),
        (("of 0", "of 1"), "sampler_without_rank"),
    ],
    ids=["one seed", "drawn for the global batch", "a seed of each rank"],
)
def test_a_generator_with_one_state_on_all_ranks_draws_copies(tmp_path, states, code):
    row = {"kind": "variable", "step": 0, "optimizer_index": 0, "name": "noise", "type": "generator", "weights": False}
    a = write_run(tmp_path / "a", [{"samples": ["1/a", "1/b"]}], rows=[row | {"digest": "whole"}])
    rows = [[row | {"digest": digest}] for digest in states]
    cause = explain_first(a, write_run(tmp_path / "b", [{"samples": ["1/a"]}] * 2, rows_of_ranks=rows))
    assert cause.code == code


@pytest.mark.parametrize(
    ("loaded", "means", "draws", "code", "shown"),
    [
        ("1/q", (0.0, 0.0), 0, "samples_interact", True),
        ("1/q", (0.1, 0.2), 0, "samples_interact", False),
        ("1/q", (0.1, 0.2), 1, "augmentation_by_worker", False),
        ("1/r", (0.0, 0.0), 0, "augmentation_by_worker", False),
    ],
    ids=["normalized", "computed", "drawn", "by the loader"],
)
def test_inputs_that_the_script_computes_are_told_from_an_augmentation(tmp_path, loaded, means, draws, code, shown):
    def run(name, *ranks):
        loads = {"kind": "read", "step": 0, "optimizer_index": 0, "loader": "dtrain-0"}
        changes = [
            {
                "samples": samples,
                "fields": {"x": 1, "adv": number},
                "statistics": [{"adv": [mean, 1.0 + number, 2.0 + number, mean]}] * 2,
                "draws": draws,
            }
            for number, (_, samples, mean) in enumerate(ranks, start=len(ranks))
        ]
        return write_run(tmp_path / name, changes, rows_of_ranks=[[loads | {"samples": read}] for read, *_ in ranks])

    a = run("a", (["1/q", "2/p"], ["1/a", "2/b"], 0.0))
    b = run("b", (["2/p"], ["2/c"], means[0]), ([loaded], ["1/d"], means[1]))
    cause = explain_first(a, b)
    assert (cause.code, cause.shown) == (code, shown)
    if shown:
        assert cause.evidence == "The mean of adv is 0 over the samples of each rank, in both runs and all steps."


@pytest.mark.parametrize(
    ("columns", "last", "codes"),
    [
        (["c", "d"], 1, ["positions_restart"]),
        (["c", "d"], 3, ["sequence_part_alone", "sequence_mask_lost", "loss_weighting"]),
        (["c", "e"], 1, ["loss_weighting"]),
    ],
    ids=["no gradient in the last rows", "gradient in all rows", "other samples"],
)
def test_ranks_with_parts_of_the_columns_share_sequences(tmp_path, columns, last, codes):
    def run(name, ranks, last):
        # A table whose sketch does not have the size of the table.
        table = torch.zeros(4, 1024, dtype=torch.float64)
        table[: last + 1] = 1.0
        return write_run(tmp_path / name, ranks, tensors=[("gradient", "position", table.tolist())])

    whole = {"samples": ["1/a"], "columns": ["c", "d"], "losses": [[2.0, 1.0]]}
    parts = [whole | {"samples": [f"1/{column}"], "columns": [column], "losses": [[1.0, 1.0]]} for column in columns]
    a, b = run("a", [whole], 3), run("b", parts, last)
    difference = next(one for one in compare_records(a, b, same_layout=False, kinds=("loss",)).differences)
    config = RunConfig(name="run", folder="", script="", ranks=2)
    causes = explain(difference, b, a, config, False)
    assert [cause.code for cause in causes] == codes
    assert causes[0].shown == (len(codes) == 1)
