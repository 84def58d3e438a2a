"""Run the program of a rank like ``python TARGET ARGS...``: ``python rank_main.py script|module TARGET ARGS...``, or in a fork.

There is one difference: an exception that leaves the script is recorded for the launcher at once, before the interpreter runs
exit handlers. Exit handlers may take long, and the peers would fail first.

The script runs in a ``__main__`` module that stays in place until the process ends, unlike with ``runpy.run_path``: threads and
exit handlers of the script may still pickle by that name.
"""

from __future__ import annotations

import sys

# ruff: noqa: E402 - the set must be computed before other imports
_INITIAL_MODULES = frozenset(sys.modules)

if __name__ == "__main__" and not sys.flags.safe_path:
    # Modules in this file's folder must not shadow modules of the program.
    del sys.path[0]

import atexit
import builtins
import contextlib
import faulthandler
import importlib.abc
import importlib.util
import inspect
import os
import signal
import sysconfig
import threading
import traceback
import zipfile
import zipimport
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NoReturn

import dtrain
from dtrain import launch_protocol
from dtrain.launch import heartbeats, recovery
from dtrain.launch.processes import FD_VARIABLES, find_shadowed_modules, first_import_folder, parse_flags

_MAIN_MODULE_DEFAULTS: dict[str, object] = {"__annotations__": {}, "__cached__": None}


def main() -> None:
    """Run the target on the command line, see ``run_target``.

    Mutates: ``sys.modules``, which loses the modules that this bootstrap imported and that the program shadows.
    """
    for variable in FD_VARIABLES:
        if variable in os.environ:
            # The descriptors were inherited through exec, and belong to this process alone.
            os.set_inheritable(int(os.environ[variable]), False)
    kind, target, *args = sys.argv[1:]
    names: set[str] = set()
    # From a folder that cannot be read, no module can be imported.
    with contextlib.suppress(OSError):
        folder = first_import_folder(kind, target)
        names = set() if folder is None else set(find_shadowed_modules(folder)) - _INITIAL_MODULES
    for name in list(sys.modules):
        if name.partition(".")[0] in names:
            del sys.modules[name]
    run_target(kind, target, args)


def run_target(kind: str, target: str, args: list[str]) -> None:
    """Run a script, or a module as in ``python -m``. An exception of the script ends the process; ``SystemExit`` is raised.

    Mutates: the state that a fresh interpreter would have: ``sys.argv``, ``sys.path``, ``sys.modules["__main__"]``.
    At the end, the exit handlers.
    """
    sys.argv = [target, *args]
    sys.orig_argv = interpreter_command(kind, target, args)
    # Exceptions in forks of the script are not exceptions of the rank.
    owner = os.getpid()
    rank, record = int(os.environ[launch_protocol.RANK]), Path(os.environ[launch_protocol.FAILURE_FILE])
    heartbeats.connect_from_env(os.environ, rank)
    recovery.watch_steps(os.environ)
    run_dir = Path(os.environ[launch_protocol.RUN_DIR])
    interrupted = launch_protocol.interrupted_file(run_dir)
    if launch_protocol.DUMP_REQUEST_FD in os.environ:
        register_stack_dump(launch_protocol.stacks_file(run_dir, rank))
    failed_with: int | None = None
    try:
        code, module = _load_script(target) if kind == "script" else _load_module(target)
        sys.modules["__main__"] = module
        # A pending Ctrl-C is raised here.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        exec(code, module.__dict__)
    except SystemExit as error:
        _record_failure(rank, record, error, owner)
        raise
    except BaseException as error:  # noqa: BLE001 - every other exception ends the interpreter, too, and is reported here
        trace = error.__traceback__
        while trace is not None and os.path.dirname(trace.tb_frame.f_code.co_filename) == os.path.dirname(__file__):
            trace = trace.tb_next
        # The traceback begins at the script's first frame.
        error.with_traceback(trace)
        has_launcher = _record_failure(rank, record, error, owner)
        # The launcher explains a Ctrl-C itself.
        if not (isinstance(error, KeyboardInterrupt) and interrupted.exists()):
            _print_exception(error, has_launcher=has_launcher)
        failed_with = launch_protocol.exit_code_for(error)
    finally:
        # The handler runs after the script's threads have ended.
        atexit.register(_ignore_handled_signals)
    if failed_with is not None:
        _exit_after_failure(failed_with)


def _exit_after_failure(code: int) -> NoReturn:
    """End the process as the interpreter does, up to the exit handlers, and no further.

    The destructors of C++ libraries would follow. After a collective that failed, one in about ten ranks aborted in them
    ("terminate called without an active exception", gloo of torch 2.13), so that the job ended with 134.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        # A script may have closed the stream, and its reader may be gone.
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


def interpreter_command(kind: str, target: str, args: list[str]) -> list[str]:
    """Return the command line with which a plain interpreter would run the target."""
    return [sys.executable, *parse_flags(sys.orig_argv), *(["-m"] if kind == "module" else []), target, *args]


def _load_script(path: str) -> tuple[CodeType, ModuleType]:
    """Return the code of a script and an empty ``__main__``. Mutates: ``sys.path``, which begins with the script's folder."""
    full = os.path.abspath(path)
    if zipfile.is_zipfile(full):
        # Python searches an archive first, also in safe-path mode.
        sys.path.insert(0, full)
        return _load_main_of(zipimport.zipimporter(full).find_spec("__main__"), "__main__")
    if not sys.flags.safe_path:
        sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    code = compile(Path(full).read_bytes(), full, "exec", dont_inherit=True)
    return code, _main_module(file=full, loader=SourceFileLoader("__main__", full))


def _load_module(name: str) -> tuple[CodeType, ModuleType]:
    """Return the code of ``python -m name`` and an empty ``__main__``. Mutates: ``sys.path``, ``sys.argv[0]``."""
    if not sys.flags.safe_path:
        sys.path.insert(0, os.getcwd())
    # Parent packages see this value during their import, as with python -m.
    sys.argv[0] = "-m"
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    code, module = _load_main_of(spec, name)
    sys.argv[0] = module.__file__ or name
    return code, module


def _load_main_of(spec: ModuleSpec | None, name: str) -> tuple[CodeType, ModuleType]:
    """Return the code of the module ``spec`` and an empty ``__main__`` with its names."""
    # The loader of zip archives is not registered as an InspectLoader.
    loader: Any = None if spec is None else spec.loader
    if spec is None or not hasattr(loader, "get_code"):
        raise ModuleNotFoundError(f"no module named {name!r} that can be run", name=name)
    code = loader.get_code(spec.name)
    if code is None:
        raise ImportError(f"module {name!r} has no code to run", name=name)
    module = _main_module(file=spec.origin, loader=loader)
    # Children of multiprocessing import the main module of their parent by this name.
    module.__spec__ = spec
    module.__package__ = spec.parent
    module.__dict__["__cached__"] = spec.cached
    return code, module


def _main_module(*, file: str | None, loader: importlib.abc.Loader) -> ModuleType:
    module = ModuleType("__main__")
    module.__dict__.update(__file__=file, __loader__=loader, __builtins__=builtins)
    # The initial names of a main module depend on the version of Python. Copy them from the current main module.
    module.__dict__.update(
        {name: value for name, value in _MAIN_MODULE_DEFAULTS.items() if name in sys.modules["__main__"].__dict__}
    )
    return module


def _ignore_handled_signals() -> None:
    """Ignore the signals that the script handled, because the interpreter restores their default action during its shutdown.

    Without this function, a late signal would kill a rank that has saved a checkpoint and exits with its own exit code.

    Mutates: this process's signal handling.
    """
    # Ctrl-C must still end the process.
    for number in {*launch_protocol.ENDING_SIGNALS, *launch_protocol.FORWARDED_SIGNALS} - {signal.SIGINT}:
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_IGN)


def _record_failure(rank: int, path: Path, error: BaseException, owner: int) -> bool:
    """Write the failure record. Return True if the launcher has the record and shows the traceback."""
    if os.getpid() != owner:
        return False
    has_launcher = heartbeats.is_connected()
    short_traceback = ""
    # Exceptions of the script may have any form, and then their frames stay unfolded.
    with contextlib.suppress(Exception):
        short_traceback = format_folded_traceback(error)
    failure = launch_protocol.RankFailure.from_exception(
        rank,
        error,
        short_traceback=short_traceback,
        already_printed=not (has_launcher and _is_default_hook(sys.excepthook)),
    )
    if failure.exit_code == 0:
        return False
    try:
        failure.write(path)
        # The exit of this process may take long.
        heartbeats.report(heartbeats.ProgressKind.FAILED, failure.exit_code)
    # A full disk costs the record, not the traceback.
    except OSError as problem:
        print(f"dtrain: launch: rank {rank} could not record its failure: {problem}", file=sys.stderr)
        return False
    return has_launcher


def _is_default_hook(hook: object) -> bool:
    """Return True if ``hook`` is Python's own hook, or torch's wrapper of Python's hook that adds the rank to each line."""
    if getattr(hook, "__module__", "") == "torch.distributed.distributed_c10d":
        hook = inspect.getclosurevars(hook).nonlocals.get("old_hook")  # type: ignore[arg-type]
    return hook is sys.__excepthook__


def _print_exception(error: BaseException, *, has_launcher: bool) -> None:
    """Print an exception as the interpreter would, with the script's own ``sys.excepthook`` if the script has set one.

    Args:
        error: the exception that left the script.
        has_launcher: if True, the launcher shows the traceback, and the interpreter's own hook is not called.

    Mutates: ``sys.last_type`` and the related attributes, which exit handlers may read.
    """
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    if sys.version_info >= (3, 12):
        sys.last_exc = error
    if has_launcher and _is_default_hook(sys.excepthook):
        return
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except Exception:  # noqa: BLE001 - like the interpreter, report the hook's error, then print the default traceback
        print("Error in sys.excepthook:", file=sys.stderr)
        traceback.print_exc()
        print("\nOriginal exception was:", file=sys.stderr)
        traceback.print_exception(error)


def register_stack_dump(path: Path) -> None:
    """Make ``launch_protocol.STACKS_SIGNAL`` write the Python stacks of all threads to ``path``.

    The handler is written in C and takes no lock, so it works while other code holds the interpreter's lock. The handler cannot
    open files, so the file is created now, empty. The launcher removes an empty file at the end.

    Mutates: this process's handler of the signal, which forks inherit. The file stays open.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o666)
    except OSError:
        # A full disk or a read-only folder costs the stacks of a hang, not the rank.
        return
    faulthandler.register(launch_protocol.STACKS_SIGNAL, file=file, all_threads=True, chain=False)


_FOLDED_LIBRARIES = ("dtrain", "torch")
_FOLDED_MARK = "<folded>"


def format_folded_traceback(error: BaseException) -> str:
    """Format ``error`` as Python does, with one line instead of each run of frames of dtrain and torch.

    Frames of the standard library that such a frame called are folded with it. Chained exceptions and members of exception
    groups are folded, too. An exception without frames of the user stays unfolded.

    Args:
        error: the exception with its traceback, which is not changed.

    Returns:
        The text, which ends with a line feed.
    """
    whole = traceback.TracebackException.from_exception(error, compact=True)
    # The error, its causes, its contexts, and the members of exception groups; the list grows during the loop.
    chain = [whole]
    for item in chain:
        chain += [other for other in (item.__cause__, item.__context__, *(getattr(item, "exceptions", None) or ())) if other]
    libraries = {"dtrain": dtrain.__file__, "torch": getattr(sys.modules.get("torch"), "__file__", None)}
    folders = {name: os.path.dirname(os.path.abspath(file)) for name, file in libraries.items() if file is not None}
    if any(_library_of(frame, folders) is None for item in chain for frame in item.stack):
        for item in chain:
            item.stack = _fold_stack(item.stack, folders)
    return "".join(whole.format())


def _library_of(frame: traceback.FrameSummary, folders: dict[str, str]) -> str | None:
    """Return the name of the library that contains ``frame``; None for a frame of the user."""
    return next((name for name, folder in folders.items() if frame.filename.startswith(folder + os.sep)), None)


def _fold_stack(stack: traceback.StackSummary, folders: dict[str, str]) -> traceback.StackSummary:
    """Replace each run of library frames in ``stack`` by one frame."""
    standard = (sysconfig.get_path("stdlib") + os.sep, "<frozen ")
    result = _FoldedStack()
    # Libraries of the current run of frames.
    names: list[str] = []
    for frame in stack:
        owner = _library_of(frame, folders)
        called = bool(names) and frame.filename.startswith(standard) and "-packages" not in frame.filename
        if owner is not None or called:
            names.append(owner or names[-1])
            continue
        if names:
            result.append(_folded_frame(names))
            names = []
        result.append(frame)
    if names:
        result.append(_folded_frame(names))
    return result


def _folded_frame(names: list[str]) -> traceback.FrameSummary:
    """Return the frame that replaces a run of frames of these libraries."""
    libraries = " and ".join(name for name in _FOLDED_LIBRARIES if name in names)
    return traceback.FrameSummary(_FOLDED_MARK, len(names), libraries, lookup_line=False, line="")


class _FoldedStack(traceback.StackSummary):
    """Stack in which one frame may replace a run of frames."""

    def format_frame_summary(self, frame_summary: traceback.FrameSummary, **options: Any) -> str:
        """Format one frame, or the count of a folded run."""
        if frame_summary.filename != _FOLDED_MARK:
            return super().format_frame_summary(frame_summary, **options)
        count = frame_summary.lineno
        return f"  ... {count} frame{'s' * (count != 1)} of {frame_summary.name} (--full-traceback shows them)\n"


if __name__ == "__main__":
    main()
