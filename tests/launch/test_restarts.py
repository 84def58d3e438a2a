"""Restarts of failed ranks: pure rules first, then real jobs."""

from __future__ import annotations

import pytest

from dtrain.launch.worker_group import RestartPolicy


def delays(restarts, failures):
    """The waits before each start again, until there is none any more."""
    waits = []
    for _ in range(failures):
        if restarts.delay_s is None:
            break
        waits.append(restarts.delay_s)
        restarts = restarts.after_restart()
    return waits


@pytest.mark.parametrize(
    ("most", "expected"), [(0, []), (1, [0.0]), (4, [0.0, 1.0, 2.0, 4.0]), (9, [0, 1, 2, 4, 8, 16, 32, 60, 60])]
)
def test_restart_delay_doubles_until_limit(most, expected):
    assert delays(RestartPolicy(max_fruitless=most), 20) == expected


def test_new_checkpoint_resets_restart_count():
    tired = RestartPolicy(max_fruitless=2).after_restart().after_restart()
    assert tired.delay_s is None
    fresh = tired.after_commit(10)
    assert (fresh.delay_s, fresh.total) == (0.0, 2)


@pytest.mark.parametrize("step", [10, 9])
def test_commit_of_earlier_step_does_not_reset_restart_count(step):
    again = RestartPolicy(max_fruitless=2).after_commit(10).after_restart().after_restart()
    assert again.after_commit(step).delay_s is None


FAILS_TWICE = """
    import os, sys, time
    count = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    print("start", count, os.environ["MASTER_PORT"])
    if count < 2:
        sys.exit(5) if os.environ["RANK"] == "0" else time.sleep(600)
"""


@pytest.mark.parametrize("preload", [["--preload", "json"], ["--no-preload"]], ids=["preloaded", "plain"])
def test_ranks_are_restarted_until_success(run, preload):
    result = run(FAILS_TWICE, options=["--max-restarts", "2", *preload], shown="0")
    assert result.code == 0
    starts = [line.split() for line in result.out.splitlines()]
    assert [words[3] for words in starts] == ["0", "1", "2"]
    assert len({words[4] for words in starts}) == 3  # a store of its own each time
    assert [line for line in result.summary if "starting all ranks again" in line] == [
        "dtrain: launch: starting all ranks again (restart 1 of at most 2 without a new checkpoint)",
        "dtrain: launch: starting all ranks again in 1 s (restart 2 of at most 2 without a new checkpoint)",
    ]


def test_restarts_stop_at_limit(run):
    result = run(FAILS_TWICE, options=["--max-restarts", "1"], shown="0")
    assert result.code == 5
    assert len(result.out.splitlines()) == 2


def test_wrong_argument_is_not_tried_again(run):
    result = run("import dtrain as dt; dt.schedules.constant(float('nan'))", n=1, options=["--max-restarts", "3"])
    assert result.code == 1
    assert len(result.summary) == 1


def test_new_checkpoints_allow_further_restarts(run):
    source = """
    import os, sys
    from dtrain.launch import heartbeats
    count = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    heartbeats.report(heartbeats.ProgressKind.COMMITTED, 10 * (1 + count))
    if count < 4:
        sys.exit(5)
    """
    result = run(source, options=["--max-restarts", "1"])
    assert result.code == 0
    assert len([line for line in result.summary if "starting all ranks again (restart 1 of at most 1" in line]) == 4


def test_terminated_job_is_not_restarted(start):
    job = start(
        """
        import os, time
        with open(f"{os.environ['FOLDER']}/{os.environ['RANK']}", "w") as file:
            file.write("ready")
        time.sleep(600)
        """,
        options=["--max-restarts", "5"],
    )
    job.wait_for("0", "1")
    job.process.terminate()
    result = job.wait()
    assert result.code == 143
    assert not [line for line in result.summary if "again" in line]


@pytest.mark.costly
def test_last_commit_before_failure_counts_as_progress(run):
    source = """
    import os, sys
    from dtrain.launch import heartbeats
    count = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    heartbeats.report(heartbeats.ProgressKind.COMMITTED, count + 1)
    if count < 20:
        os._exit(5)
    """
    result = run(source, n=1, options=["--max-restarts", "1", "--preload", "json"])
    assert result.code == 0


def test_restarted_ranks_are_forked_from_preloaded_process(run):
    source = """
    import os, sys, time
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        sys.exit(5) if os.environ["RANK"] == "0" else time.sleep(600)
    print("colorsys" in sys.modules)
    """
    result = run(source, n=24, options=["--max-restarts", "1", "--preload", "colorsys"])
    assert result.code == 0, result.err
    last = result.out.splitlines()
    assert len(last) == 24
    assert all(line.endswith("True") for line in last)
