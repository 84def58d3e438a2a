"""What a rank runs: ``python rank.py script|module TARGET ARGS...``, or ``run`` in a fork. Like ``python TARGET ARGS...``.

The one difference: an exception that leaves the script is recorded for the launcher at that moment, before the
interpreter runs exit handlers. Those may take long, and let the peers fail first.

The script runs in a ``__main__`` module that stays in place until the process ends, unlike with ``runpy.run_path``:
threads and exit handlers of the script may still pickle by that name.
"""

from __future__ import annotations

import sys

# ruff: noqa: E402 - before anything is imported
_INITIAL_MODULES = frozenset(sys.modules)

if __name__ == "__main__" and not sys.flags.safe_path:
    del sys.path[0]  # this file's folder: its modules must not shadow anybody's

import atexit
import builtins
import importlib.abc
import importlib.util
import inspect
import os
import signal
import traceback
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType, TracebackType

from dtrain import heartbeats, launch_protocol
from dtrain.launch.spawn.interpreter import find_shadowed_modules, first_import_folder, parse_flags
from dtrain.launch.spawn.rank_diagnostics import format_folded_traceback, register_stack_dump

_MAIN_MODULE_DEFAULTS: dict[str, object] = {"__annotations__": {}, "__cached__": None}


def main() -> None:
    """Run the target named on the command line; leaves by ``SystemExit`` unless the script ends by itself."""
    for variable in (launch_protocol.HEARTBEAT_FD, launch_protocol.DUMP_REQUEST_FD):
        if variable in os.environ:
            os.set_inheritable(
                int(os.environ[variable]), False
            )  # they had to come through exec, and are for this process alone
    kind, target, *args = sys.argv[1:]
    _unload_shadowed(kind, target)
    run_target(kind, target, args)


def _unload_shadowed(kind: str, target: str) -> None:
    """Let the program import modules of its own that have the name of one that was only loaded for this bootstrap.

    Mutates: ``sys.modules``.
    """
    try:
        folder = first_import_folder(kind, target)
        names = set() if folder is None else set(find_shadowed_modules(folder)) - _INITIAL_MODULES
    except OSError:
        return  # nothing can be imported from there
    for name in list(sys.modules):
        if name.partition(".")[0] in names:
            del sys.modules[name]


def run_target(kind: str, target: str, args: list[str]) -> None:
    """Run a script, or a module as in ``python -m``; leaves by ``SystemExit`` unless it ends by itself.

    Mutates: what a fresh interpreter would have set for it: ``sys.argv``, ``sys.path``, ``sys.modules["__main__"]``.
    At the end, the exit handlers.
    """
    sys.argv = [target, *args]
    sys.orig_argv = interpreter_command(kind, target, args)
    owner = os.getpid()  # a copy that the script forks is not the rank: its exceptions are not the rank's
    rank, record = int(os.environ[launch_protocol.RANK]), Path(os.environ[launch_protocol.FAILURE_FILE])
    heartbeats.connect_from_env(os.environ, rank)
    run_dir = Path(os.environ[launch_protocol.RUN_DIR])
    interrupted = launch_protocol.interrupted_file(run_dir)
    if launch_protocol.DUMP_REQUEST_FD in os.environ:
        register_stack_dump(launch_protocol.stacks_file(run_dir, rank))
    try:
        code, module = _load_script(target) if kind == "script" else _load_module(target)
        sys.modules["__main__"] = module
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # one that came meanwhile is raised here
        exec(code, module.__dict__)
    except SystemExit as error:
        _record_failure(rank, record, error, owner)
        raise
    except BaseException as error:  # noqa: BLE001 - everything else ends the interpreter as well; here it is reported
        error.with_traceback(_strip_bootstrap_frames(error.__traceback__))
        told = _record_failure(rank, record, error, owner)
        if not (isinstance(error, KeyboardInterrupt) and interrupted.exists()):  # a Ctrl-C says where it came from by itself
            _print_exception(error, told=told)
        raise SystemExit(launch_protocol.exit_code_for(error)) from None
    finally:
        atexit.register(_ignore_handled_signals)  # runs once the script's threads have ended


def interpreter_command(kind: str, target: str, args: list[str]) -> list[str]:
    """The command line by which a plain interpreter would run the target."""
    return [sys.executable, *parse_flags(sys.orig_argv), *(["-m"] if kind == "module" else []), target, *args]


def _load_script(path: str) -> tuple[CodeType, ModuleType]:
    """The code of a script and its empty ``__main__``. Mutates: ``sys.path``, whose first entry becomes its folder."""
    full = os.path.abspath(path)
    if not sys.flags.safe_path:
        sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    code = compile(Path(full).read_bytes(), full, "exec", dont_inherit=True)
    return code, _main_module(file=full, loader=SourceFileLoader("__main__", full))


def _load_module(name: str) -> tuple[CodeType, ModuleType]:
    """The code of ``python -m name`` and its empty ``__main__``. Mutates: ``sys.path``, ``sys.argv[0]``."""
    if not sys.flags.safe_path:
        sys.path.insert(0, os.getcwd())
    sys.argv[0] = "-m"  # what the parent packages see while they are imported, as with python -m
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    if spec is None or not isinstance(spec.loader, importlib.abc.InspectLoader):
        raise ModuleNotFoundError(f"no module named {name!r} that can be run", name=name)
    code = spec.loader.get_code(spec.name)
    if code is None:
        raise ImportError(f"module {name!r} has no code to run", name=name)
    module = _main_module(file=spec.origin, loader=spec.loader)
    module.__spec__ = spec  # multiprocessing's children import their parent's main module by this name
    module.__package__ = spec.parent
    module.__dict__["__cached__"] = spec.cached
    sys.argv[0] = spec.origin or name
    return code, module


def _main_module(*, file: str | None, loader: importlib.abc.Loader) -> ModuleType:
    module = ModuleType("__main__")
    module.__dict__.update(__file__=file, __loader__=loader, __builtins__=builtins)
    # Whether a main module begins with these depends on the version of Python: as in the one we were started in.
    module.__dict__.update(
        {name: value for name, value in _MAIN_MODULE_DEFAULTS.items() if name in sys.modules["__main__"].__dict__}
    )
    return module


def _ignore_handled_signals() -> None:
    """Ignore the signals that the script has handled: when the interpreter takes its modules down, it gives them their default
    back, which is death, and a rank that has saved and leaves with its exit code would end by a request that comes late.

    Mutates: this process's signal handling.
    """
    for number in {*launch_protocol.ENDING_SIGNALS, *launch_protocol.FORWARDED_SIGNALS} - {
        signal.SIGINT
    }:  # Ctrl-C ends whatever is left
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_IGN)


def _strip_bootstrap_frames(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the script's first frame on."""
    while trace is not None and os.path.dirname(trace.tb_frame.f_code.co_filename) == os.path.dirname(__file__):
        trace = trace.tb_next
    return trace


def _record_failure(rank: int, path: Path, error: BaseException, owner: int) -> bool:
    """Write the failure record. Return True if the launcher has the record, and shows the traceback."""
    if os.getpid() != owner:
        return False
    told = heartbeats.is_connected()
    failure = launch_protocol.RankFailure.from_exception(
        rank, error, short_traceback=_try_format_folded(error), already_printed=not (told and _is_default_hook(sys.excepthook))
    )
    if failure.exit_code == 0:
        return False
    try:
        failure.write(path)
        heartbeats.report(heartbeats.ProgressKind.FAILED, failure.exit_code)  # it may take long to end, or for ever
    except OSError as problem:  # a full disk costs the record, not the traceback that follows
        print(f"dtrain: launch: rank {rank} could not record its failure: {problem}", file=sys.stderr)
        return False
    return told


def _try_format_folded(error: BaseException) -> str:
    try:
        return format_folded_traceback(error)
    except Exception:  # noqa: BLE001 - an exception of the script may be of any shape; then its frames are shown as they are
        return ""


def _is_default_hook(hook: object) -> bool:
    """Return True if ``hook`` is Python's own, perhaps inside the one by which torch marks the lines with the rank."""
    if getattr(hook, "__module__", "") == "torch.distributed.distributed_c10d":
        hook = inspect.getclosurevars(hook).nonlocals.get("old_hook")  # type: ignore[arg-type]
    return hook is sys.__excepthook__


def _print_exception(error: BaseException, *, told: bool) -> None:
    """Print as the interpreter would, through the script's own ``sys.excepthook`` if it has one.

    Args:
        error: the exception that left the script.
        told: if True, the launcher shows the traceback, and the interpreter's own hook need not.

    Mutates: ``sys.last_type`` and its like, by which exit handlers find the exception.
    """
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    if sys.version_info >= (3, 12):
        sys.last_exc = error
    if told and _is_default_hook(sys.excepthook):
        return
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except Exception:  # noqa: BLE001 - as the interpreter does: report the hook's error and print by the plain way
        print("Error in sys.excepthook:", file=sys.stderr)
        traceback.print_exc()
        print("\nOriginal exception was:", file=sys.stderr)
        traceback.print_exception(error)


if __name__ == "__main__":
    main()
