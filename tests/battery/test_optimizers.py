"""Every optimizer keeps every contract; and for every contract there is a broken optimizer that it must detect."""

import importlib
import itertools
import pkgutil

import pytest
import torch

import dtrain.optim
from battery import optimizers
from battery.optimizers import BROKEN, ROWS
from sampling import with_sources

IN_BROKEN = {contract: name for name, (contract, _) in BROKEN.items()}

pytestmark = pytest.mark.sample(3, by="name")
each_row = pytest.mark.parametrize("name", with_sources(ROWS))
fused = pytest.mark.parametrize("name", [name for name in ROWS if "foreach" not in name])  # that form reads its own counter


def test_every_optimizer_and_group_function_has_a_numeric_row():
    modules = [importlib.import_module(f"dtrain.optim.{m.name}") for m in pkgutil.iter_modules(dtrain.optim.__path__)]
    own = {n: v for m in modules for n, v in vars(m).items() if getattr(v, "__module__", None) == m.__name__}
    classes = {name for name, value in own.items() if isinstance(value, type) and issubclass(value, torch.optim.Optimizer)}
    assert classes >= {"DecoupledAdamW", "DecoupledSGDW", "MatrixOptimizer", "Muon"}
    shown = set(itertools.chain.from_iterable(row.of for row in ROWS.values() if row.points is not None))
    assert shown == classes | {"ParamGroup", "param_groups", "muon_groups", "orthogonalize"}


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.points is not None])
def test_optimizer_steps_match_the_formula(name):
    optimizers.check_points(ROWS[name].points())


@each_row
def test_resumed_run_equals_an_uninterrupted_run(name, tmp_path):
    optimizers.check_resume_equals_straight(name, str(tmp_path))


@each_row
def test_resumed_run_sharded_on_two_ranks_equals_an_uninterrupted_run(name, tmp_path, ranks):
    assert ranks(2).run(optimizers.check_resume_equals_straight, name, str(tmp_path)) == [None, None]


def test_resume_contract_detects_violations(tmp_path):
    name = IN_BROKEN["resume"]
    with pytest.raises(AssertionError, match=f"resume: {name}: differs from the straight run at"):
        optimizers.check_resume_equals_straight(name, str(tmp_path))


@each_row
def test_two_ranks_match_one_process(name, ranks):
    optimizers.check_ranks_equal_one(name, ranks)


def test_ranks_contract_detects_violations(ranks):
    name = IN_BROKEN["ranks"]
    with pytest.raises(AssertionError, match=f"ranks: {name}: parameters on two ranks are .* from those on one"):
        optimizers.check_ranks_equal_one(name, ranks)


@pytest.mark.parametrize(("first", "then"), [(2, 1), pytest.param(1, 2, marks=pytest.mark.slow)])
@each_row
def test_checkpoint_resumes_on_a_different_world_size(name, first, then, tmp_path, ranks):
    optimizers.check_other_world_size(name, str(tmp_path), ranks, first, then)


@fused
def test_step_needs_no_host_sync(name):
    optimizers.check_no_host_sync(name)


@fused
def test_step_on_two_ranks_needs_no_host_sync(name, ranks):
    assert ranks(2).run(optimizers.syncs_of_a_step, name) == [[], []]


def test_host_sync_contract_detects_violations():
    name = IN_BROKEN["syncs"]
    with pytest.raises(AssertionError, match=f"syncs: {name}: "):
        optimizers.check_no_host_sync(name)
