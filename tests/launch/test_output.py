"""Output of ranks: arrives in whole lines, and never stops a rank."""

from __future__ import annotations

import os
import subprocess
import time

import pytest


def test_lines_of_all_ranks_are_not_interleaved(run):
    source = """
    import os, sys
    rank = os.environ["RANK"]
    for k in range(300):
        os.write(1, rank.encode() * 50)
        os.write(1, rank.encode() * 50 + b"\\n")
    sys.stdout.write(rank * 1_000_000 + "\\n")
    """
    result = run(source, n=3)
    assert result.code == 0
    lines = result.out.splitlines()
    for rank in range(3):
        mine = [line.removeprefix(f"[rank {rank}] ") for line in lines if line.startswith(f"[rank {rank}] ")]
        assert mine == [str(rank) * 100] * 300 + [str(rank) * 1_000_000]
    assert len(lines) == 3 * 301


def test_streams_are_separate_and_partial_last_line_is_ended(run):
    result = run("import sys; sys.stdout.write('out'); sys.stderr.write('err')")
    assert sorted(result.out.splitlines(keepends=True)) == ["[rank 0] out\n", "[rank 1] out\n"]
    assert sorted(result.errors.splitlines(keepends=True)) == ["[rank 0] err\n", "[rank 1] err\n"]


def test_single_rank_output_is_unprefixed_and_unbuffered(start):
    job = start(
        """
        import os, sys, time
        sys.stdout.write("\\r 10%")
        while not os.path.exists(os.environ["FOLDER"] + "/seen"):
            time.sleep(0.01)
        sys.stdout.write("\\r100%")
        """,
        n=1,
        text=False,
    )
    assert job.process.stdout is not None
    assert job.process.stdout.read(5) == b"\r 10%"
    (job.folder / "seen").touch()
    out, _ = job.process.communicate(timeout=60)
    assert out == b"\r100%\n"


@pytest.mark.parametrize("n", [1, 2])
def test_invalid_utf8_bytes_are_escaped(run, n):
    result = run(r"import os; os.write(1, 'ü'.encode() + b'\xff\xfe\n')", n=n)
    assert {line.split("] ")[-1] for line in result.out.splitlines()} == {r"ü\xff\xfe"}


def test_lines_are_whole_when_stdout_and_stderr_share_a_pipe(run):
    source = """
    import os
    for k in range(20):
        os.write(1, b"o" * 20_000 + b"\\n")
        os.write(2, b"e" * 20_000 + b"\\n")
    """
    result = run(source, stderr=subprocess.STDOUT)
    lines = [line for line in result.out.splitlines() if line.startswith("[")]
    assert {line.split("] ")[1] for line in lines} == {"o" * 20_000, "e" * 20_000}
    assert len(lines) == 80


PRINT_A_LOT = """
    import os
    for k in range(3000):
        print("x" * 1000)
    open(f"{os.environ['FOLDER']}/done-{os.environ['RANK']}", "w").write("done")
"""


def test_closed_stdout_does_not_stop_training(start):
    job = start(PRINT_A_LOT, preexec_fn=lambda: (os.close(1), os.close(2)))
    assert job.process.wait(timeout=60) == 0
    assert (job.folder / "done-0").exists()
    assert (job.folder / "done-1").exists()


def test_broken_stdout_does_not_stop_training_and_is_reported(start):
    read, write = os.pipe()
    job = start(PRINT_A_LOT, stdout=write)
    os.close(write)
    os.close(read)
    result = job.wait()
    assert result.code == 0
    assert (job.folder / "done-0").exists()
    assert result.errors == "dtrain: launch: 6,000 lines of standard output were dropped: Broken pipe\n"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_full_disk_does_not_stop_training(start):
    with open("/dev/full", "w") as full:
        job = start(PRINT_A_LOT, stdout=full, stderr=full)
    assert job.process.wait(timeout=60) == 0
    assert (job.folder / "done-0").exists()


def test_stalled_reader_blocks_neither_training_nor_termination(start):
    job = start(PRINT_A_LOT + "    import time; time.sleep(600)")
    job.wait_for("done-0", "done-1")  # 6 MB went into a pipe without a reader
    job.process.terminate()
    time.sleep(0.5)
    result = job.wait()  # reads at last
    assert result.code == 143
    assert len(result.out.splitlines()) == 6000  # and nothing was lost


def test_single_rank_reads_stdin_and_several_ranks_do_not(start):
    source = "import sys; print(repr(sys.stdin.read()))"
    for n, seen in ((1, "'given'\n"), (2, "[rank 0] ''\n[rank 1] ''\n")):
        job = start(source, n=n, stdin=subprocess.PIPE)
        out, _ = job.process.communicate("given", timeout=60)
        assert "".join(sorted(out.splitlines(keepends=True))) == seen


def test_end_names_the_training_run_and_its_report(run, tmp_path):
    source = """
    import dtrain as dt
    with dt.init_dist():
        dt.open_run("my runs/gpt")
    """
    first = run(source, options=["--run-dir", "r"])
    assert first.code == 0
    assert first.err.splitlines()[-2:] == [
        "dtrain: launch: done; logs of all ranks: r/logs",
        "dtrain: launch: results: my runs/gpt; for a summary and a page: dtrain report 'my runs/gpt'",
    ]
    # The next launch in this folder opens no run.
    assert run("", options=["--run-dir", "r"]).err.splitlines()[-1] == "dtrain: launch: done; logs of all ranks: r/logs"


def test_start_is_announced_before_the_ranks_run(start):
    source = """
    import os, time
    print("begun", file=open(f"{os.environ['FOLDER']}/begun", "w"), flush=True)
    time.sleep(600)
    """
    job = start(source, n=1, options=["--run-dir", "r"])
    assert job.process.stderr.readline() == "dtrain: launch: starting 1 rank; run folder of the launch: r\n"
    job.wait_for("begun")
    job.process.terminate()
    assert job.wait().code == 143


@pytest.mark.parametrize(
    ("args", "target", "line"),
    [
        (("-n", "2", "--lr", "1"), ["s.py"], "-n 2 stands after s.py and is passed to it. "
                                            "Options of the launcher stand before it: dtrain launch -n 2 s.py --lr 1"),
        (("a", "--nproc-per-node=2"), ["-m", "s"], "--nproc-per-node=2 stands after s and is passed to it. "
                                                   "Options of the launcher stand before it: "
                                                   "dtrain launch --nproc-per-node=2 -m s a"),
    ],
    ids=["script", "module"],
)  # fmt: skip
def test_option_for_the_ranks_after_the_script_is_named(run, args, target, line):
    result = run("import sys; print(sys.argv[1:])", *args, n=None, shown=None, target=target, name="s.py")
    assert (result.code, result.out) == (0, f"{list(args)}\n")
    assert result.err.splitlines()[0] == f"dtrain: launch: {line}"
    own = run("import sys; print(sys.argv[1:])", *args, n=1, shown=None, target=target, name="s.py")
    assert own.err.splitlines()[0].startswith("dtrain: launch: starting 1 rank; ")


SAY = """
    import os, sys
    rank = os.environ["RANK"]
    print("out of", rank)
    sys.stdout.flush()
    os.write(2, b"err of " + rank.encode() + b"\\x1b[2J\\n")
"""


def test_terminal_shows_rank_0_and_run_dir_keeps_all_ranks(run, tmp_path):
    result = run(SAY, n=3, shown=None, options=["--run-dir", "r"])
    assert (result.code, result.out) == (0, "[rank 0] out of 0\n")
    begin, shown, end = result.err.splitlines()
    assert begin == "dtrain: launch: starting 3 ranks; run folder of the launch: r"
    assert shown == "[rank 0] err of 0\\x1b[2J"
    assert end == "dtrain: launch: done; logs of all ranks: r/logs"
    kept = {path.name: path.read_text() for path in (tmp_path / "r" / "logs").iterdir() if path.name.startswith("rank-")}
    streams = (("stdout", "out of {}\n"), ("stderr", "err of {}\x1b[2J\n"))
    assert kept == {f"rank-{rank:05d}.{name}": text.format(rank) for rank in range(3) for name, text in streams}


def test_output_options_select_ranks_and_files(run, tmp_path):
    options = [
        "--log-ranks",
        "1",
        "--prefix",
        "{rank}/{world_size}: ",
        "--stdout",
        "all.txt",
        "--stderr",
        str(tmp_path / "e-{rank}"),
    ]
    result = run(SAY, shown="1", options=[*options, "--run-dir", "r"])
    assert (result.out, result.errors) == ("1/2: out of 1\n", "1/2: err of 1\\x1b[2J\n")
    assert result.err.endswith("dtrain: launch: done; run folder: r\n")
    assert sorted((tmp_path / "r" / "all.txt").read_text().splitlines()) == ["out of 0", "out of 1"]
    assert [(tmp_path / f"e-{rank}").read_text() for rank in (0, 1)] == ["err of 0\x1b[2J\n", "err of 1\x1b[2J\n"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_full_log_device_prints_one_line_and_training_continues(start):
    job = start(PRINT_A_LOT, shown=None, options=["--stdout", "/dev/full"])
    result = job.wait()
    assert (result.code, len(result.out.splitlines())) == (0, 3000)
    assert (job.folder / "done-1").exists()
    assert result.summary == ["dtrain: launch: 6,000 lines are missing in '/dev/full': No space left on device"]
