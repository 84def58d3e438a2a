"""Rules that name a cause: each is given records or a tiny loop that it must name, and a right one that it must not."""

import copy

import pytest

from dtrain.prove.checks import check_record
from dtrain.prove.compare import compare_records
from dtrain.prove.explain import explain
from dtrain.prove.explain_resume import lost_states
from dtrain.prove.run_config import RunConfig, choose_kills
from dtrain.prove.run_log import RunLog, StepFacts
from dtrain.prove.run_records import read_record
from dtrain.prove.script_values import ScriptModels
from prove.test_compare import STEP, counter, explain_first, first_cause, write_run

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


@pytest.mark.parametrize(
    ("ranks", "code"),
    [
        (((0.5, 0.5), (0.25, 0.25)), "clip_local_norm"),
        # The bias is not scaled.
        (((0.5, 1.0), (0.25, 1.0)), "gradient_not_reduced"),
        (((0.5, 0.5), (0.25, 0.3)), "gradient_not_reduced"),
    ],
    ids=["a factor of each rank", "a factor of one parameter", "another factor of one parameter"],
)
def test_ranks_that_scale_the_whole_gradient_have_reduced_it(tmp_path, ranks, code):
    gradients = {"weight": [1.0, -2.0, 3.0, 0.0], "bias": [4.0, 5.0]}
    whole = write_run(tmp_path / "a", [{}], tensors=[("gradient", name, values) for name, values in gradients.items()])
    scaled = [
        [
            ("gradient", name, [factor * value for value in values])
            for (name, values), factor in zip(gradients.items(), factors, strict=True)
        ]
        for factors in ranks
    ]
    record = write_run(tmp_path / "b", [{"samples": ["1/a"]}, {"samples": ["2/b"]}], of_ranks=scaled)
    (difference,) = check_record(record)
    config = RunConfig(name="run", folder="", script="", ranks=2)
    (cause,) = explain(difference, record, whole, config, False)
    assert (cause.code, cause.shown) == (code, True)
    assert cause.evidence.endswith("0.5 on rank 0 and 0.25 on rank 1.") == (code == "clip_local_norm")


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


@pytest.mark.parametrize(
    ("resumed", "code", "evidence"),
    [
        (["1/a", "2/b", "9/z"], "data_repeated_after_resume", "2 of 3 samples are those of an earlier step of the other run."),
        (["5/e", "6/f", "9/z"], "data_skipped_after_resume", "2 of 3 samples are those of a later step of the other run."),
        (["7/q", "8/r", "9/z"], "data_skipped_after_resume", ""),
    ],
    ids=["earlier", "later", "of no step"],
)
def test_other_batches_after_a_resume_are_a_fact_only_if_they_are_those_of_other_steps(tmp_path, resumed, code, evidence):
    rows = [
        STEP | {"step": step, "samples": samples}
        for step, samples in enumerate((["1/a", "2/b"], ["3/c", "4/d"], ["5/e", "6/f"]))
    ]
    a = write_run(tmp_path / "a", [{"step": 3}], rows=rows)
    b = write_run(tmp_path / "b", [{"step": 1, "samples": resumed}])
    cause = explain_first(a, b, 1, resumed=True, same_layout=True)
    assert (cause.code, cause.shown, cause.evidence) == (code, bool(evidence), evidence)


@pytest.mark.parametrize(
    ("batches", "code", "shown"),
    [
        ([["1/a", "2/b"], ["3/c", "3/c"]], "evaluation_counts_twice", True),
        ([["1/a"], ["3/c"]], "evaluation_drops_tail", True),
        ([["1/a", "1/a"], ["3/c"]], "evaluation_drops_tail", False),
    ],
    ids=["twice", "left out", "both"],
)
def test_an_evaluation_of_other_samples_has_no_cause_for_certain(tmp_path, batches, code, shown):
    row = {"kind": "evaluation", "step": 0, "optimizer_index": 0}
    a = write_run(tmp_path / "a", [{}], rows=[row | {"batches": [["1/a", "2/b", "3/c"]]}])
    b = write_run(tmp_path / "b", [{}] * 2, rows_of_ranks=[[row | {"batches": [own]}] for own in batches])
    cause = explain_first(a, b)
    assert (cause.code, cause.shown) == (code, shown)


@pytest.mark.parametrize(
    ("backwards", "factor", "code"),
    [((4, 2), 0.5, "accumulation_not_scaled"), ((1, 1), 0.5, "gradient_scaled_by_ranks"), ((1, 1), 0.3, "local_loss_count")],
    ids=["microbatches", "ranks", "another factor"],
)
def test_a_common_factor_of_loss_and_gradient_is_that_of_its_number(tmp_path, backwards, factor, code):
    a = write_run(tmp_path / "a", [{"losses": [[2.0, None]], "backwards": backwards[0]}], gradient=[1.0, 3.0])
    ranks = [{"losses": [[2.0 * factor * 0.9, None]], "backwards": backwards[1]}] * 2
    b = write_run(tmp_path / "b", ranks, gradient=[factor, 3.0 * factor])
    assert first_cause(a, b) == code


# ---- mistakes that one run shows ----


def codes(tmp_path, rows, **changes):
    return [difference.code for difference in check_record(write_run(tmp_path / "run", [changes], rows=rows))]


def read_pass(number, order="a", *, loader=0, repeats=True, epoch=0, shuffle=False, **changes):
    row = {"kind": "pass", "step": 0, "optimizer_index": 0, "loader": loader, "number": number, "sampler": "S", "epoch": epoch}
    row |= {"seed": 0, "shuffle": shuffle, "order": order, "repeats": repeats, "ordered_by": "S", "workers": 2, "grad": True}
    return row | changes


TRAINS, OVER = STEP | {"loaders": [0]}, {"is_over": True}


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        ([read_pass(0), TRAINS, read_pass(1), TRAINS], True),
        ([read_pass(0), TRAINS, read_pass(1, **OVER)], True),
        ([read_pass(0), TRAINS, read_pass(1, "b"), TRAINS], False),
        ([read_pass(0, repeats=False), TRAINS, read_pass(1, repeats=False), TRAINS], False),
        ([read_pass(0), TRAINS, read_pass(1, loader=1), TRAINS], False),
        # An evaluation on the samples of training, between two epochs and behind the last one.
        ([read_pass(0), TRAINS, read_pass(1), read_pass(2, "b"), TRAINS], False),
        ([read_pass(0), TRAINS, read_pass(1, grad=False, **OVER)], False),
        ([read_pass(0, shuffle=True), TRAINS, read_pass(1, "b", shuffle=True), TRAINS], True),
    ],
    ids=[
        "one order",
        "after the last step",
        "other orders",
        "no shuffle",
        "two loaders",
        "an evaluation",
        "an evaluation at the end",
        "one epoch of a known sampler",
    ],
)
def test_an_order_that_repeats_is_found(tmp_path, rows, found):
    assert codes(tmp_path, rows, step=1, loaders=[7]) == ["shuffle_without_epoch"] * found


@pytest.mark.parametrize(
    ("batches", "found"),
    [("aabb", True), ("aab", True), ("abcd", False), ("aabc", False), ("aaaa", False), ("aa", False)],
    ids=["copies", "a round and a half", "shares", "once by chance", "one batch", "too few"],
)
def test_workers_that_read_the_same_are_found(tmp_path, batches, found):
    read = {"kind": "read", "step": 0, "optimizer_index": 0, "loader": "loader-0", "number": 0}
    rows = [read_pass(0), *(read | {"samples": [f"1/{batch}", f"2/{batch}"]} for batch in batches)]
    assert codes(tmp_path, rows, loaders=[0]) == ["workers_read_the_same"] * found


class Shuffled:
    """A sampler whose order is that of its epoch, which ``advances`` after each pass, or is not."""

    def __init__(self, kind):
        self.kind, self.epoch = kind, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        seed = 0 if self.kind == "sorted" else self.epoch
        generator = None if self.kind == "global" else torch.Generator().manual_seed(seed)
        yield from torch.randperm(12, generator=generator).tolist()
        self.epoch += self.kind == "advances"


@pytest.mark.parametrize(("kind", "repeats"), [("epoch", True), ("advances", False), ("sorted", False), ("global", False)])
def test_copies_of_a_sampler_show_if_it_needs_the_epoch(kind, repeats):
    from dtrain.prove.plain_loop import describe_pass

    sampler, state = Shuffled(kind), torch.get_rng_state()
    loader = torch.utils.data.DataLoader(range(12), batch_sampler=torch.utils.data.BatchSampler(sampler, 4, drop_last=True))
    row = describe_pass(loader, with_order=True)
    assert (row["repeats"], row["ordered_by"]) == (repeats, "Shuffled")
    assert (sampler.epoch, torch.equal(state, torch.get_rng_state())) == (0, True)
    assert "order" not in describe_pass(loader, with_order=False)


class Recorder:
    """The part of a recorder that the observers of a loop use."""

    def __init__(self, folder):
        self.config, self.log, self.folder = RunConfig(name="run", folder="", script=""), RunLog(folder, 0), folder
        self.facts, self.models, self.optimized, self.updates = StepFacts(), ScriptModels(None), set(), 0

    def updates_of(self, module):
        return self.updates

    def note(self, code, **content):
        self.log.write("note", code=code, **content)

    def rows(self, kind):
        return read_record("run", self.folder).rows(kind)


@pytest.fixture
def recorder(tmp_path, monkeypatch):
    for owner, name in (
        (torch.nn.utils, "clip_grad_norm_"),
        (torch.nn.Module, "state_dict"),
        (torch.nn.Module, "load_state_dict"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    recorder = Recorder(tmp_path)
    yield recorder
    recorder.log.close()


@pytest.mark.parametrize(
    ("clips", "zeroes", "limit", "found"),
    [
        ((True, True), False, 0.1, True),
        ((True, False), False, 0.1, True),
        ((False, True), False, 0.1, False),
        ((True, True), True, 0.1, False),
        ((True, True), False, float("inf"), False),
        ((True, True), False, 1e6, False),
    ],
    ids=["each microbatch", "the first", "once", "other steps", "measures", "no limit"],
)
def test_a_gradient_that_is_clipped_before_a_further_backward_is_found(recorder, clips, zeroes, limit, found):
    from dtrain.prove.plain_loop import EarlyClips

    observer, model = EarlyClips(recorder), torch.nn.Linear(4, 2)
    optimizer, other = torch.optim.SGD(model.parameters(), lr=0.1), torch.nn.Linear(2, 2)
    for clip in clips:
        observer.backward_begins()
        recorder.facts.backwards += 1
        other(model(torch.ones(3, 4))).square().sum().backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
        if zeroes:
            optimizer.zero_grad(set_to_none=False)
    observer.update_begins(optimizer)
    rows = recorder.rows("early_clip")
    assert [(row["after"], row["backwards"]) for row in rows] == [(1, 2)] * found
    # The next step begins without the clip of this one.
    observer.backward_begins()
    model(torch.ones(3, 4)).sum().backward()
    observer.update_begins(optimizer)
    assert len(recorder.rows("early_clip")) == found


class TaskWeights(torch.nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.weights = torch.nn.Parameter(torch.ones(2))
        self.layers = torch.nn.Linear(2, 2) if layers else None

    def forward(self, losses):
        return (self.weights * (losses if self.layers is None else self.layers(losses))).sum()


@pytest.mark.parametrize(
    ("layers", "optimized", "grad", "found"),
    [(False, False, True, True), (False, True, True, False), (True, False, True, False), (False, False, False, False)],
    ids=["lost", "in an optimizer", "a network of its own", "frozen"],
)
def test_parameters_of_a_loss_that_no_optimizer_has_are_found(recorder, layers, optimized, grad, found):
    from dtrain.prove.plain_loop import Criteria

    criteria, criterion, model = Criteria(recorder), TaskWeights(layers).requires_grad_(grad), torch.nn.Linear(2, 2)
    for module in (model, criterion):
        recorder.models.add(module)
    recorder.optimized.update(map(id, (*model.parameters(), *(criterion.parameters() if optimized else ()))))
    loss = criterion(model(torch.ones(2)))
    criteria.called(model, model(torch.ones(2)))
    criteria.called(criterion, loss)
    loss.backward()
    criteria.update_begins()
    recorder.log.write(
        "step", **{name: value for name, value in STEP.items() if name not in ("kind", "step", "optimizer_index")}
    )
    record = read_record("run", recorder.folder)
    assert [(one.code, one.name) for one in check_record(record)] == [
        ("loss_parameter_not_trained", "TaskWeights.weights")
    ] * found


@pytest.mark.parametrize(
    ("keep", "used_at", "found"),
    [
        (lambda model: model.state_dict(), 3, True),
        (lambda model: {"model": model.state_dict(), "step": 1}, 3, True),
        (lambda model: {name: tensor.clone() for name, tensor in model.state_dict().items()}, 3, False),
        (lambda model: copy.deepcopy(model.state_dict()), 3, False),
        (lambda model: model.state_dict(), 1, False),
    ],
    ids=["kept", "in a checkpoint", "cloned", "copied", "of this step"],
)
def test_a_kept_state_dict_that_updates_have_changed_is_found(recorder, keep, used_at, found):
    from dtrain.prove.plain_loop import KeptWeights

    kept, model = KeptWeights(recorder), torch.nn.Sequential(torch.nn.Linear(2, 2))
    before = model.state_dict()
    recorder.updates = 1
    best = keep(model)
    recorder.updates = used_at
    kept.used(best, "best.pt")
    # A state dict from before the first step follows the model on purpose.
    kept.used(before, "last.pt")
    rows = recorder.rows("stale_weights")
    assert [(row["taken"], row["used"], row["place"]) for row in rows] == [(1, 3, "best.pt")] * found
    if found and "step" not in best:
        model.load_state_dict(best)
        assert recorder.rows("stale_weights")[-1]["place"] == "load_state_dict"


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (lambda weights: {f"_orig_mod.{name}": tensor for name, tensor in weights.items()}, True),
        # The head of another task.
        (lambda weights: {"0.weight": weights["0.weight"], "head.weight": weights["0.bias"]}, False),
        (lambda weights: weights, False),
    ],
    ids=["prefix", "a part", "all"],
)
def test_names_with_another_prefix_that_a_load_passes_over_are_noted(recorder, names, found):
    from dtrain.prove.plain_loop import observe_names

    observe_names(recorder)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    model.load_state_dict(names(model.state_dict()), strict=False)
    noted = [(row["unexpected"], row["missing"]) for row in recorder.rows("note")]
    assert noted == [("2 names, as _orig_mod.0.weight", "2, as 0.weight")] * found
