"""Correct scripts get no objection, and the mistake beside each of them keeps its own."""

import pytest

from dtrain.prove.checks import check_record
from dtrain.prove.compare import compare_records
from dtrain.prove.parts import find_parts, join_parts
from dtrain.prove.run_log import field_digests, sample_hashes
from prove.test_compare import write_run

torch = pytest.importorskip("torch")


def kinds(reference, record):
    return [difference.kind for difference in compare_records(reference, record, same_layout=False).differences]


def codes(record):
    return [difference.code for difference in check_record(record)]


# ---- a gradient that is only rounding ----


def noisy(folder, noise, bias, rate=0.01):
    facts = [("gradient", "weight", [1.0, 2.0]), ("gradient", "key.bias", noise)]
    facts += [("parameter", "weight", [1.0, 2.0]), ("parameter", "key.bias", bias)]
    return write_run(folder, [{"lr": [rate]}], tensors=facts)


@pytest.mark.parametrize(
    ("noise", "bias", "found"),
    [
        pytest.param([3e-17, -2e-17], [-0.01, 0.01], [], id="rounding that Adam enlarges to the learning rate"),
        pytest.param([3e-17, -2e-17], [0.5, 0.01], ["parameter"], id="more than updates reach"),
        pytest.param([1e-9, 2e-9], [-0.01, 0.01], ["gradient", "parameter"], id="a small gradient"),
        pytest.param([2e-17, 2e-17], [-0.01, 0.01], ["parameter"], id="an equal gradient"),
    ],
)
def test_update_by_a_gradient_of_rounding_is_equal_up_to_the_learning_rate(tmp_path, noise, bias, found):
    first = noisy(tmp_path / "a", [2e-17, 2e-17], [0.01, -0.01])
    assert kinds(first, noisy(tmp_path / "b", noise, bias)) == found


# ---- an optimizer that reduces gradients ----


@pytest.mark.parametrize(
    ("after", "found", "differs"),
    [
        pytest.param([[0.5], [0.5]], [], [], id="in its step"),
        pytest.param([[0.5], [0.6]], ["gradient_not_reduced"], ["gradient"], id="nowhere"),
        pytest.param([[0.7], [0.7]], [], ["parameter"], id="wrongly"),
    ],
)
def test_gradient_that_the_optimizer_reduces_is_judged_by_the_update(tmp_path, after, found, differs):
    samples = ["1/a", "2/b"]
    whole = write_run(tmp_path / "a", [{"samples": samples}], gradient=[2.0], tensors=[("parameter", "weight", [0.5])])
    parts = [{"samples": samples[:1]}, {"samples": samples[1:]}]
    record = write_run(
        tmp_path / "b", parts, gradient=[[1.0], [3.0]], of_ranks=[[("parameter", "weight", own)] for own in after]
    )
    assert codes(record) == found
    assert kinds(whole, record) == differs
    said = compare_records(whole, record, same_layout=False).not_seen
    assert [text.split(" in its own")[0] for text in said] == ["The optimizer reduces the gradient of weight"] * (not found)


# ---- tensors of several sources in one batch ----

X, POOL = torch.arange(12.0).reshape(6, 2), torch.arange(100.0, 118.0).reshape(9, 2)


def paired(folder, parts, *, loaded=True, gradient=(1.0,)):
    """Write a run whose ranks have rows of ``X`` and of ``POOL``; ``loaded`` if a loader has read those of ``X``."""
    rows = []
    for own, added in parts:
        batch = {"x": X[own], "pool": POOL[added]}
        source = {"loaded": sample_hashes([X[own]])} if loaded else {}
        rows.append({"samples": sample_hashes(batch), "fields": field_digests(batch), **source})
    return write_run(folder, rows, gradient=list(gradient))


@pytest.mark.parametrize("size", [6, 9], ids=["as many rows", "another number of rows"])
def test_tensors_of_two_sources_may_be_paired_in_another_way(tmp_path, size):
    whole = paired(tmp_path / "a", [(range(6), range(size))])
    record = paired(tmp_path / "b", [(range(3), range(0, size, 2)), (range(3, 6), range(1, size, 2))])
    assert kinds(whole, record) == []


@pytest.mark.parametrize("loaded", [True, False], ids=["a loader and a pool", "tensors of the script"])
def test_rows_of_a_pool_that_are_missing_are_named(tmp_path, loaded):
    whole = paired(tmp_path / "a", [(range(6), range(6))], loaded=loaded)
    record = paired(tmp_path / "b", [(range(3), range(3)), (range(3, 6), range(3))], loaded=loaded)
    assert kinds(whole, record) == ["samples"]


@pytest.mark.parametrize(("gradient", "found"), [((1.0,), []), ((2.0,), ["samples", "gradient"])])
def test_another_pairing_of_one_source_counts_if_the_gradient_differs(tmp_path, gradient, found):
    whole = paired(tmp_path / "a", [(range(6), range(6))], loaded=False)
    parts = [([0, 1, 2], [3, 4, 5]), ([3, 4, 5], [0, 1, 2])]
    assert kinds(whole, paired(tmp_path / "b", parts, loaded=False, gradient=gradient)) == found


def test_tensor_that_all_ranks_share_may_stand_beside_shares(tmp_path):
    whole = paired(tmp_path / "a", [(range(6), range(9))])
    record = paired(tmp_path / "b", [(range(3), range(9)), (range(3, 6), range(9))])
    assert kinds(whole, record) == []


# ---- a model that each rank trains for itself ----


def trained_alone(folder, ranks, *, alone=True, shares=True, samples=("1/a", "2/b")):
    """Write a run whose first optimizer trains on all ``samples`` on each rank, and whose second one has shares of them."""
    teacher = [{"samples": list(samples), "alone": alone}] * ranks
    student = [{"samples": ["3/c", "4/d", "5/e", "6/f"][rank::ranks]} for rank in range(ranks)]
    rows = [[{**STUDENT, **own}] * shares for own in student]
    return write_run(folder, teacher, rows_of_ranks=rows)


STUDENT = {"kind": "step", "step": 0, "optimizer_index": 1, "losses": [], "forwards": 1, "backwards": 1, "modules": ""}
STUDENT |= {
    "ties": [],
    "events": [],
    "rng": "r",
    "draws": 0,
    "epochs": [],
    "shapes": [],
    "lr": [0.1],
    "fields": {},
    "lines": {},
}


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        pytest.param({}, [], id="alone"),
        pytest.param({"alone": False}, ["samples"], id="ranks reduce gradients"),
        pytest.param({"shares": False}, ["samples"], id="no optimizer has shares"),
        pytest.param({"samples": ["1/a"]}, ["samples"], id="a part of the samples"),
    ],
)
def test_model_that_each_rank_trains_for_itself_may_have_all_samples(tmp_path, changes, found):
    whole = trained_alone(tmp_path / "a", 1)
    assert kinds(whole, trained_alone(tmp_path / "b", 2, **changes)) == found


# ---- optimizers that only some ranks have ----

CODEC, NET = {"optimizer": "Adam", "signature": "Adam/1"}, {"optimizer": "SGD", "signature": "SGD/2"}


def of_optimizers(folder, ranks):
    """Write a run whose ranks have optimizers, each with its name, the name of a parameter, its gradient and the updates."""
    rows = []
    for optimizers in ranks:
        rows.append([])
        for number, (kind, name, samples, updates) in enumerate(optimizers):
            own = {"kind": "optimizer", "step": 0, "optimizer_index": number, "params": 1, "unknown": [], "names": [name]}
            rows[-1].append(own | kind)
            rows[-1] += [STUDENT | {"optimizer_index": number, "step": step, "samples": samples} for step in range(updates)]
    return write_run(folder, [{"kind": "end", "cpu_s": 0.0}] * len(ranks), rows_of_ranks=rows)


@pytest.mark.parametrize("probe", [False, True], ids=["before the loop", "after the loop, of the same class and shapes"])
@pytest.mark.parametrize(("rank_1", "found"), [(["2/b"], []), (["1/a"], ["samples"])], ids=["shares", "the same samples"])
def test_model_that_rank_0_trains_for_all_ranks_counts_once(tmp_path, probe, rank_1, found):
    def optimizers(samples, *, alone):
        own = (CODEC, "weight", ["8/x", "9/y"], 2) if not probe else (NET, "probe.weight", ["8/x", "9/y"], 5)
        others = [(NET, "net.weight" if alone and not probe else "weight", samples, 2)]
        return ([*others, own] if probe else [own, *others]) if alone else others

    whole = of_optimizers(tmp_path / "a", [optimizers(["1/a", "2/b"], alone=True)])
    record = of_optimizers(tmp_path / "b", [optimizers(["1/a"], alone=True), optimizers(rank_1, alone=False)])
    assert kinds(whole, record) == found * 2
    names = [row["names"] for rows in record.ranks for row in rows if row["kind"] == "optimizer" and row["optimizer"] == "SGD"]
    assert names[0] == names[-1]


# ---- parts of tensors ----

WHOLE = torch.arange(1.0, 73.0, dtype=torch.float64).reshape(12, 6)
GRADIENT = WHOLE.sin()


def held(folder, values, gradients, *, name="weight"):
    """Write a run whose ranks hold these values of a tensor, and these gradients."""
    facts = [
        [("initial", name, own.tolist()), ("gradient", name, gradient.tolist()), ("parameter", name, (own - gradient).tolist())]
        for own, gradient in zip(values, gradients, strict=True)
    ]
    return write_run(folder, [{}] * len(values), of_ranks=facts)


def of_heads(tensor, rank, ranks):
    """Return the rows of a rank's queries, keys and values."""
    return tensor.reshape(3, ranks, -1, 6)[:, rank].reshape(-1, 6)


LAYOUTS = {
    "rows": (2, lambda tensor, rank: tensor.chunk(2)[rank]),
    "columns": (3, lambda tensor, rank: tensor.chunk(3, 1)[rank]),
    "each third row": (3, lambda tensor, rank: tensor[rank::3]),
    "each fifth row, unequal": (5, lambda tensor, rank: tensor[rank::5]),
    "unequal rows": (
        5,
        lambda tensor, rank: tensor.chunk(5)[min(rank, 3)] if rank < 3 else tensor[9:][:2] if rank == 3 else tensor[11:],
    ),
    "queries, keys and values": (2, lambda tensor, rank: of_heads(tensor, rank, 2)),
    "elements": (2, lambda tensor, rank: tensor.flatten().chunk(2)[rank]),
    "padded elements": (5, lambda tensor, rank: torch.nn.functional.pad(tensor.flatten(), (0, 3)).chunk(5)[rank]),
    "rows, two copies": (4, lambda tensor, rank: tensor.chunk(2)[rank % 2]),
    "rows, copies beside each other": (4, lambda tensor, rank: tensor.chunk(2)[rank // 2]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("initial", ["drawn", "zeros"])
def test_parts_are_put_together(tmp_path, layout, initial):
    ranks, take = LAYOUTS[layout]
    values = WHOLE if initial == "drawn" else 0 * WHOLE
    whole = held(tmp_path / "a", [values], [GRADIENT])
    own = [[take(tensor, rank) for rank in range(ranks)] for tensor in (values, GRADIENT, 2 * GRADIENT)]
    runs = [held(tmp_path / name, own[0], gradients) for name, gradients in (("b", own[1]), ("c", own[2]))]
    right, scaled = (join_parts(run, find_parts(run, whole)) for run in runs)
    assert kinds(whole, right) == []
    assert codes(right) == []
    assert kinds(whole, scaled) == ["gradient", "parameter"]


def test_copies_of_a_part_must_have_one_gradient(tmp_path):
    whole = held(tmp_path / "a", [WHOLE], [GRADIENT])
    parts = [tensor.chunk(2)[rank % 2] for tensor in (WHOLE, GRADIENT) for rank in range(4)]
    parts[7] = 2 * parts[7]
    record = held(tmp_path / "b", parts[:4], parts[4:])
    assert codes(join_parts(record, find_parts(record, whole))) == ["gradient_not_reduced"]


def test_parts_that_ranks_draw_for_themselves_are_not_compared(tmp_path):
    whole = held(tmp_path / "a", [WHOLE], [GRADIENT])
    record = held(tmp_path / "b", list((WHOLE + 1).chunk(2)), list(GRADIENT.chunk(2)))
    parts = find_parts(record, whole)
    assert "parts of weight that are not in the tensor of 1 rank" in parts.remark()
    joined = join_parts(record, parts)
    assert codes(joined) == kinds(whole, joined) == []


def experts(folder, ranks, *, own=True, scale=1.0):
    """Write a run of four experts, of which each rank holds its share under names from 0; without ``own``, it draws them."""
    facts = []
    for rank in range(ranks):
        facts.append([])
        for place in range(4 // ranks):
            number = rank * (4 // ranks) + place
            weight = WHOLE[number] if own else WHOLE[number] + 100 * rank
            values = {"weight": (weight, scale * GRADIENT[number]), "bias": (0 * WHOLE[0], GRADIENT[number + 4])}
            for name, (value, gradient) in values.items():
                facts[-1].append(("initial", f"experts.{place}.{name}", value.tolist()))
                facts[-1].append(("gradient", f"experts.{place}.{name}", gradient.tolist()))
    return write_run(folder, [{}] * ranks, of_ranks=facts)


def test_experts_of_a_rank_are_compared_under_the_names_of_one_rank(tmp_path):
    whole = experts(tmp_path / "a", 1)
    right, scaled = (experts(tmp_path / f"of {scale}", 2, scale=scale) for scale in (1.0, 2.0))
    right, scaled = (join_parts(run, find_parts(run, whole)) for run in (right, scaled))
    assert codes(right) == kinds(whole, right) == []
    assert len(right.of_kind("gradient")) == 8
    assert kinds(whole, scaled) == ["gradient"] * 4


def test_experts_that_ranks_draw_for_themselves_are_not_compared(tmp_path):
    whole, record = experts(tmp_path / "a", 1), experts(tmp_path / "b", 2, own=False)
    parts = find_parts(record, whole)
    assert parts.unknown


def test_whole_weights_that_differ_between_ranks_are_no_parts(tmp_path):
    whole = held(tmp_path / "a", [WHOLE], [GRADIENT])
    record = held(tmp_path / "b", [WHOLE, WHOLE + 1], [GRADIENT, GRADIENT])
    assert find_parts(record, whole) is None
    assert codes(record) == ["weights_differ_between_ranks"]


# ---- an update that the script completes after the optimizer's step ----


@pytest.mark.parametrize(
    ("after", "changed", "found"),
    [
        pytest.param([1.0, 2.0], [2.0, 2.0], [], id="a broadcast from the rank of a parameter"),
        pytest.param([1.0, 2.0], [3.0, 3.0], ["parameter"], id="another value"),
        pytest.param([1.0, 2.0], [1.0, 2.0], ["parameter"], id="nothing"),
        pytest.param([3.0, 3.0], [2.0, 2.0], ["parameter"], id="a change of equal parameters"),
    ],
)
def test_update_is_compared_after_the_script_has_completed_it(tmp_path, after, changed, found):
    whole = write_run(tmp_path / "a", [{}], tensors=[("parameter", "weight", [2.0])])
    facts = [[("parameter", "weight", [a]), ("changed", "weight", [b])] for a, b in zip(after, changed, strict=True)]
    assert kinds(whole, write_run(tmp_path / "b", [{}, {}], of_ranks=facts)) == found


@pytest.mark.parametrize(("last", "found"), [([2.0], []), ([1.0], ["optimizer_before_sharding"])], ids=["moves", "stays"])
def test_optimizer_of_copies_trains_the_model_if_the_model_changes(tmp_path, last, found):
    optimizer = {"kind": "optimizer", "step": 0, "optimizer_index": 0, "optimizer": "Adam", "params": 1, "unknown": [0]}
    tensors = [("initial", "weight", [1.0]), ("parameter", "weight", last)]
    assert codes(write_run(tmp_path / "a", [{}], tensors=tensors, rows=[optimizer])) == found
