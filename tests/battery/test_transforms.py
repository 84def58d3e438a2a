"""Every transform keeps every contract; and for every contract there is a broken transform that it must detect."""

import inspect
import itertools

import pytest

import dtrain as dt
import public
from battery import contracts
from battery.transforms import BROKEN, ROWS, make
from dtrain.errors import RankError
from sampling import with_sources

IN_BROKEN = {name: contract for name, (contract, _) in BROKEN.items()}


def broken(contract: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("name", [name for name, breaks in IN_BROKEN.items() if breaks == contract])


pytestmark = pytest.mark.sample(3, by="name")
each_row = pytest.mark.parametrize("name", with_sources(ROWS))
alike = pytest.mark.parametrize("name", with_sources({name: row for name, row in ROWS.items() if not row.per_rank}))


def test_every_public_transform_factory_has_a_row():
    makers = {name.rpartition(".")[2] for name in public.all_names() if _returns_transform(public.value(name))}
    assert makers >= {"clip_by_norm", "ema"}
    # It needs a mesh with an axis of its own: see tests/shard/test_context_parallel.py.
    assert makers - {"context_parallel"} == set(itertools.chain.from_iterable(row.of for row in ROWS.values()))


def _returns_transform(value: object) -> bool:
    return inspect.isfunction(value) and inspect.signature(value).return_annotation in ("Transform", dt.Transform)


def test_every_contract_has_a_violating_case():
    assert set(IN_BROKEN.values()) == {
        "resume",
        "never active",
        "ranks",
        "fewer ranks",
        "host syncs",
        "collectives",
        "points",
        "slices",
        "exception",
        "spent",
    }


@each_row
def test_resumed_run_equals_an_uninterrupted_run(name, tmp_path):
    contracts.check_resume_equals_straight(name, str(tmp_path))


@each_row
def test_resumed_run_sharded_on_two_ranks_equals_an_uninterrupted_run(name, tmp_path, ranks):
    assert ranks(2).run(contracts.check_resume_equals_straight, name, str(tmp_path)) == [None, None]


@broken("resume")
def test_resume_contract_detects_violations(name, tmp_path):
    with pytest.raises(AssertionError, match=f"resume: {name}: differs from the straight run at"):
        contracts.check_resume_equals_straight(name, str(tmp_path))


@each_row
def test_never_active_transform_equals_an_absent_one(name):
    contracts.check_never_active_equals_absent(name)


@broken("never active")
def test_absence_contract_detects_violations(name):
    with pytest.raises(AssertionError, match=f"never active: {name}: differs from a run without it at"):
        contracts.check_never_active_equals_absent(name)


@alike
def test_two_ranks_match_one_process(name, ranks):
    contracts.check_ranks_equal_one(name, ranks)


@alike
def test_checkpoint_of_two_ranks_resumes_on_one(name, tmp_path, ranks):
    contracts.check_resumed_by_fewer_ranks(name, str(tmp_path), ranks)


@broken("fewer ranks")
def test_fewer_ranks_contract_detects_violations(name, tmp_path, ranks):
    with pytest.raises(AssertionError, match=f"fewer ranks: {name}: parameters are .* from those of a run by one rank"):
        contracts.check_resumed_by_fewer_ranks(name, str(tmp_path), ranks)


@each_row
def test_transforms_make_only_the_stated_host_syncs(name):
    contracts.check_host_syncs(name)


@broken("host syncs")
def test_host_sync_contract_detects_violations(name):
    with pytest.raises(AssertionError, match=f"host syncs: {name}: 1 a step, 0 are allowed: .*item"):
        contracts.check_host_syncs(name)


@each_row
def test_transform_state_and_compute_stay_sharded(name, ranks):
    assert ranks(2).run(contracts.check_collectives, name) == [None, None]


@broken("collectives")
def test_collective_contract_detects_violations(name, ranks):
    with pytest.raises(RankError, match=f"collectives: {name}: step 0 moves .* bytes"):
        ranks(2).run(contracts.check_collectives, name)


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.points])
def test_transforms_match_reference_numbers(name):
    contracts.check_points(name)


@broken("points")
def test_reference_number_contract_detects_violations(name):
    with pytest.raises(AssertionError, match=f"points: {name}: "):
        contracts.check_points(name)


@broken("ranks")
def test_ranks_contract_detects_violations(name, ranks):
    with pytest.raises(AssertionError, match=f"ranks: {name}: (parameters on two ranks are .* from those|metrics differ)"):
        contracts.check_ranks_equal_one(name, ranks)


def drawn_parameters(name: str) -> list[float]:
    return contracts.trained_numbers(name)["params"]


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.per_rank])
def test_rank_dependent_transforms_differ_between_one_and_two_ranks(name, ranks):
    """Such a row may not be excused from the contract for nothing."""
    assert ranks(1).run(drawn_parameters, name)[0] != pytest.approx(ranks(2).run(drawn_parameters, name)[0], rel=1e-6)


@each_row
def test_transform_states_are_plain_and_keyed_by_name(name):
    contracts.check_slices_are_plain(name)


@broken("slices")
def test_transform_state_contract_detects_violations(name):
    with pytest.raises(AssertionError, match=f"slices: {name}: "):
        contracts.check_slices_are_plain(name)


@each_row
@pytest.mark.parametrize("where", contracts.FAULTS)
def test_exception_in_a_step_does_not_change_the_state(name, where):
    for number in (2, 3):  # of any wrapping in the registry, one of the two is a step in which it acts
        contracts.check_exception_changes_nothing(name, where, number)


@broken("exception")
def test_exception_contract_detects_violations(name):
    with pytest.raises(AssertionError, match=f"exception: {name}: raised in .* of step 2, which left changes at"):
        contracts.check_exception_changes_nothing(name, "before update", 2)


@each_row
def test_stepped_state_is_spent(name, tmp_path):
    contracts.check_spent_state_raises(name, tmp_path)


@broken("spent")
def test_spent_state_contract_detects_violations(name, tmp_path):
    with pytest.raises(AssertionError, match=f"spent: {name}: step took a state that was stepped"):
        contracts.check_spent_state_raises(name, tmp_path)


@each_row
def test_row_factory_returns_a_new_working_transform(name):
    assert make(name) is not make(name)
    assert set(contracts.begun(name)[1].transform_states) == (set() if make(name).read_only else {make(name).name})
