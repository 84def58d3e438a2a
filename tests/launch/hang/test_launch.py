"""Jobs that hang, each in its own way, under ``dtrain launch --hang-timeout``: the named rank, and exit code 124."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

HUNG = 124
TIMEOUT_S = 4  # enough for a busy machine to get from one point of progress to the next

SCRIPT = """
    import ctypes, os, re, signal, sys, time
    import torch, torch.distributed as dist
    import dtrain as dt
    from dtrain import launch_protocol
    from dtrain.launch import heartbeats
    from dtrain.dist.collectives import all_gather_numbers

    def misbehave(kind, info):
        if kind == "sleeps":
            time.sleep(600)
        elif kind == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif kind == "holds-the-gil":
            re.match("(a|a)+b", "a" * 99)
        elif kind in ("dies-when-asked", "dies-alone"):
            libc = ctypes.CDLL(None)
            libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
            libc.signal(launch_protocol.STACKS_SIGNAL, 16)  # no code is there: SIGSEGV
            re.search("(a|a)+b", "a" * 99)
        elif kind == "leaves-its-sockets":
            if os.fork() == 0:
                time.sleep(800)
            os._exit(0)
        elif kind == "one-collective-too-many":
            all_gather_numbers([0.0])
        elif kind == "another-collective":
            all_gather_numbers([0.0])
            dist.barrier()
        elif kind == "works-alone":
            for _ in range(60):
                heartbeats.heartbeat("work")
                time.sleep(0.1)

    def steps(kind, info):
        for step in range(5):
            heartbeats.heartbeat("step")
            if step == 3 and info.rank == min(1, info.world_size - 1):
                if kind == "returns-early":
                    all_gather_numbers([0.0])
                    return
                misbehave(kind, info)
            all_gather_numbers([float(step)])
            dist.all_reduce(torch.ones(3))

    with dt.init_dist(device="cpu") as info:
        steps(sys.argv[1], info)
    if sys.argv[1] == "stays" and info.rank == 1:
        time.sleep(700)
    if sys.argv[1] == "exports" and info.rank == 1:
        for _ in range(60):
            dt.launch.heartbeat("export")
            time.sleep(0.1)
"""


@dataclass(frozen=True, kw_only=True)
class Case:
    says: str = ""  # in the first line; nothing is said where it is no hang
    lines: tuple[str, ...] = ()  # beginnings of further ones
    n: int = 2
    options: tuple[str, ...] = ()


CASES = {
    "sleeps": Case(
        n=4,
        says="rank 1 of 4 made no progress for 4 s, and others wait in a collective",
        lines=("rank 1: {script}:{sleep} in misbehave (step, point of progress 4)",
               "rank 1 has not entered all_gather #4 of group control, where ranks 0, 2, 3 wait",
               "ranks 0, 2, 3: {script}:{gather} in steps (step, point of progress 4)"),
    ),
    "stopped": Case(
        says="rank 1 of 2 made no progress for 4 s (stopped, as by SIGSTOP)",
        lines=("rank 1: its stack is not known (step, point of progress ",
               "rank 0 waits in all_gather #4 of group control; rank 1 wrote nothing down"),
        options=("--no-preload",),
    ),
    "holds-the-gil": Case(
        says="rank 1 of 2 made no progress for 4 s (no answer: something holds the interpreter)",
        lines=("rank 1: {script}:{match} in misbehave (step, point of progress ",
               "rank 0 waits in all_gather #4 of group control; rank 1 wrote nothing down"),
    ),
    "one-collective-too-many": Case(
        says="ranks 0, 1 of 2 wait for each other in different collectives, no progress for 4 s",
        lines=("rank 0 has not entered all_gather #5 of group control, where rank 1 waits",
               "rank 1 has not entered all_reduce #4 of group training, where rank 0 waits"),
    ),
    "another-collective": Case(
        says="rank 1 of 2 ran another collective than the others, no progress for 4 s",
        lines=("as collective #4 of group training rank 0 runs all_reduce [[3]], but rank 1 barrier []",),
    ),
    # The launcher's question kills it; its peer, if it has one, then fails for want of it.
    "dies-when-asked": Case(
        says="rank 1 of 2 made no progress for 4 s (no answer: something holds the interpreter)",
        lines=("rank 1: its stack is not known (step, point of progress ",
               "rank 0 waits in all_gather #4 of group control; rank 1 wrote nothing down"),
    ),
    "dies-alone": Case(
        n=1,
        says="rank 0 of 1 made no progress for 4 s",
        lines=("rank 0: its stack is not known (step, point of progress ",),
    ),
    "returns-early": Case(
        says="rank 1 of 2 returned early, to the end of init_dist's block, no progress for 4 s",
        lines=("rank 1 has not entered all_reduce #4 of group training, where rank 0 waits",),
    ),
    "stays": Case(
        says="rank 1 of 2 did not end after init_dist's block, no progress for 4 s",
        lines=("rank 1: {script}:{stay} in <module> (step, point of progress ",),
    ),
    "leaves-its-sockets": Case(  # to a child, so that the peers' connections stay
        says="rank 1 of 2 ended while the others went on, no progress for 4 s",
        lines=("rank 0: {script}:{gather} in steps (step, point of progress 4)",),
    ),
    "works-alone": Case(),  # for longer than the time-out
    "exports": Case(),
}  # fmt: skip


def line_of(text: str) -> int:
    """The number of the only line of the script that holds ``text``."""
    (number,) = [number for number, line in enumerate(SCRIPT.splitlines(), 1) if text in line]
    return number


# Ranks that can write no stack.
MUTE = {("stays", 0), ("leaves-its-sockets", 1), ("stopped", 1), ("dies-when-asked", 1), ("dies-alone", 0)}
PLACES = {
    "stay": line_of("sleep(700)"),
    "sleep": line_of("sleep(600)"),
    "match": line_of("re.match"),
    "gather": line_of("[float(step)]"),
}


@pytest.mark.costly
def test_hang_names_stopped_rank_and_exits_124_unlike_long_work(start, tmp_path):
    jobs = {}
    for kind, case in CASES.items():  # at the same time: most of it is waiting
        options = ["--hang-timeout", str(TIMEOUT_S), "--grace", "0.5", "--run-dir", str(tmp_path / kind), *case.options]
        jobs[kind] = start(SCRIPT, kind, n=case.n, options=options)
    results = {kind: job.wait() for kind, job in jobs.items()}
    codes = {kind: HUNG if case.says else 0 for kind, case in CASES.items()}
    assert {kind: result.code for kind, result in results.items()} == codes, results
    for kind, case in CASES.items():
        job, result, folder = jobs[kind], results[kind], tmp_path / kind / "hang"
        if not case.says:
            assert result.summary == [], result.err
            assert not folder.exists()  # the preparations for a hang are gone
            continue
        lines = result.err.splitlines()
        assert result.summary == [f"dtrain: launch: hang: {case.says}; see {folder}/report.txt"], result.err
        begins = [f"  {line.format(script=job.script, **PLACES)}" for line in case.lines]
        assert [line for line in begins if not any(shown.startswith(line) for shown in lines)] == [], result.err
        assert len(lines) <= 12
        assert all(line.startswith(("dtrain: ", "  ")) for line in lines), result.err  # nor does torch complain of anything
        stacks = {path.name for path in folder.glob("*.stacks")}
        assert ("ended when it was asked (killed by SIGSEGV)" in result.err) == kind.startswith("dies"), result.err
        assert stacks >= {f"rank-{rank:05d}.stacks" for rank in range(case.n) if (kind, rank) not in MUTE}
