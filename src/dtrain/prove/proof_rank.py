"""Run the script on one rank of a proof, with a recorder: ``run_rank``, the function of each rank's process."""

from __future__ import annotations

import builtins
import json
import multiprocessing.util
import os
import resource
import sys
import tempfile
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

from dtrain.launch.local_ranks import enter_rank
from dtrain.launch.processes import die_with_parent
from dtrain.prove.run_config import RunConfig

FAILED_EXIT_CODE = 1


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
    rank, config = int(os.environ["RANK"]), RunConfig.read(Path(config_path))
    _redirect_output(Path(config.folder), rank)
    os.chdir(config.work_folder)
    # A killed rank removes none of its temporary files; the proof removes this folder.
    tempfile.tempdir = os.environ["TMPDIR"] = tempfile.mkdtemp(prefix="tmp-", dir=config.folder)
    code = _run(config, rank)
    sys.stdout.flush()
    sys.stderr.flush()
    # Semaphores of loader workers.
    multiprocessing.util._run_finalizers()  # type: ignore[attr-defined]
    # Exit handlers have run in ``multiprocessing``'s place; threads of the script must not keep the process.
    os._exit(code)


def _redirect_output(folder: Path, rank: int) -> None:
    for stream, name in ((1, "out"), (2, "err")):
        fd = os.open(folder / f"rank-{rank}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        os.dup2(fd, stream)
        os.close(fd)
    sys.stdout, sys.stderr = _text_stream(1), _text_stream(2)


def _text_stream(fd: int) -> TextIO:
    return open(fd, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)


def _run(config: RunConfig, rank: int) -> int:
    import numpy as np
    import torch

    from dtrain.prove.dtrain_hooks import observe_dtrain
    from dtrain.prove.recording import RankRecorder
    from dtrain.prove.torch_hooks import observe_torch

    # All ranks are forks of one process, whose generators would be equal. A script without a seed must show as one.
    torch.default_generator.seed()
    np.random.seed()
    recorder = RankRecorder(config, rank)
    observe_dtrain(recorder)
    observe_torch(recorder)
    path = os.path.abspath(config.script)
    sys.argv = [config.script, *config.args]
    sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    main = ModuleType("__main__")
    main.__dict__.update(__file__=path, __builtins__=builtins, __cached__=None, __annotations__={})
    sys.modules["__main__"] = main
    code = 0
    try:
        exec(compile(Path(path).read_bytes(), path, "exec", dont_inherit=True), main.__dict__)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if code:
            _write_failure(config, rank, error)
    except BaseException as error:  # noqa: BLE001 - every exception ends the script, and the proof shows it
        traceback.print_exc()
        _write_failure(config, rank, error)
        code = FAILED_EXIT_CODE
    recorder.flush_evaluation()
    recorder.log.write("end", step=recorder.step, code=code, cpu_s=cpu_seconds())
    recorder.log.close()
    return code


def cpu_seconds() -> float:
    """Return the processor seconds of this process, and of its children that have ended."""
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def _write_failure(config: RunConfig, rank: int, error: BaseException) -> None:
    line = " ".join(f"{type(error).__name__}: {error}".split())
    frames: list[Any] = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if os.path.realpath(frame.filename) == os.path.realpath(config.script)]
    where = f"{os.path.basename(own[-1].filename)}:{own[-1].lineno}" if own else ""
    record = {"rank": rank, "error": line[:1000], "where": where}
    (Path(config.folder) / f"rank-{rank}.failure.json").write_text(json.dumps(record), encoding="utf-8")
