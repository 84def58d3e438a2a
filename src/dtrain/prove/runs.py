"""Start the ranks of a proof's runs, several runs at a time if there are cores: ``run_all``.

Ranks are forks of one process that has imported torch and the script's packages, so a start takes tenths of a second. A rank
that waits for a lost peer is ended with the run. Every run has a current folder of its own, which is a copy of the script's
current folder.
"""

from __future__ import annotations

import builtins
import json
import multiprocessing.util
import os
import resource
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing.forkserver import ForkServer
from multiprocessing.util import Finalize
from pathlib import Path
from types import ModuleType
from typing import Any

from dtrain import launch_protocol
from dtrain.launch.hang_report import describe_stall
from dtrain.launch.launch_plan import FLIGHT_RECORDER_ENTRIES
from dtrain.launch.local_ranks import PRELOADED, LocalRanks, enter_rank, wait_for_exits
from dtrain.launch.processes import die_with_parent
from dtrain.launch.rank_records import RankEvidence, RankProgress, collect_evidence
from dtrain.prove import preload
from dtrain.prove.run_config import RunConfig

# Time for the other ranks to end after one has failed, so that the first error is recorded. Seconds.
_SETTLE_S = 5.0
# Time for the ranks of a run that hangs to write their stacks and collectives. Seconds.
_ANSWER_S = 10.0
# Named pipe in the folder of a run that becomes readable when the ranks are to write them. Nobody reads its byte.
_REQUEST_PIPE = "request"
# Files above this size are links into the original folder instead of copies. Bytes.
_MAX_COPY_BYTES = 1 << 20
_NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
_HOOKS = ("dtrain.prove.dtrain_hooks", "dtrain.prove.torch_hooks")
_OUTPUT_FOLDERS = ("ckpt", "checkpoints", "runs", "out", "output", "outputs")
_SKIPPED_FOLDERS = (".git", ".venv", "__pycache__", "node_modules", ".nox", ".mypy_cache", ".ruff_cache", ".pytest_cache")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """End of a run.

    Args:
        config: the run.
        codes: exit code of each rank; a negative number is a signal.
        error: first error of a rank, with the place in the script; for a run that took too long, the rank and the collective
            that the other ranks waited for; None without an error.
        timed_out: if True, the run was ended because it took too long.
        follows: if True, the error is that of a rank that waited for another rank.
        seconds: duration of the run.
    """

    config: RunConfig
    codes: tuple[int, ...]
    error: str | None
    timed_out: bool
    follows: bool
    seconds: float

    @property
    def failed(self) -> bool:
        """True if the run did not end as planned."""
        killed = self.config.kill_after is not None and -signal.SIGKILL in self.codes
        return self.timed_out or (any(self.codes) and not killed)


def copy_work_folder(source: Path, destination: Path) -> None:
    """Make ``destination`` look like ``source``, without its outputs: small files are copied, large files are links.

    Folders of checkpoints and hidden folders are left out, so that a run starts from its beginning.
    """
    destination.mkdir(parents=True, exist_ok=True)
    for entry in os.scandir(source):
        target = destination / entry.name
        if entry.name in _SKIPPED_FOLDERS or target.exists() or entry.name.startswith("."):
            continue
        if entry.is_dir():
            names = os.listdir(entry.path) if os.access(entry.path, os.R_OK) else []
            if entry.name not in _OUTPUT_FOLDERS and not any(name.startswith(("step-", "checkpoint")) for name in names):
                target.symlink_to(os.path.realpath(entry.path))
        elif entry.is_file() and entry.stat().st_size <= _MAX_COPY_BYTES:
            shutil.copy2(entry.path, target)
        else:
            target.symlink_to(os.path.realpath(entry.path))


@dataclass(slots=True, eq=False)
class _Running:
    config: RunConfig
    ranks: LocalRanks
    started: float
    deadline: float
    timeout_s: float
    stall: str = ""


def run_all(
    configs: Sequence[RunConfig],
    *,
    slots: int,
    timeout_s: float,
    on_end: Callable[[RunOutcome], None],
) -> None:
    """Run all ``configs``.

    Args:
        configs: runs that do not depend on each other.
        slots: number of ranks that run at a time; a run with more ranks runs alone.
        timeout_s: seconds after which a run is ended.
        on_end: called with each outcome.
    """
    waiting, running = list(configs), list[_Running]()
    try:
        while waiting or running:
            used = sum(run.config.ranks for run in running)
            while waiting and (not running or used + waiting[0].ranks <= slots):
                config = waiting.pop(0)
                running.append(_start(config, timeout_s))
                used += config.ranks
            _wait(running)
            for run in [run for run in running if not run.ranks.running]:
                running.remove(run)
                run.ranks.end()
                on_end(_outcome(run))
    finally:
        for run in running:
            run.ranks.end()


def _start(config: RunConfig, timeout_s: float) -> _Running:
    path, ranks = config.write(), LocalRanks(config.ranks)
    os.mkfifo(path.with_name(_REQUEST_PIPE))
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(launch_protocol.OWNED_PREFIXES)}
    inherited |= {
        launch_protocol.OMP_THREADS: "1",
        **_NO_GPU,
        "PYTHONDONTWRITEBYTECODE": "1",
        **dict.fromkeys(launch_protocol.FLIGHT_RECORDER, FLIGHT_RECORDER_ENTRIES),
    }
    imports = preload.script_imports(Path(config.script))
    for rank in range(config.ranks):
        ranks.fork_from_server(
            run_rank, str(path), ranks.environment(rank, inherited), server=_fork_server(int(config.vary_machine), imports)
        )
    now = time.monotonic()
    return _Running(config=config, ranks=ranks, started=now, deadline=now + timeout_s, timeout_s=timeout_s)


@cache
def _fork_server(hash_seed: int, imports: tuple[str, ...]) -> ForkServer:
    """Return the server of this process whose forks are the ranks of proofs.

    Args:
        hash_seed: seed of ``hash``, and so of the order of sets, in all its forks.
        imports: what the server imports besides what most scripts import; see ``script_imports``.
    """
    server = ForkServer()
    server.set_forkserver_preload([*PRELOADED, *_HOOKS, preload.__name__])
    changed = {"PYTHONHASHSEED": str(hash_seed), preload.IMPORTS: " ".join(imports), **_NO_GPU}
    before = {name: os.environ[name] for name in changed if name in os.environ}
    os.environ.update(changed)
    try:
        server.ensure_running()
    finally:
        for name in changed:
            del os.environ[name]
        os.environ.update(before)
    Finalize(None, server._stop, exitpriority=10)  # type: ignore[attr-defined]
    return server


def _wait(running: list[_Running]) -> None:
    """Wait for the exit of a rank, or for the deadline of a run, whose ranks are killed then."""
    earliest = min(run.deadline for run in running)
    wait_for_exits([run.ranks for run in running], max(0.0, earliest - time.monotonic()))
    for run in running:
        now = time.monotonic()
        if any(exit_.code for exit_ in run.ranks.exits.values()):
            # The peers wait for this rank.
            run.deadline = min(run.deadline, now + (0.5 if run.config.kill_after is not None else _SETTLE_S))
        if now >= run.deadline and run.ranks.running:
            if not any(exit_.code for exit_ in run.ranks.exits.values()):
                run.stall = _describe_hang(run)
            run.ranks.kill()


def _describe_hang(run: _Running) -> str:
    """Ask the running ranks for their stacks and collectives, and return which rank the others wait for, and where."""
    folder, alive = Path(run.config.folder), run.ranks.running
    pipe = os.open(folder / _REQUEST_PIPE, os.O_RDWR | os.O_NONBLOCK)
    os.write(pipe, b"?")
    waiting = [launch_protocol.flight_record_file(folder, rank) for rank in alive]
    deadline = time.monotonic() + _ANSWER_S
    while time.monotonic() < deadline and not all(path.exists() for path in waiting):
        time.sleep(0.05)
    os.close(pipe)
    ranks = [
        RankEvidence(rank=rank, progress=RankProgress(phase="open", at=run.started))
        if rank in alive
        else RankEvidence(rank=rank, exit_code=run.ranks.exits[rank].code)
        for rank in range(run.config.ranks)
    ]
    evidence = collect_evidence(launch_protocol.hang_folder(folder), ranks)
    lines = describe_stall(evidence, world_size=run.config.ranks, timeout_s=run.timeout_s)
    return "; ".join(line.strip() for line in lines)


def _outcome(run: _Running) -> RunOutcome:
    folder, failures = Path(run.config.folder), []
    for path in folder.glob("rank-*.failure.json"):
        record = json.loads(path.read_text(encoding="utf-8"))
        # Another rank's error is the cause of an error in communication.
        follows = "PeerError" in record["error"] or "DistError" in record["error"] or "Connection" in record["error"]
        failures.append((follows, path.stat().st_mtime, record))
    error, follows = run.stall or None, False
    if failures:
        follows, _, first = min(failures, key=lambda item: item[:2])
        error = f"{first['error']} (rank {first['rank']}{', ' + first['where'] if first['where'] else ''})"
    elif not run.stall:
        # A process that ended without an exception may have written a line to its standard error.
        outputs = [path.read_text(encoding="utf-8", errors="replace") for path in sorted(folder.glob("rank-*.err"))]
        lines = [text.strip().rsplit("\n", 1)[-1].strip()[:300] for text in outputs if text.strip()]
        error = lines[0] if lines else None
    return RunOutcome(
        config=run.config,
        codes=tuple(run.ranks.exits[rank].code for rank in range(run.config.ranks)),
        error=error,
        timed_out=bool(run.stall),
        follows=follows,
        seconds=time.monotonic() - run.started,
    )


def run_rank(config_path: str, environment: Mapping[str, str]) -> None:
    """Run the script of a ``RunConfig`` as the main module of this process, and exit with its exit code.

    Args:
        config_path: path of the config, whose folder gets the records and the output.
        environment: all environment variables of the rank.

    Mutates: everything about this process.
    """
    os.setsid()
    die_with_parent(os.getppid())
    enter_rank(environment)
    # The fork of a server has the start method of servers, with which loader workers would run the script again.
    multiprocessing.set_start_method(None, force=True)
    rank, config = int(os.environ["RANK"]), RunConfig.read(Path(config_path))
    for stream, name in ((1, "out"), (2, "err")):
        fd = os.open(Path(config.folder, f"rank-{rank}.{name}"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        os.dup2(fd, stream)
        os.close(fd)
    sys.stdout, sys.stderr = (
        open(fd, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115 - the process ends with them
        for fd in (1, 2)
    )
    _answer_request(Path(config.folder), rank, config.ranks)
    os.chdir(config.work_folder)
    # A killed rank removes none of its temporary files; the proof removes this folder.
    tempfile.tempdir = os.environ["TMPDIR"] = tempfile.mkdtemp(prefix="tmp-", dir=config.folder)
    code = _run_script(config, rank)
    sys.stdout.flush()
    sys.stderr.flush()
    # Semaphores of loader workers.
    multiprocessing.util._run_finalizers()  # type: ignore[attr-defined]
    # Exit handlers have run in ``multiprocessing``'s place; threads of the script must not keep the process.
    os._exit(code)


def _answer_request(folder: Path, rank: int, world_size: int) -> None:
    """Start a thread that writes the stacks and the last collectives of this rank once the proof asks."""
    from dtrain.dist.context import current_context
    from dtrain.dist.flight_recorder import write_flight_record, write_stacks
    from dtrain.dist.init import DistInfo

    launch_protocol.hang_folder(folder).mkdir(exist_ok=True)
    # Opened for writing, too, so that the pipe never ends.
    pipe = os.open(folder / _REQUEST_PIPE, os.O_RDWR)

    def answer() -> None:
        select.select([pipe], [], [])
        context = current_context()
        write_stacks(launch_protocol.stacks_file(folder, rank))
        # A script may use torch's process groups without those of dtrain.
        info = context.info or DistInfo(rank=rank, world_size=world_size)
        write_flight_record(launch_protocol.flight_record_file(folder, rank), info, context.control_plane)

    threading.Thread(target=answer, daemon=True, name="dtrain-prove-answer").start()


def _run_script(config: RunConfig, rank: int) -> int:
    """Run the script with a recorder, and return its exit code. The first error of the rank goes to a file."""
    import numpy as np
    import torch

    from dtrain.prove.dtrain_hooks import observe_dtrain
    from dtrain.prove.experiments import Seeds, take_out
    from dtrain.prove.overrides import compile_nothing, keep_on_cpu, vary_machine
    from dtrain.prove.recording import RankRecorder
    from dtrain.prove.torch_hooks import observe_torch

    # All ranks are forks of one process, whose generators would be equal. A script without a seed must show as one.
    torch.default_generator.seed()
    np.random.seed()
    path = os.path.abspath(config.script)
    with preload.replaced_functions():
        recorder = RankRecorder(config, rank)
        compile_nothing()
        keep_on_cpu(path, partial(recorder.note, "gpu"))
        observe_dtrain(recorder)
        observe_torch(recorder)
        Seeds(config, recorder.log)
        if config.experiment is not None:
            take_out(config.experiment)
        # Held until the end of the process.
        memory = vary_machine(path) if config.vary_machine else None  # noqa: F841
    sys.argv = [config.script, *config.args]
    sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    main = ModuleType("__main__")
    main.__dict__.update(__file__=path, __builtins__=builtins, __cached__=None, __annotations__={})
    sys.modules["__main__"] = main
    code = 0
    failure: BaseException | None = None
    try:
        exec(compile(Path(path).read_bytes(), path, "exec", dont_inherit=True), main.__dict__)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        failure = error if code else None
    except BaseException as error:  # noqa: BLE001 - every exception ends the script, and the proof shows it
        traceback.print_exc()
        code, failure = 1, error
        # Such as the mean over the losses of an epoch that has none.
        if recorder.empty_passes and isinstance(error, Exception):
            recorder.note("failed_past_end", error=_describe_error(error))
            code, failure = 0, None
    if failure is not None:
        frames: list[Any] = traceback.extract_tb(failure.__traceback__)
        own = [frame for frame in frames if os.path.realpath(frame.filename) == os.path.realpath(path)]
        where = f"{os.path.basename(own[-1].filename)}:{own[-1].lineno}" if own else ""
        record = {"rank": rank, "error": _describe_error(failure), "where": where}
        Path(config.folder, f"rank-{rank}.failure.json").write_text(json.dumps(record), encoding="utf-8")
    recorder.flush_evaluation()
    recorder.write_later_changes()
    cpu_s = sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    recorder.log.write("end", code=code, cpu_s=cpu_s)
    recorder.log.close()
    return code


def _describe_error(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:1000]
