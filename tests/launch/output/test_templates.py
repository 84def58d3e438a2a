"""Templates of file names and prefixes, and which ranks are shown: read in one place, refused in one line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dtrain.cli.launch import parse_log_ranks
from dtrain.errors import ConfigError
from dtrain.launch.job_output import check_output_plan, fill_template, log_paths
from dtrain.launch.launch_plan import NodeLayout, OutputPlan

SECOND_NODE = NodeLayout(nproc=2, world_size=6, base_rank=4, node_rank=2, nodes=3)

FILLED = {
    "rank": ("r{rank}", "r5"),
    "all": ("{rank}-{local_rank}-{world_size}-{local_world_size}-{node_rank}", "5-1-6-2-2"),
    "padded": ("{rank:05d}", "00005"),
    "host": ("{host}", os.uname().nodename),
    "braces": ("{{{rank}}}", "{5}"),
    "nothing": ("log", "log"),
}


@pytest.mark.parametrize(("template", "expected"), FILLED.values(), ids=FILLED)
def test_template_is_filled_with_rank_fields(template, expected):
    assert fill_template("--stdout", template, SECOND_NODE, 5) == expected


REFUSED = {
    "unknown field": (
        {"stdout": "{rnak}.log"},
        r"--stdout '\{rnak\}.log': no field \{rnak\}\. Use \{rank\} \{local_rank\}",
    ),
    "number": ({"stderr": "{}.log"}, r"--stderr .*: no field \{\}\. Use"),
    "attribute": ({"stdout": "{rank.real}"}, r"--stdout .*: no field \{rank.real\}"),
    "item": ({"stdout": "{rank[0]}"}, r"--stdout .*: no field \{rank\[0\]\}"),
    "brace": ({"stdout": "{rank"}, r"--stdout '\{rank' cannot be filled in: .*\. Write a brace itself as \{\{ or \}\}"),
    "format": ({"stdout": "{rank:x9y}"}, r"--stdout .* cannot be filled in: "),
    "field in a format": ({"stdout": "{rank:{width}}"}, r"--stdout .* cannot be filled in: "),
    "no name": ({"stdout": ""}, r"--stdout must name a file, got ''\. Remove --stdout"),
    "folder": ({"stderr": "logs/"}, r"--stderr must name a file, got 'logs/'"),
    "prefix": ({"prefix": "[{rnk}] "}, r"--prefix '\[\{rnk\}\] ': no field \{rnk\}"),
    "prefix of two lines": ({"prefix": "a\nb"}, r"--prefix must be one line, got 'a\\nb'"),
}


@pytest.mark.parametrize(("given", "message"), REFUSED.values(), ids=REFUSED)
def test_invalid_template_is_refused(given, message):
    with pytest.raises(ConfigError, match=rf"^launch: {message}"):
        check_output_plan(OutputPlan(**given), SECOND_NODE)


def test_log_paths_are_below_run_dir_unless_absolute():
    run_dir = Path("/runs/a")
    assert log_paths(OutputPlan(), SECOND_NODE, run_dir, 5) == (
        run_dir / "logs/rank-00005.stdout",
        run_dir / "logs/rank-00005.stderr",
    )
    plan = OutputPlan(stdout="out-{local_rank}.txt", stderr="/tmp/{rank}.err")
    check_output_plan(plan, SECOND_NODE)
    assert log_paths(plan, SECOND_NODE, run_dir, 5) == (run_dir / "out-1.txt", Path("/tmp/5.err"))


RANKS = {
    "one": ("0", {0}),
    "list and range": ("0,8-11", {0, 8, 9, 10, 11}),
    "spaces": (" 1 , 3-4", {1, 3, 4}),
    "twice": ("1,1-2", {1, 2}),
    "all": ("all", set(range(16))),
    "none": ("none", set()),
    "range of one": ("15-15", {15}),
}


@pytest.mark.parametrize(("text", "expected"), RANKS.values(), ids=RANKS)
def test_log_ranks_are_global_ranks(text, expected):
    assert parse_log_ranks(text, 16) == expected


BAD_RANKS = {
    "empty": ("", r"must be ranks as in 0,8-15, or all, or none, got ''"),
    "letters": ("0,x", r"must be ranks .* got '0,x'\. Correct 'x'"),
    "negative": ("-1", r"must be ranks "),
    "spaces in a range": ("2 - 3", r"must be ranks "),
    "too high": ("0,16", r"'0,16': there is no rank 16\. Use ranks from 0 to 15"),
    "range too high": ("8-16", r"'8-16': there is no rank 16"),
    "huge range": ("0-999999999", r".*there is no rank 999999999"),
    "backwards": ("5-3", r"'5-3': 5-3 goes backwards\. Write 3-5"),
    "empty part": ("1,,2", r"must be ranks .*\. Correct ''"),
}


@pytest.mark.parametrize(("text", "message"), BAD_RANKS.values(), ids=BAD_RANKS)
def test_nonexistent_log_ranks_are_refused(text, message):
    with pytest.raises(ConfigError, match=rf"^launch: --log-ranks {message}"):
        parse_log_ranks(text, 16)
