"""Explanation of a hang, from facts about the ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dtrain.launch.hang_report import explain_stall
from dtrain.launch.rank_records import RankEvidence, RankProgress, parse_rank_record

REPORT = Path("/runs/1/hang/report.txt")


def stack(line: int) -> str:
    return f'Current thread 0x01 (most recent call first):\n  File "/home/me/loop.py", line {line} in train\n'


def record(
    *issued: tuple[int, str, bool], group: str = "control", ranks: tuple[int, ...] = (0, 1, 2, 3), passed: int = 9
) -> str:
    """Build the record of a rank that has issued these collectives: number, name, True if it waits."""
    collectives = [{"number": number, "op": op, "sizes": [[2]], "waits": waits} for number, op, waits in issued]
    last = max((one[0] for one in issued), default=0)
    groups = [{"id": "1", "backend": "gloo", "name": group, "ranks": ranks, "last": last, "collectives": collectives}]
    return json.dumps({"rank": 0, "passed": passed, "doing": "step", "groups": groups if issued else []})


def rank(number: int, written: str | None, *, line: int = 30, phase: str | None = "open", **more: object) -> RankEvidence:
    progress = None if phase is None else RankProgress(phase=phase, at=1.0, passed=5, doing="step")  # type: ignore[arg-type]
    told = {"record": parse_rank_record(written) if written is not None else None, "stacks": stack(line)}
    return RankEvidence(**{"rank": number, "progress": progress, "state": "S", **told, **more})  # type: ignore[arg-type]


WAITS = record((56, "barrier", False), (57, "all_gather", True))
AHEAD = record(
    *((number, "all_gather", True) for number in range(57, 61))
)  # on a GPU, the program runs ahead of its collectives
HALF_WAY = record((57, "all_gather", True), (58, "all_gather", True))
BEHIND = record((56, "barrier", False))
OTHER = record((56, "barrier", False), (57, "all_reduce", True))
AT_END = record((56, "barrier", False), (57, "barrier", True))
ELSEWHERE = record((3, "all_reduce", True), group="training", ranks=(0, 1))


def all_but(odd: RankEvidence, written: str = WAITS) -> list[RankEvidence]:
    return [odd, *(rank(number, written) for number in range(4) if number != odd.rank)]


@pytest.mark.parametrize(
    ("evidence", "says", "lines"),
    [
        pytest.param(
            all_but(rank(1, BEHIND, line=12)),
            "rank 1 of 4 made no progress for 30 s, and others wait in a collective",
            ["rank 1: /home/me/loop.py:12 in train (step, point of progress 9)",
             "rank 1 has not entered all_gather #57 of group control, where ranks 0, 2, 3 wait; it is in loop.py:12",
             "ranks 0, 2, 3: /home/me/loop.py:30 in train (step, point of progress 9)"],
            id="one-lacks-a-collective",
        ),
        pytest.param(
            all_but(rank(1, record(), line=12)),
            "rank 1 of 4 made no progress for 30 s, and others wait in a collective",
            ["rank 1 has not entered all_gather #57 of group control, where ranks 0, 2, 3 wait; it is in loop.py:12"],
            id="one-lacks-the-first-collective",
        ),
        pytest.param(
            all_but(rank(1, HALF_WAY), AHEAD),
            "rank 1 of 4 made no progress for 30 s, and others wait in a collective",
            ["rank 1 has not entered all_gather #59 of group control, where ranks 0, 2, 3 wait; it is in loop.py:30"],
            id="one-lacks-a-later-collective",
        ),
        pytest.param(
            all_but(rank(1, OTHER, line=12)),
            "rank 1 of 4 ran another collective than the others, no progress for 30 s",
            ["as collective #57 of group control ranks 0, 2, 3 run all_gather [[2]], but rank 1 all_reduce [[2]]"],
            id="one-runs-another-collective",
        ),
        pytest.param(
            all_but(rank(1, BEHIND, state="T", stacks="")),
            "rank 1 of 4 made no progress for 30 s (stopped, as by SIGSTOP)",
            ["rank 1: its stack is not known (step, point of progress 9)"],
            id="stopped",
        ),
        pytest.param(
            all_but(rank(1, None, state="T", stacks="")),
            "rank 1 of 4 made no progress for 30 s (stopped, as by SIGSTOP)",
            ["ranks 0, 2, 3 wait in all_gather #57 of group control; rank 1 wrote nothing down"],
            id="stopped-and-silent",
        ),
        pytest.param(
            all_but(rank(1, None, line=7)),
            "rank 1 of 4 made no progress for 30 s (no answer: something holds the interpreter)",
            ["rank 1: /home/me/loop.py:7 in train (step, point of progress 5 or later)"],
            id="holds-the-gil",
        ),
        pytest.param(
            all_but(rank(1, BEHIND, state="D")),
            "rank 1 of 4 made no progress for 30 s (in the kernel: disk or driver)",
            ["rank 1 has not entered all_gather #57 of group control, where ranks 0, 2, 3 wait; it is in loop.py:30"],
            id="in-the-kernel",
        ),
        pytest.param(
            all_but(rank(1, AT_END, phase="leaving")),
            "rank 1 of 4 returned early, to the end of init_dist's block, no progress for 30 s",
            ["as collective #57 of group control ranks 0, 2, 3 run all_gather [[2]], but rank 1 barrier [[2]]"],
            id="returned-early",
        ),
        pytest.param(
            [rank(number, AT_END, phase="leaving") for number in (1, 2, 3)] + [rank(0, BEHIND, line=80)],
            "rank 0 of 4 made no progress for 30 s, and others wait in a collective",
            ["rank 0 has not entered barrier #57 of group control, where ranks 1, 2, 3 wait; it is in loop.py:80"],
            id="all-have-returned-but-one-that-works",
        ),
        pytest.param(
            [rank(number, AT_END, phase="leaving") for number in (1, 2, 3)] + [rank(0, None, line=80)],
            "rank 0 of 4 made no progress for 30 s (no answer: something holds the interpreter)",
            ["ranks 1, 2, 3 wait in barrier #57 of group control; rank 0 wrote nothing down"],
            id="all-have-returned-but-one-that-is-silent",
        ),
        pytest.param(
            [rank(1, None, phase="leaving"), rank(0, None, line=80)],
            "rank 1 of 4 returned early, to the end of init_dist's block, no progress for 30 s",
            ["rank 0: /home/me/loop.py:80 in train (step, point of progress 5 or later)"],
            id="returned-early-without-records",
        ),
        pytest.param(
            all_but(rank(1, None, phase="closed", exit_code=0)),
            "rank 1 of 4 ended while the others went on, no progress for 30 s",
            ["ranks 0, 2, 3 wait in all_gather #57 of group control; rank 1 ended"],
            id="ended",
        ),
        pytest.param(
            [rank(0, None, phase="closed", exit_code=0), rank(1, record(), phase="leaving", line=90)],
            "rank 1 of 4 made no progress for 30 s",
            ["rank 1: /home/me/loop.py:90 in train (step, point of progress 9)"],
            id="one-does-not-get-out",
        ),
        pytest.param(
            all_but(rank(1, None, phase=None, line=3)),
            "rank 1 of 4 never came to init_dist's block, no progress for 30 s",
            ["rank 1: /home/me/loop.py:3 in train"],
            id="never-came",
        ),
        pytest.param(
            [rank(number, None) for number in range(4)],
            "ranks 0, 1, 2, 3 of 4 made no progress for 30 s",
            ["ranks 0, 1, 2, 3: /home/me/loop.py:30 in train (step, point of progress 5 or later)"],
            id="no-records-at-all",
        ),
        pytest.param(
            [rank(number, None, line=30 + (number == 3)) for number in range(4)],
            "ranks 0, 1, 2, 3 of 4 made no progress for 30 s",
            ["rank 3: /home/me/loop.py:31 in train (step, point of progress 5 or later)",
             "ranks 0, 1, 2: /home/me/loop.py:30 in train (step, point of progress 5 or later)"],
            id="one-elsewhere-and-no-records",
        ),
        pytest.param(
            [rank(number, record(passed=8 + (number != 2))) for number in range(4)],
            "rank 2 of 4 made no progress for 30 s, after fewer steps than the others",
            ["rank 2: /home/me/loop.py:30 in train (step, point of progress 8)"],
            id="records-without-collectives",
        ),
        pytest.param(
            [rank(number, WAITS) for number in range(4)],
            "ranks 0, 1, 2, 3 of 4 made no progress for 30 s",
            ["ranks 0, 1, 2, 3 wait in all_gather #57 of group control, and all its ranks have come: "
             "is the network between them sound?"],
            id="all-are-there",
        ),
        pytest.param(
            [rank(number, WAITS) for number in range(2)],
            "ranks 0, 1 of 4 made no progress for 30 s",
            ["ranks 0, 1 wait in all_gather #57 of group control for ranks of other nodes; see what their launchers say"],
            id="another-node",
        ),
        pytest.param(
            [rank(0, ELSEWHERE), rank(1, WAITS), rank(2, WAITS), rank(3, WAITS)],
            "ranks 0, 1 of 4 wait for each other in different collectives, no progress for 30 s",
            ["rank 0 has not entered all_gather #57 of group control, where ranks 1, 2, 3 wait; it is in loop.py:30",
             "rank 1 has not entered all_reduce #3 of group training, where rank 0 waits; it is in loop.py:30"],
            id="each-waits-for-the-other",
        ),
        pytest.param(
            [rank(0, ELSEWHERE), rank(1, BEHIND), rank(2, WAITS), rank(3, WAITS)],
            "rank 1 of 4 made no progress for 30 s, and others wait in a collective",
            ["ranks 0, 1 have not entered all_gather #57 of group control, where ranks 2, 3 wait; they are in loop.py:30",
             "rank 1 has not entered all_reduce #3 of group training, where rank 0 waits; it is in loop.py:30"],
            id="a-chain-begins-at-the-rank-that-waits-for-nobody",
        ),
    ],
)  # fmt: skip
def test_explanation_names_the_rank_that_stopped(evidence, says, lines):
    first, *rest = explain_stall(evidence, world_size=4, timeout_s=30.0, report=REPORT)
    assert first == f"dtrain: launch: hang: {says}; see {REPORT}"
    assert [line for line in lines if f"  {line}" not in rest] == [], rest


@pytest.mark.parametrize("by_hand", [False, True], ids=["hang", "by-hand"])
@pytest.mark.parametrize("groups", [1, 3, 9])
@pytest.mark.parametrize("odd", ["none", "one", "each-second", "many-places", "silent", "ended", "another-collective"])
def test_explanation_is_at_most_twelve_lines_and_names_at_most_eight_ranks(groups, odd, by_hand):
    names, everyone = [f"axis{index}" for index in range(groups)], tuple(range(64))

    def told(number: int, op: str = "all_reduce", *, waits: bool = True) -> str:
        made = [json.loads(record((number, op, waits), group=name, ranks=everyone))["groups"][0] for name in names]
        return json.dumps({"passed": number, "doing": "step", "groups": made})

    lacks = told(6, waits=False)
    written = {
        "none": lambda number: told(7),
        "one": lambda number: lacks if number == 3 else told(7),
        "each-second": lambda number: told(7) if number % 2 else lacks,
        "many-places": lambda number: told(7) if number % 2 else lacks,
        "silent": lambda number: None if number % 3 else told(7),
        "ended": lambda number: None if number < 20 else told(7),
        "another-collective": lambda number: told(7, "broadcast" if number % 4 else "all_reduce"),
    }[odd]
    evidence = [
        rank(
            number,
            written(number),
            line=number if odd == "many-places" else 30,
            exit_code=0 if odd == "ended" and number < 20 else None,
            silent_s=2.0 + number,
        )
        for number in everyone
    ]
    lines = explain_stall(evidence, world_size=64, timeout_s=None if by_hand else 30.0, report=REPORT)
    assert 2 <= len(lines) <= 12
    assert all(line.startswith("  ") for line in lines[1:])
    assert all(len(line) < 400 for line in lines)
    assert lines[0].startswith("dtrain: launch: asked: " if by_hand else "dtrain: launch: hang: ")
    if odd == "one":
        joined = "  rank 3 has not entered all_reduce #7 of group axis0, where ranks 0, 1, 2, 4, 5, 6, 7, 8 and 55 more wait"
        assert f"{joined}; it is in loop.py:30" in lines
        assert f"rank 3 of 64 made no progress for {'5.0' if by_hand else '30'} s" in lines[0]
    if odd == "each-second":
        assert "ranks 0, 2, 4, 6, 8, 10, 12, 14 and 24 more of 64" in lines[0]


def test_explanation_omits_shared_location_when_missing_ranks_differ():
    evidence = [rank(0, WAITS), rank(1, BEHIND, line=12), rank(2, BEHIND, line=13), rank(3, WAITS)]
    lines = explain_stall(evidence, world_size=4, timeout_s=30.0, report=REPORT)
    assert "  ranks 1, 2 have not entered all_gather #57 of group control, where ranks 0, 3 wait" in lines
    assert lines[1:3] == [f"  rank {number}: /home/me/loop.py:{11 + number} in train (step, point of progress 9)"
                          for number in (1, 2)]  # fmt: skip


@pytest.mark.parametrize(
    ("quiet", "says"),
    [
        pytest.param(
            [9.0, 4.25, 9.0, 9.0], "rank 1 of 4 made no progress for 4.2 s, and others", id="of-the-rank-that-stopped"
        ),
        pytest.param([9.0, None, 8.0, 9.0], "rank 1 of 4 made no progress for 8.0 s, and others", id="of-all"),
        pytest.param([None] * 4, "rank 1 of 4 made no progress, and others", id="not-known"),
    ],
)
def test_requested_explanation_gives_time_since_last_progress(quiet, says):
    evidence = [rank(number, BEHIND if number == 1 else WAITS, silent_s=quiet[number]) for number in range(4)]
    (first, *_) = explain_stall(evidence, world_size=4, timeout_s=None, report=REPORT)
    assert first.startswith(f"dtrain: launch: asked: {says}"), first


def test_requested_explanation_does_not_blame_network():
    lines = explain_stall([rank(number, WAITS) for number in range(4)], world_size=4, timeout_s=None, report=REPORT)
    assert "  ranks 0, 1, 2, 3 wait in all_gather #57 of group control, and all its ranks have come" in lines


def test_explanation_shows_no_control_characters():
    odd = rank(0, None, stacks=stack(3).replace("loop.py", "lo\x1b[2Jop.py"))
    assert "\x1b" not in "".join(explain_stall([odd], world_size=1, timeout_s=30.0, report=REPORT))


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"groups": [{}], "passed": 1, "doing": ""}', '{"groups": 3}'])
def test_parse_rank_record_returns_none_for_damaged_record(text):
    assert parse_rank_record(text) is None
