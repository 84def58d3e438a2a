"""Retention: the steps that are removed, and the state of a root during the removal."""

import os
import shutil
import time
import warnings
from contextlib import nullcontext
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from checkpoint.states import WatchedOs, plain_state, train, watching
from dtrain import storage
from dtrain.checkpoint import layout, retention
from dtrain.checkpoint import lock as holders
from dtrain.checkpoint.checkpoint_info import list_steps, read_manifest, scan_root
from dtrain.checkpoint.lock import LOCK_FILE, lock_root
from dtrain.checkpoint.reader import verify, verify_step
from dtrain.checkpoint.retention import (
    RetentionRules,
    apply_retention,
    check_free_space,
    prune,
    remove_leftovers,
    remove_step,
)
from dtrain.checkpoint.save import save_sharded
from dtrain.errors import CheckpointError, ConfigError
from mutations import flip_bits

RUN, OTHER = "a" * 32, "b" * 32
STEPS = st.lists(st.integers(0, 50), unique=True)
CHOSEN = st.sets(st.integers(0, 50))


@pytest.fixture(scope="module")
def template(tmp_path_factory) -> Path:
    """The folder of one small sound step."""
    return save_sharded(tmp_path_factory.mktemp("template"), train(plain_state(), 1)).path


@pytest.fixture
def fill(template):
    """``fill(root, steps)``: commit these steps, in this order."""

    def commit(root: Path, steps, run_id: str = RUN) -> list[Path]:
        root.mkdir(exist_ok=True)
        committed, folders = scan_root(root)[0], []
        for serial, step in enumerate(steps, start=1 + len(committed)):
            folders.append(root / layout.step_name(step))
            shutil.copytree(template, folders[-1])
            manifest = replace(read_manifest(template), step=step, serial=serial, run_id=run_id)
            (folders[-1] / layout.MANIFEST).write_bytes(layout.encode_manifest(manifest))
        return folders

    return commit


def steps_in(root: Path) -> list[int]:
    """The committed steps, each of which is sound."""
    for step in list_steps(root):
        verify(step.path)
    return [step.step for step in list_steps(root)]


def names(root: Path) -> list[str]:
    """All that is there, locks too."""
    return sorted(os.listdir(root))


def damage(folder: Path) -> None:
    path = folder / layout.data_name(0)
    flip_bits(path, -1)


def removals(steps, keep_last, *, protected=(), **keep) -> list[int]:
    rules = RetentionRules(keep_last=keep_last, **keep)
    rules.check("prune")
    return rules.steps_to_remove(steps, protected)


@given(STEPS, st.integers(1, 5), st.none() | st.integers(1, 9), CHOSEN, CHOSEN)
def test_plan_retention_removes_only_steps_without_keep_reason(steps, keep_last, keep_every, pinned, protected):
    options = {"keep_every": keep_every, "keep_steps": pinned, "protected": protected}
    removed = removals(steps, keep_last, **options)
    last = steps[-keep_last:]
    reasons = [
        step in last or step in pinned or step in protected or bool(keep_every and step % keep_every == 0) for step in steps
    ]
    assert removed == [step for step, kept in zip(steps, reasons, strict=True) if not kept]
    kept = [step for step in steps if step not in removed]
    assert not steps or kept, "never all"
    assert removals(kept, keep_last, **options) == [], "once is enough"


@given(STEPS, st.integers(1, 5), st.none() | st.integers(1, 9), CHOSEN)
def test_larger_keep_options_remove_no_additional_steps(steps, keep_last, keep_every, pinned):
    removed = set(removals(steps, keep_last, keep_every=keep_every))
    assert set(removals(steps, keep_last + 1, keep_every=keep_every)) <= removed
    assert set(removals(steps, keep_last, keep_every=keep_every, keep_steps=pinned)) == removed - pinned
    assert removed <= set(removals(steps, keep_last))


def test_keep_last_counts_commit_order_and_none_keeps_all_steps():
    assert removals([50, 75, 100, 60], 1, protected={50}) == [75, 100]
    assert removals([1, 2, 3], None, keep_every=2) == []


@pytest.mark.parametrize("value", [0, -1, True, 1.0, "3"])
@pytest.mark.parametrize("name", ["keep_last", "keep_every"])
def test_keep_options_below_one_are_refused(name, value):
    with pytest.raises(ConfigError, match=f"{name} must be an integer of at least 1"):
        removals([1], **{"keep_last": 1, name: value})


@pytest.mark.parametrize("pin", ["100", 1.0, True])
def test_invalid_keep_steps_value_is_refused(pin):
    with pytest.raises(ConfigError, match="keep_steps must be an integer of at least 0, got"):
        removals([1], 1, keep_steps=[5, pin])


def test_prune_removes_planned_steps_of_each_run(tmp_path, fill):
    fill(tmp_path, [10, 20, 25, 30])
    fill(tmp_path, [35, 31], OTHER)
    planned = prune(tmp_path, keep_last=1, keep_every=20, keep_steps=[25], dry_run=True)
    assert [(step.step, step.run_id) for step in planned] == [(10, RUN), (35, OTHER)]
    assert len(names(tmp_path)) == 6, "a dry run touches nothing"
    assert prune(tmp_path, keep_last=1, keep_every=20, keep_steps=[25]) == planned
    assert steps_in(tmp_path) == [20, 25, 30, 31]
    assert names(tmp_path) == [layout.step_name(step) for step in (20, 25, 30, 31)]
    assert prune(tmp_path, keep_last=1, keep_every=20, keep_steps=[25]) == []


def test_prune_of_step_folder_is_refused_and_of_missing_root_creates_nothing(tmp_path, fill):
    assert prune(tmp_path / "missing", keep_last=1) == []
    assert names(tmp_path) == []
    (folder,) = fill(tmp_path, [1])
    with pytest.raises(CheckpointError, match=r"got the step .*step-00000001. Pass its parent folder"):
        prune(folder, keep_last=1)
    with pytest.raises(ConfigError, match="keep_last must be"):
        prune(tmp_path, keep_last=0)
    assert steps_in(tmp_path) == [1]


def test_prune_refuses_root_of_live_job(tmp_path, fill):
    fill(tmp_path, [1, 2])
    litter = tmp_path / layout.staging_name(3, "tmp", RUN, "01234567")
    litter.mkdir()
    parent = os.getppid()
    job = replace(holders.current_owner(RUN, now=time.time()), pid=parent, start_ticks=holders.process_start_ticks(parent))
    (tmp_path / LOCK_FILE).write_bytes(job.encode())
    with pytest.raises(
        CheckpointError,
        match=rf"prune: .* another live job uses this root \(.*pid {parent},.*Pass keep_last",
    ):
        prune(tmp_path, keep_last=1)
    assert litter.exists()
    assert steps_in(tmp_path) == [1, 2]
    assert [step.step for step in prune(tmp_path, keep_last=1, dry_run=True)] == [1]


def test_prune_of_own_root_keeps_resumed_step(tmp_path, fill):
    fill(tmp_path, [1, 2, 3])
    litter = tmp_path / layout.staging_name(4, "tmp", RUN, "01234567")
    litter.mkdir()
    with lock_root(tmp_path, RUN, protected=[1]) as held:
        assert [step.step for step in prune(tmp_path, keep_last=1)] == [2]
        assert not litter.exists()
        held.check()
    assert steps_in(tmp_path) == [1, 3]


def test_prune_removes_staging_folders_of_all_runs(tmp_path, fill):
    fill(tmp_path, [1])
    for run_id, purpose in ((RUN, "tmp"), (OTHER, "old")):
        folder = tmp_path / layout.staging_name(2, purpose, run_id, "01234567")
        folder.mkdir()
        (folder / layout.MANIFEST).touch()
    for name in ("step-00000002.aside-01234567", "step-00000003", "notes"):
        (tmp_path / name).mkdir()
    assert prune(tmp_path, keep_last=None) == []
    assert names(tmp_path) == ["notes", "step-00000001", "step-00000002.aside-01234567", "step-00000003"]


def test_prune_keeps_last_valid_step_if_others_are_corrupt(tmp_path, fill):
    folders = fill(tmp_path, [1, 2, 3, 4, 5])
    for folder in folders[2:]:
        damage(folder)
    for dry_run in (True, False):
        with pytest.warns(UserWarning, match="step-00000002 is kept, because no step to keep passes verification"):
            removed = prune(tmp_path, keep_last=2, dry_run=dry_run)
        assert [step.step for step in removed] == [1, 3]
    assert [step.step for step in list_steps(tmp_path)] == [2, 4, 5]
    verify_step(folders[1])


def test_prune_proceeds_with_one_valid_kept_step(tmp_path, fill):
    folders = fill(tmp_path, [1, 2, 3, 4])
    damage(folders[3])
    assert [step.step for step in prune(tmp_path, keep_last=2)] == [1, 2]


def test_prune_removes_nothing_when_all_steps_are_corrupt(tmp_path, fill):
    for folder in fill(tmp_path, [1, 2, 3]):
        damage(folder)
    with pytest.warns(UserWarning, match=f"no step of run {RUN} passes verification, so no step is removed"):
        assert prune(tmp_path, keep_last=1) == []
    assert len(names(tmp_path)) == 3


def test_prune_ignores_step_with_corrupt_manifest(tmp_path, fill):
    folders = fill(tmp_path, [1, 2, 3])
    (folders[2] / layout.MANIFEST).write_text("{}")
    assert [step.step for step in prune(tmp_path, keep_last=1)] == [1]
    assert names(tmp_path) == ["step-00000002", "step-00000003"]


def pruned_by_a_child(root: Path, operation: int) -> int:
    """Return the exit code of a process that prunes, and dies in file operation number ``operation``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks of processes with threads
        child = os.fork()
    if child == 0:
        code = 1
        try:
            with watching(operation=operation, action="kill"):
                prune(root, keep_last=1)
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.costly
def test_prune_killed_at_any_operation_is_completed_by_next(tmp_path, fill, monkeypatch):
    monkeypatch.setattr(retention, "lock_root", lambda *_: nullcontext())  # has such a test of its own
    seen, operation, code = set(), 0, 9
    while code == 9:
        root = tmp_path / str(operation)
        fill(root, [1, 2, 3])
        (root / layout.staging_name(9, "tmp", OTHER, "01234567")).mkdir()
        code = pruned_by_a_child(root, operation)
        left = tuple(steps_in(root))
        assert left[-1] == 3, operation
        seen.add(left)
        prune(root, keep_last=1)
        assert names(root) == ["step-00000003"], operation
        operation += 1
    assert code == 0
    assert seen == {(1, 2, 3), (2, 3), (3,)}
    assert operation > 30


def test_prune_failing_at_any_operation_is_completed_by_next(tmp_path, fill, monkeypatch):
    monkeypatch.setattr(retention, "lock_root", lambda *_: nullcontext())
    operation, fired, raised = 0, True, 0
    while fired:
        root = tmp_path / str(operation)
        fill(root, [1, 2, 3])
        (root / layout.staging_name(9, "tmp", OTHER, "01234567")).mkdir()
        with watching(operation=operation) as watched, warnings.catch_warnings():
            # Litter that stays, or a step that cannot be read and for which another one stays.
            warnings.filterwarnings("ignore", message="prune: (could not remove|.* is kept, because no step)")
            try:
                prune(root, keep_last=1)
            except CheckpointError as error:
                raised += "No space left on device" in str(error)
        fired = watched.fired
        assert steps_in(root)[-1] == 3, operation
        prune(root, keep_last=1)
        assert names(root) == ["step-00000003"], operation
        operation += 1
    assert raised > 20


class Recorded(WatchedOs):
    """Record removals and renames, and look at the root before each operation."""

    def __init__(self, look) -> None:
        super().__init__()
        self.look, self.removed = look, []

    def __getattr__(self, name: str):
        real = getattr(os, name)
        if name not in ("unlink", "rename", "rmdir"):
            return real

        def recorded(path, *args):
            storage.local.os = os
            self.look()
            storage.local.os = self
            self.removed.append((name, Path(path).name))
            return real(path, *args)

        return recorded


def test_remove_step_renames_folder_before_deleting_files(tmp_path, fill):
    folders = fill(tmp_path, [1, 2])
    looks = []
    storage.local.os = recorded = Recorded(lambda: looks.append(steps_in(tmp_path)))
    try:
        remove_step(folders[0], 1, RUN)
    finally:
        storage.local.os = os
    assert looks == [[1, 2]] + [[2]] * 5
    assert recorded.removed[:2] == [("rename", "step-00000001"), ("unlink", layout.MANIFEST)]
    assert [kind for kind, _ in recorded.removed] == ["rename", "unlink", "unlink", "unlink", "unlink", "rmdir"]
    assert names(tmp_path) == ["step-00000002"]


def test_remove_step_deletes_manifest_first_without_rename(tmp_path, fill, monkeypatch):
    monkeypatch.setattr(storage, "supports_rename", lambda path: False)
    folders = fill(tmp_path, [1, 2])
    storage.local.os = recorded = Recorded(lambda: None)
    try:
        remove_step(folders[0], 1, RUN)
    finally:
        storage.local.os = os
    others = [name for name in sorted(names(folders[1])) if name != layout.MANIFEST]
    assert [name for _, name in recorded.removed] == [layout.MANIFEST, *others, "step-00000001"]
    assert recorded.removed[0] == ("unlink", layout.MANIFEST)
    (tmp_path / "step-00000003").mkdir()
    (tmp_path / "step-00000003" / layout.data_name(0)).touch()
    remove_leftovers(tmp_path)
    assert names(tmp_path) == ["step-00000002"]


def test_apply_retention_removes_old_steps_and_staging_folders(tmp_path, fill):
    fill(tmp_path, [1, 2, 3, 4, 5])
    fill(tmp_path, [10, 11], OTHER)
    for run_id in (RUN, OTHER):
        (tmp_path / layout.staging_name(6, "tmp", run_id, "01234567")).mkdir()
    assert apply_retention(tmp_path, RUN, RetentionRules()) == []
    assert len(names(tmp_path)) == 7, "without keep_last the litter goes"
    rules = RetentionRules(keep_last=1, keep_every=4, keep_steps=[3])
    assert apply_retention(tmp_path, RUN, rules, protected=[1, 5]) == [2]
    assert apply_retention(tmp_path, RUN, rules, protected=[1, 5]) == []
    assert steps_in(tmp_path) == [1, 3, 4, 5, 10, 11]
    assert [name for name in names(tmp_path) if "tmp" in name] == []


def test_apply_retention_refuses_when_last_step_is_incomplete(tmp_path, fill):
    folders = fill(tmp_path, [1, 2])
    os.truncate(folders[1] / layout.data_name(0), 100)
    with pytest.raises(CheckpointError, match=r"step-00000002/rank-00000.safetensors must have the size"):
        apply_retention(tmp_path, RUN, RetentionRules(keep_last=1), protected=[2])
    assert [step.step for step in list_steps(tmp_path)] == [1, 2]


def test_undeletable_leftovers_give_warning(tmp_path):
    (tmp_path / layout.staging_name(6, "tmp", RUN, "01234567")).mkdir()
    with (
        watching(operation=0, kind="rmdir"),
        pytest.warns(UserWarning, match="save_sharded: could not remove .*tmp-aaaaaaaa.*No space"),
    ):
        remove_leftovers(tmp_path)
    remove_leftovers(tmp_path)
    assert names(tmp_path) == []


class Full(WatchedOs):
    """A file system of 4 KiB blocks, of which so many are free."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = blocks

    def statvfs(self, path: Path) -> os.statvfs_result:
        return os.statvfs_result((4096, 4096, 10**9, self.blocks + 5, self.blocks, 0, 0, 0, 0, 255))


def test_insufficient_space_error_gives_needed_and_free_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(storage.local, "os", Full(256))
    check_free_space(tmp_path / "new" / "root", 2**20, caller="save_sharded")
    with pytest.raises(CheckpointError) as refused:
        check_free_space(tmp_path / "new" / "root", 3 * 2**30, caller="save_sharded")
    assert str(refused.value) == (
        f"save_sharded: free space of {tmp_path}/new/root must be at least 3 GiB, got 1 MiB. "
        "Free space, or keep fewer steps (keep_last)."
    )
    assert names(tmp_path) == []


def test_unknown_free_space_passes_check(tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "free_bytes", lambda path: None)
    check_free_space(tmp_path, 2**60, caller="save_sharded")
    assert names(tmp_path) == []
