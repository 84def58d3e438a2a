"""Every edit of a model keeps every contract; and for every contract there is a broken edit that it must detect."""

import importlib
import inspect
import itertools
import pkgutil

import pytest
import torch
from torch import nn

import dtrain.surgery
from battery import surgery_contracts as contracts
from battery.surgery import BROKEN, ROWS
from sampling import with_sources

pytestmark = pytest.mark.sample(3, by="name")
each_row = pytest.mark.parametrize("name", with_sources(ROWS))
BY_CONTRACT = {contract: [name for name, (breaks, _) in BROKEN.items() if breaks == contract] for contract in contracts.CHECKS}


def broken(contract: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("name", BY_CONTRACT[contract])


def edits() -> set[str]:
    """Return the public functions of the package that take a model and return a model."""
    names = set()
    for info in pkgutil.walk_packages(dtrain.surgery.__path__, "dtrain.surgery."):
        module = importlib.import_module(info.name)
        for name, value in vars(module).items():
            if inspect.isfunction(value) and value.__module__ == info.name and name in dtrain.surgery.__all__:
                signature = inspect.signature(value)
                first = next(iter(signature.parameters.values()), None)
                if first is not None and first.name == "model" and signature.return_annotation in ("nn.Module", nn.Module):
                    names.add(name)
    return names


def test_every_edit_has_a_row():
    assert edits() >= {"blur_pool", "stochastic_depth"}
    assert edits() == set(itertools.chain.from_iterable(row.of for row in ROWS.values()))


def test_every_edit_has_a_numeric_case():
    assert edits() == set(itertools.chain.from_iterable(row.of for row in ROWS.values() if row.points is not None))


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.points is not None])
def test_edited_models_match_reference_numbers(name):
    points = ROWS[name].points()
    assert len(points) >= 2, "one point may be right by chance"
    for got, expected in points:
        torch.testing.assert_close(torch.as_tensor(got), torch.as_tensor(expected), rtol=1e-6, atol=1e-6, check_dtype=False)


def test_every_contract_has_a_violating_case():
    assert [contract for contract, names in BY_CONTRACT.items() if not names] == []


@each_row
def test_report_matches_the_changes_named_in_the_row(name):
    contracts.check_report(name)


@broken("report")
def test_report_contract_detects_violations(name):
    with pytest.raises(AssertionError, match=f"report: {name}: changed"):
        contracts.check_report(name)


@each_row
def test_model_without_matching_modules_is_refused(name):
    contracts.check_raises_when_nothing_fits(name)


@broken("nothing fits")
def test_no_match_contract_detects_violations(name):
    with pytest.raises(AssertionError, match=f"nothing fits: {name}: found nothing to do"):
        contracts.check_raises_when_nothing_fits(name)


def test_a_sharded_model_is_refused(ranks):
    said = dict(zip(ROWS, ranks(1).run(contracts.refused_all, list(ROWS))[0], strict=True))
    assert [name for name, words in said.items() if "sharded already" not in words] == []


@broken("sharded")
def test_sharded_contract_detects_violations(name, ranks):
    with pytest.raises(AssertionError, match=f"sharded: {name}: took a model"):
        contracts.check_refuses_sharded(name, ranks)


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if not row.per_rank])
def test_two_ranks_match_one_process(name, ranks):
    contracts.check_ranks_equal_one(name, ranks)


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.per_rank])
def test_excused_edits_differ_between_one_and_two_ranks(name, ranks):
    assert ranks(1).run(contracts.trained_numbers, name)[0] != pytest.approx(
        ranks(2).run(contracts.trained_numbers, name)[0], rel=1e-6
    )


@broken("ranks")
def test_ranks_contract_detects_violations(name, ranks):
    with pytest.raises(AssertionError, match=f"ranks: {name}: parameters on two ranks are"):
        contracts.check_ranks_equal_one(name, ranks)


@each_row
def test_checkpoint_of_two_ranks_resumes_on_one(name, tmp_path, ranks):
    contracts.check_resumed_by_fewer_ranks(name, str(tmp_path), ranks)


@broken("fewer")
def test_fewer_ranks_contract_detects_violations(name, tmp_path, ranks):
    with pytest.raises(AssertionError, match=f"fewer: {name}: continued by one rank it ends"):
        contracts.check_resumed_by_fewer_ranks(name, str(tmp_path), ranks)


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
def test_edited_forward_adds_no_host_sync(name):
    contracts.check_no_host_sync(name)


@broken("syncs")
def test_host_sync_contract_detects_violations(name):
    with pytest.raises(AssertionError, match=f"syncs: {name}: waits 1 times more"):
        contracts.check_no_host_sync(name)


@each_row
def test_edit_keeps_unchanged_parameters_and_names(name):
    contracts.check_what_stays_is_kept(name)


@broken("kept")
def test_kept_parameters_contract_detects_violations(name):
    with pytest.raises(AssertionError, match=f"kept: {name}: "):
        contracts.check_what_stays_is_kept(name)


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.meta])
def test_an_edited_meta_model_materializes(name):
    contracts.check_materializes(name)


@broken("meta")
def test_meta_contract_detects_violations(name):
    with pytest.raises(AssertionError, match=f"meta: {name}: "):
        contracts.check_materializes(name)


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.initial])
def test_result_preserving_edits_compute_the_same(name):
    contracts.check_computes_the_same(name)


@broken("initial")
def test_result_contract_detects_violations(name):
    with pytest.raises(AssertionError, match=f"initial: {name}: computes"):
        contracts.check_computes_the_same(name)
