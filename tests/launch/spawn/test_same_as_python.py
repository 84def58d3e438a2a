"""A rank cannot tell whether it is a fork of the preloaded process, an interpreter of its own, or has no launcher at all."""

from __future__ import annotations

import json
import os
import py_compile
import re
import subprocess
import sys
import textwrap

import pytest

# The facts that a script can see of its interpreter; each entry is one fact.
LOOK = """
    import atexit, faulthandler, gc, json, locale, logging, multiprocessing, os, signal, sys, threading, time, warnings
    import torch

    main = sys.modules["__main__"]

    def disposition(number):
        handler = signal.getsignal(number)
        return str(handler) if isinstance(handler, signal.Handlers) or handler is None else handler.__qualname__

    def began():
        ticks = float(open("/proc/self/stat").read().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
        return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks

    def age_of_logging():  # a record knows the time since logging was loaded
        record = logging.makeLogRecord({})
        return record.created - logging.LogRecord("", 0, "", 0, "", None, None).relativeCreated / 1000

    facts = {
        "name": __name__,
        "main module": main.__dict__ is globals(),
        "dunders of the main module": sorted(name for name in list(globals()) if name.startswith("__")),
        "file": __file__,
        "spec, package, loader": [str(__spec__), str(__package__), type(__loader__).__name__],
        "argv": sys.argv,
        "end of orig_argv": sys.orig_argv[-3:],
        "path": sys.path,
        "flags": str(sys.flags),
        "signals": {int(n): disposition(n) for n in sorted(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})},
        "blocked signals": sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ()))),
        "threads": [thread.name for thread in threading.enumerate()],
        "kernel's number of the main thread": threading.main_thread().native_id - os.getpid(),
        "logging began in this process": age_of_logging() > began() - 0.05,
        "length of the key of multiprocessing": len(multiprocessing.current_process().authkey),
        "is main thread": threading.current_thread() is threading.main_thread(),
        "warning filters": [[f[0], str(f[1]), f[2].__name__, str(f[3]), f[4]] for f in warnings.filters],
        "exit handlers": atexit._ncallbacks(),
        "excepthook": sys.excepthook is sys.__excepthook__,
        "collector": [gc.isenabled(), gc.get_threshold()],
        "standard streams": [
            [s.name, s.encoding, s.errors, s.line_buffering, s.write_through, s.isatty()]
            for s in (sys.stdin, sys.stdout, sys.stderr)
        ],
        "standard input": os.readlink("/proc/self/fd/0"),
        "working directory": os.getcwd(),
        "umask": os.umask(0o22),
        "limits": [sys.getrecursionlimit(), sys.getswitchinterval()],
        "cores": sorted(os.sched_getaffinity(0)),
        "niceness": os.nice(0),
        "process name": open("/proc/self/comm").read(),
        "main process": [multiprocessing.current_process().name, str(multiprocessing.parent_process())],
        "start method": multiprocessing.get_start_method(),
        "faulthandler": faulthandler.is_enabled(),
        "locale": locale.setlocale(locale.LC_ALL),
        "tracing": [str(sys.gettrace()), str(sys.getprofile())],
        "threads of torch": torch.get_num_threads(),
        "cuda": torch.cuda.is_initialized(),
        "default dtype": str(torch.get_default_dtype()),
        "gradients": torch.is_grad_enabled(),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"),
    }
    print("FACTS " + json.dumps(facts))
"""
WAYS = ["preloaded", "plain"]
FACTS = re.findall(r'^        "(.+?)": ', LOOK, re.MULTILINE)


def facts(text):
    return next(json.loads(line.removeprefix("FACTS ")) for line in text.splitlines() if line.startswith("FACTS "))


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """The facts as seen under the launcher in both ways, and by a plain ``python script.py``."""
    folder = tmp_path_factory.mktemp("look")
    script = folder / "look.py"
    script.write_text(textwrap.dedent(LOOK))
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "PYTHONUNBUFFERED": "1"}
    commands = {
        "python": [sys.executable],
        "preloaded": [sys.executable, "-m", "dtrain", "launch", "-n", "1", "--preload", "torch"],
        "plain": [sys.executable, "-m", "dtrain", "launch", "-n", "1", "--no-preload"],
    }

    def look(command):
        done = subprocess.run(
            [*command, str(script), "--flag", "a b"],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=90,
        )
        assert done.returncode == 0, done.stderr
        return facts(done.stdout)

    return {way: look(command) for way, command in commands.items()}


@pytest.mark.costly
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("fact", FACTS)
def test_rank_fact_equals_plain_python(seen, way, fact):
    assert seen[way][fact] == seen["python"][fact]


def test_every_fact_is_compared(seen):
    assert sorted(seen["python"]) == sorted(FACTS)


PRELOAD = {"preloaded": ["--preload", "json"], "plain": ["--no-preload"]}


@pytest.mark.costly
@pytest.mark.parametrize("way", WAYS)
def test_random_streams_differ_between_ranks(run, way):
    source = """
    import json, multiprocessing, os, random
    import numpy, torch
    key = multiprocessing.current_process().authkey.hex()
    print(json.dumps([random.random(), numpy.random.rand(), torch.rand(1).item(), key]))
    """
    options = ["--preload", "torch,numpy"] if way == "preloaded" else ["--no-preload"]
    result = run(source, options=["--log-ranks", "all", *options])
    drawn = [json.loads(line.partition("] ")[2]) for line in result.out.splitlines()]
    assert len(drawn) == 2
    assert all(a != b for a, b in zip(*drawn, strict=True))


@pytest.mark.parametrize("way", WAYS)
def test_script_exit_handlers_threads_and_children_end_normally(run, way):
    source = """
    import atexit, os, threading, time
    atexit.register(lambda: print("handler", flush=True))
    threading.Thread(target=lambda: (time.sleep(0.3), print("thread", flush=True))).start()
    if os.fork() == 0:
        os._exit(3)
    print("child", os.waitstatus_to_exitcode(os.wait()[1]))
    """
    result = run(source, n=1, options=PRELOAD[way])
    assert result.code == 0, result.err
    assert result.out.splitlines() == ["child 3", "thread", "handler"]


@pytest.mark.parametrize("way", WAYS)
def test_spawned_workers_import_the_script(run, way):
    source = """
    import multiprocessing

    def work(queue):
        queue.put(__name__)

    if __name__ == "__main__":
        context = multiprocessing.get_context("spawn")
        queue = context.Queue()
        worker = context.Process(target=work, args=(queue,))
        worker.start()
        print(queue.get(timeout=60))
        worker.join()
        print(worker.exitcode)
    """
    result = run(source, n=1, options=PRELOAD[way])
    assert (result.code, result.out.split()) == (0, ["__mp_main__", "0"]), result.err


@pytest.mark.parametrize("way", WAYS)
def test_processes_show_command_of_script(start, way):
    job = start(
        """
        import os, time
        open(f"{os.environ['FOLDER']}/{os.environ['RANK']}", "w").write(str(os.getpid()))
        time.sleep(600)
        """,
        "--name",
        "mine",
        options=PRELOAD[way],
    )
    for pid in job.wait_for("0", "1"):
        assert job.processes()[int(pid)].split()[-3:] == [str(job.script), "--name", "mine"]
    job.process.terminate()
    assert job.wait().code == 143


@pytest.mark.parametrize("own", ["colorsys.py", "colorsys.pyc", "colorsys/__init__.py"], ids=["file", "compiled", "package"])
@pytest.mark.parametrize(
    ("name", "target", "whose"),
    [
        ("script.py", None, "the script's folder"),
        ("package/train.py", ["-m", "package.train"], "the current folder"),
        ("script.py", ["-m", "script"], "the current folder"),
    ],
    ids=["script", "module of a package", "module"],
)
def test_script_module_shadows_preloaded_module(run, tmp_path, own, name, target, whose):
    path = tmp_path / own
    path.parent.mkdir(exist_ok=True)
    path.write_text("HERE = True\n")
    if path.suffix == ".pyc":
        py_compile.compile(str(path), cfile=str(path))
    result = run("import colorsys; print(colorsys.HERE)", n=1, name=name, target=target, options=["--preload", "colorsys"])
    assert (result.code, result.out) == (0, "True\n")
    assert len(result.summary) == 1
    assert f"{whose} has a 'colorsys' of its own; starting plain interpreters" in result.summary[0]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("own", ["json.py", "traceback.py", "dataclasses.py", "logging/__init__.py"])
def test_script_module_shadows_module_of_launcher(run, tmp_path, way, own):
    path = tmp_path / "program" / own  # not in the current folder, where they would be the launcher's, too
    path.parent.mkdir(parents=True)
    path.write_text("HERE = True\n")
    module = own.partition(".")[0].partition("/")[0]
    source = f"import {module}; print({module}.HERE); raise SystemExit('and its end is as usual')"
    result = run(source, n=1, name="program/script.py", options=PRELOAD[way])
    assert (result.code, result.out) == (1, "True\n")
    assert "and its end is as usual\n" in result.err
    assert "Traceback" not in result.err


@pytest.mark.parametrize(
    ("name", "target", "env", "own"),
    [
        ("elsewhere/script.py", None, {}, "colorsys.py"),
        ("script.py", None, {"PYTHONSAFEPATH": "1"}, "colorsys.py"),
        ("script.py", None, {}, "colorsys.txt"),
        ("script.py", None, {}, "colorsys/data"),
        ("script.py", None, {}, "time.py"),
    ],
    ids=["another folder", "safe path", "no module", "no package", "built in"],
)
def test_unimportable_files_shadow_nothing(run, tmp_path, name, target, env, own):
    (tmp_path / own).parent.mkdir(exist_ok=True)
    (tmp_path / own).write_text("raise ImportError('this one')\n")
    source = "import colorsys, time; print(hasattr(colorsys, 'rgb_to_hsv'))"
    result = run(source, n=1, name=name, target=target, env=env, options=["--preload", "colorsys"])
    assert (result.code, result.out, result.errors) == (0, "True\n", "")


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (
            "import threading, time; threading.Thread(target=time.sleep, args=(600,), daemon=True).start()",
            "importing json, unsafe_module started 1 thread;",
        ),
        ("raise RuntimeError('broken')", "unsafe_module cannot be imported here (RuntimeError: broken)"),
        ("import os; os._exit(5)", "the preloaded process has ended"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "the preloaded process has ended"),
    ],
    ids=["threads", "exception", "exit", "crash"],
)
def test_unsafe_fork_starts_plain_interpreters_with_notice(run, tmp_path, module, why):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "unsafe_module.py").write_text(module + "\n")
    env = {"PYTHONPATH": str(tmp_path / "elsewhere")}
    options = ["--log-ranks", "all", "--preload", "json,unsafe_module"]
    result = run("import os; print(os.environ['RANK'])", options=options, env=env)
    assert (result.code, sorted(result.out.splitlines())) == (0, ["[rank 0] 0", "[rank 1] 1"])
    assert len(result.summary) == 1
    assert why in result.summary[0]
    assert "--no-preload" in result.summary[0]
