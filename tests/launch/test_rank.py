"""A rank is as `python script.py` would be, with the variables of its rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import zipfile

import pytest

ENVIRONMENT = "import os, json; print(json.dumps(dict(os.environ)))"


def environments(result):
    assert result.code == 0, result.err
    return {int(line[6]): json.loads(line.partition("] ")[2]) for line in result.out.splitlines()}


def test_rank_environment_holds_rank_variables(run, tmp_path):
    seen = environments(run(ENVIRONMENT, env={"OMP_NUM_THREADS": ""}))
    for rank, env in seen.items():
        expected = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "GROUP_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": seen[0]["MASTER_PORT"],
            "DTRAIN_LOOPBACK": "1",
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // 2)),
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
        }
        assert {name: env.get(name) for name in expected} == expected
        assert os.path.dirname(env["DTRAIN_RUN_DIR"]) == str(tmp_path / "runs")
        assert os.path.isdir(env["DTRAIN_RUN_DIR"])
        assert env["TORCHELASTIC_RUN_ID"]
    assert 0 < int(seen[0]["MASTER_PORT"]) < 65536
    assert sorted(seen) == [0, 1]


def test_rank_variables_of_outer_launch_are_replaced(run):
    stale = {
        "RANK": "7",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "7",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "1",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_ERROR_FILE": "/nowhere",
        "TORCHELASTIC_RESTART_COUNT": "3",
        "DTRAIN_RUN_DIR": "/nowhere",
        "DTRAIN_FAILURE_FILE": "/nowhere",
        "DTRAIN_OF_A_LATER_RELEASE": "1",
        "GLOO_SOCKET_IFNAME": "eth7",
        "OMP_NUM_THREADS": "5",
        "MINE": "kept",
    }
    result = run(ENVIRONMENT, env=stale)
    env = environments(result)[1]
    assert len(result.summary) == 1
    assert "MASTER_ADDR, MASTER_PORT, RANK" in result.summary[0]
    assert {name for name, value in stale.items() if env.get(name) == value} == {"MINE", "OMP_NUM_THREADS"}
    assert env["TORCHELASTIC_USE_AGENT_STORE"] == "True"  # of this launch, which serves the store
    assert env["MASTER_ADDR"] == "127.0.0.1"


def test_store_port_is_bound_before_ranks_start(run):
    result = run(
        """
        import os, socket
        address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        socket.create_connection(address).close()
        stranger = socket.socket()
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            stranger.bind(address)
        except OSError:
            print("taken")
        """
    )
    assert (result.code, sorted(result.out.splitlines())) == (0, ["[rank 0] taken", "[rank 1] taken"])


def test_rank_inherits_only_expected_descriptors(run):
    source = """
    import os
    names = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            names.append(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:  # the folder that was being listed
            pass
    print(sorted(os.path.basename(name.split(":")[0]) for name in names))
    """
    result = run(source, stdin=subprocess.DEVNULL)
    # The memory for its last step.
    # Standard output and error, where it reports its progress, the pipe of questions, and the file of the signal handler.
    has = [["memfd", "null", *["pipe"] * 4, f"rank-{rank:05d}.stacks"] for rank in range(2)]
    assert set(result.out.splitlines()) == {f"[rank {rank}] {names}" for rank, names in enumerate(has)}


def test_script_name_starting_with_dash_works(run):
    result = run("print(__file__.rpartition('/')[2])", n=1, name="--odd.py", target=["--", "./--odd.py"])
    assert (result.code, result.out) == (0, "--odd.py\n"), result.err


WHO_AM_I = """
    import sys
    main = sys.modules["__main__"]
    print(__name__, __file__, __package__, __spec__, __loader__ is not None, __builtins__, __doc__)
    print(sys.argv, sys.path, main.__dict__ is globals(), sorted(globals()))
    print(sys.flags.safe_path, sys.stdin is not None)
"""


@pytest.mark.parametrize("safe", ["", "1"])
@pytest.mark.parametrize("how", ["absolute", "relative", "link"])
def test_script_environment_matches_plain_python(run, tmp_path, how, safe):
    (tmp_path / "link.py").symlink_to(tmp_path / "deep" / "script.py")
    target = {"absolute": str(tmp_path / "deep/script.py"), "relative": "deep/script.py", "link": "link.py"}[how]
    env = {"PYTHONSAFEPATH": safe}
    result = run(WHO_AM_I, "a", n=1, name="deep/script.py", target=[target], env=env)
    plain = subprocess.run(
        [sys.executable, target, "a"], cwd=tmp_path, env={**os.environ, **env}, capture_output=True, text=True, timeout=60
    )
    assert (result.code, result.out) == (0, plain.stdout), result.err


@pytest.mark.parametrize("module", ["pack.tool", "pack"])
def test_module_environment_matches_plain_python(run, tmp_path, module):
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack/__init__.py").write_text("import sys\nprint('parent sees', sys.argv)\n")
    source = """
    import sys
    from . import __name__ as parent
    print(__name__, __file__, __package__, __spec__.name, parent, sys.argv, sys.path[0])
    """
    name = "pack/__main__.py" if module == "pack" else "pack/tool.py"
    result = run(source, "--help", "-n", n=1, name=name, target=["-m", module])
    plain = subprocess.run(
        [sys.executable, "-m", module, "--help", "-n"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert result.code == 0, result.err
    assert result.out.replace("['-m', '--help', '-n']", "['-m', ...]") == plain.stdout.replace(
        "['-m', '--help', '-n']", "['-m', ...]"
    )


def test_modules_of_launcher_are_not_importable_by_script(run):
    result = run("import rank_records", n=1)
    assert result.code == 1
    assert "ModuleNotFoundError: No module named 'rank_records'" in result.summary[0]


def test_modules_beside_script_are_importable_but_not_those_of_cwd(run, tmp_path):
    (tmp_path / "in_cwd.py").write_text("")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep/beside.py").write_text("")
    result = run("import beside\nimport in_cwd", n=1, name="deep/script.py")
    assert result.code == 1
    assert "No module named 'in_cwd'" in result.err


@pytest.mark.parametrize("as_module", [False, True])
def test_multiprocessing_works_inside_a_rank(run, as_module):
    source = """
    import multiprocessing, os

    def square(x):
        return x * x, os.environ["RANK"]

    if __name__ == "__main__":
        for method in ("spawn", "fork", "forkserver"):
            with multiprocessing.get_context(method).Pool(2) as pool:
                print(method, pool.map(square, range(3)))
    """
    result = run(source, target=["-m", "script"] if as_module else None)
    assert result.code == 0, result.err
    for rank in (0, 1):
        lines = [line for line in result.out.splitlines() if line.startswith(f"[rank {rank}] ")]
        squares = [(k * k, str(rank)) for k in range(3)]
        assert lines == [f"[rank {rank}] {method} {squares}" for method in ("spawn", "fork", "forkserver")]


def test_main_module_is_available_to_threads_and_exit_handlers(run):
    source = """
    import atexit, pickle, threading, time

    class Point:
        pass

    atexit.register(lambda: print("exit", pickle.loads(pickle.dumps(Point())).__class__.__name__))
    threading.Thread(target=lambda: (time.sleep(0.2), print("thread", len(pickle.dumps(Point))))).start()
    """
    result = run(source, n=1)
    assert result.code == 0, result.err
    assert [line.split()[0] for line in result.out.splitlines()] == ["thread", "exit"]


def test_nested_launch_works_inside_a_rank(run):
    source = """
    import os, subprocess, sys
    if sys.argv[1:] == ["inner"]:
        print(os.environ["RANK"], os.environ["WORLD_SIZE"])
    else:
        launch = [sys.executable, "-m", "dtrain", "launch", "-n", "3", "--log-ranks", "all"]
        sys.exit(subprocess.call([*launch, __file__, "inner"]))
    """
    result = run(source, n=1)
    assert result.code == 0, result.err
    assert sorted(result.out.splitlines()) == [f"[rank {r}] {r} 3" for r in range(3)]


def test_failure_record_is_written_before_exit_handlers_run(run):
    source = """
    import atexit, json, os
    atexit.register(lambda: print(json.load(open(os.environ["DTRAIN_FAILURE_FILE"]))["message"]))
    raise ValueError("written already")
    """
    result = run(source, n=1)
    assert (result.code, result.out) == (1, "written already\n")


def test_unwritable_failure_record_keeps_traceback_and_exit_code(run):
    source = """
    import os, shutil
    shutil.rmtree(os.environ["DTRAIN_RUN_DIR"])
    open(os.environ["DTRAIN_RUN_DIR"], "w").close()  # a file in its place
    raise ValueError("still shown")
    """
    result = run(source, n=1)
    assert result.code == 1
    assert "could not record its failure" in result.err
    assert "ValueError: still shown" in result.err


def test_failure_record_is_written_after_run_dir_was_removed(run):
    result = run("import os, shutil; shutil.rmtree(os.environ['DTRAIN_RUN_DIR']); raise ValueError('still named')", n=1)
    assert result.code == 1
    assert result.summary[-1].endswith(": ValueError: still named")


def test_two_ranks_reduce_with_plain_torch(run):
    result = run(
        """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        total = torch.tensor([dist.get_rank() + 1.0])
        dist.all_reduce(total)
        print(total.item())
        dist.destroy_process_group()
        """,
        options=["--grace", "60"],
    )
    assert result.code == 0, result.err
    assert sorted(result.out.splitlines()) == ["[rank 0] 3.0", "[rank 1] 3.0"]


@pytest.mark.parametrize("options", [[], ["--no-preload"]], ids=["preload", "no preload"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_archive_environment_matches_plain_python(run, tmp_path, ranks, options):
    source = f"{textwrap.dedent(WHO_AM_I)}\nimport helper\nprint(helper.VALUE)\n"
    with zipfile.ZipFile(tmp_path / "app.pyz", "w") as archive:
        archive.writestr("__main__.py", source)
        archive.writestr("helper.py", "VALUE = 5\n")
    result = run("", "a", n=ranks, target=["app.pyz"], options=["--prefix", "", *options])
    command = [sys.executable, "app.pyz", "a"]
    plain = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    assert result.code == 0, result.err
    assert sorted(result.out.splitlines()) == sorted(plain.stdout.splitlines() * ranks)


def test_script_from_standard_input_is_refused(run, tmp_path):
    (tmp_path / "seven.py").write_text("raise SystemExit(7)")
    with open(tmp_path / "seven.py") as file:
        result = run("", target=["/dev/stdin"], stdin=file)
    assert result.code == 2
    assert "'/dev/stdin' is an open file of the launcher" in result.err


@pytest.mark.parametrize(
    ("env", "options", "ranks", "warns"),
    [
        ({"OMP_PROC_BIND": "true"}, [], 2, True),
        ({"OMP_PLACES": "cores"}, [], 2, True),
        ({"OMP_PROC_BIND": "false", "OMP_PLACES": "cores"}, [], 2, False),
        ({"OMP_PROC_BIND": "true"}, ["--bind"], 2, False),
        ({"OMP_PROC_BIND": "true"}, [], 1, False),
    ],
)
def test_binding_of_threads_to_the_same_cores_is_reported(run, env, options, ranks, warns):
    result = run("pass", n=ranks, env=env, options=options)
    assert result.code == 0
    assert ("to the same cores. Unset OMP_P" in result.err) == warns, result.err


def test_preload_adds_modules_to_those_of_the_script(run):
    source = "import sys; print([name in sys.modules for name in ('torch', 'colorsys')]); import torch"
    result = run(source, n=1, options=["--preload", "colorsys"])
    assert (result.code, result.out) == (0, "[True, True]\n"), result.err
