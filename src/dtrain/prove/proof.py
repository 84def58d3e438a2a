"""Run a script in several ways and compare the runs: ``prove``."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from dtrain.prove.causes import explain
from dtrain.prove.checks import check_record
from dtrain.prove.compare import Comparison, Difference, compare_records, unstable_keys
from dtrain.prove.proof_report import Finding, ProveReport, RunRow
from dtrain.prove.rounding import ModuleError, compare_precision, computed_samples, module_errors, rounding_of
from dtrain.prove.run_plan import (
    AGAIN,
    BASE,
    FLOAT32,
    ROUNDED,
    ROUNDED_AGAIN,
    SERVING,
    WRITTEN,
    PlannedRun,
    ProveOptions,
    first_runs,
    next_runs,
    resumed_config,
)
from dtrain.prove.run_records import KINDS, RunRecord, read_record
from dtrain.prove.runs import RunOutcome, copy_work_folder, run_all

# Facts that do not depend on the random numbers of a step.
_DATA_KINDS = ("initial", "ties", "samples", "lr", "evaluation")


def prove(
    script: str | Path,
    args: Sequence[str] = (),
    *,
    steps: int = 4,
    world_sizes: Sequence[int] = (2, 3),
    keep_precision: bool = False,
    seed: int = 0,
    timeout_s: float = 300.0,
    slots: int | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> ProveReport:
    """Run a training script in several ways, and report whether they give the same result.

    The script runs for a few steps: twice on one rank, on several ranks with each strategy, with other microbatches, and killed
    and resumed. Everything computes in float64, so that rounding neither hides nor makes a difference.

    Args:
        script: path of the script.
        args: arguments of the script.
        steps: number of steps of each run.
        world_sizes: numbers of ranks that are compared with one rank.
        keep_precision: if True, runs compute in the script's own dtypes.
        seed: seed of the step after which a run is killed.
        timeout_s: seconds after which a run is ended.
        slots: number of ranks that run at a time; None uses the number of cores.
        on_progress: called with a line for each run that ends; None reports nothing.

    Returns:
        The report, whose ``passed`` is True if no run differs.

    Example:
        def test_loop_is_right_on_other_layouts():
            report = dt.prove.prove("loop.py", ["--width", "32"])
            assert report.passed, report.text()

    Raises:
        ConfigError: the script is no file, or an option is out of range.
    """
    options = ProveOptions(
        script=Path(script).absolute(),
        args=tuple(args),
        steps=steps,
        ranks=tuple(world_sizes),
        keep_precision=keep_precision,
        seed=seed,
        timeout_s=timeout_s,
    )
    started, folder = time.monotonic(), Path(tempfile.mkdtemp(prefix="dtrain-prove-"))
    say = on_progress or (lambda line: None)
    try:
        proof = _Proof(options, folder, slots or len(os.sched_getaffinity(0)), say)
        proof.run()
        return proof.report(time.monotonic() - started)
    finally:
        if os.environ.get("DTRAIN_PROVE_KEEP"):
            say(f"records are in {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


class _Proof:
    """Runs of one proof, their records and findings."""

    def __init__(self, options: ProveOptions, folder: Path, slots: int, on_progress: Callable[[str], None]) -> None:
        self._options, self._folder, self._slots, self._on_progress = options, folder, slots, on_progress
        self._records: dict[str, RunRecord] = {}
        self._outcomes: dict[str, RunOutcome] = {}
        self._rows: list[RunRow] = []
        self._findings: list[Finding] = []
        self._unstable: set[tuple[int, int, str, str]] = set()
        self._rounding: Mapping[tuple[str, int], float] = {}

    def run(self) -> None:
        """Run and compare everything."""
        first = first_runs(self._options, self._folder)
        self._execute(first)
        base = first[0].config
        if self._outcomes[BASE].failed or not self._records[BASE].steps:
            self._add_row(first[0])
            return
        self._unstable = unstable_keys(self._records[BASE], self._records[AGAIN])
        later = next_runs(self._options, self._folder, base, self._records[BASE])
        self._execute([run for run in later if run.after is None])
        self._execute([self._resumed(run) for run in later if run.after is not None])
        if self._options.keep_precision:
            rounded = [record for record in map(self._complete, (ROUNDED, ROUNDED_AGAIN)) if record is not None]
            self._rounding = rounding_of(self._records[BASE], rounded)
            self._unstable |= computed_samples(self._records[BASE], rounded)
        for run in (*first, *later):
            self._add_row(run)

    def _execute(self, runs: Sequence[PlannedRun]) -> None:
        for run in runs:
            if run.after is None:
                copy_work_folder(Path.cwd(), Path(run.config.work_folder))

        def ended(outcome: RunOutcome) -> None:
            name = outcome.config.name
            self._outcomes[name] = outcome
            self._records[name] = read_record(name, Path(outcome.config.folder))
            self._on_progress(f"{name}: {outcome.seconds:.1f} s{', failed' if outcome.failed else ''}")

        run_all([run.config for run in runs], slots=self._slots, timeout_s=self._options.timeout_s, on_end=ended)

    def _resumed(self, run: PlannedRun) -> PlannedRun:
        """Return a run that resumes, with a copy of the folder of the killed run."""
        killed = self._outcomes[str(run.after)].config
        shutil.copytree(killed.work_folder, run.config.work_folder, symlinks=True)
        saves = [row["step"] for row in self._records[str(run.after)].rows("saved")]
        return PlannedRun(
            config=resumed_config(run.config, saves), against=run.against, same_layout=run.same_layout, after=run.after
        )

    def _add_row(self, run: PlannedRun) -> None:
        name = run.config.name
        outcome, record = self._outcomes[name], self._records[name]
        if outcome.failed and run.optional and not self._failed(f"{run.config.ranks} ranks"):
            text = f"the script does not run this way: {outcome.error}"
            self._rows.append(RunRow(name=name, against=run.against, verdict="not run", text=text))
            return
        if problem := self._problem(name):
            self._rows.append(RunRow(name=name, against=run.against, verdict="failed", text=problem))
            return
        differences = check_record(record)
        comparison: Comparison | None = None
        if name == (BASE if self._options.keep_precision else WRITTEN):
            differences += compare_precision(self._complete(FLOAT32), record, self._complete(ROUNDED))
        elif run.against:
            comparison = compare_records(
                self._records[run.against],
                record,
                same_layout=run.same_layout,
                kinds=KINDS if run.config.ranks == 1 or not self._draws_per_rank() else _DATA_KINDS,
                ignored=self._unstable,
                first_steps=record.first_steps if run.after else {},
                rounding={} if run.same_layout else self._rounding,
            )
        whole = next((row for row in self._rows if run.after and row.name == f"{run.config.ranks} ranks"), None)
        if whole is not None and whole.verdict in ("differs", "failed"):
            # The run differs on these ranks without a resume.
            self._rows.append(RunRow(name=name, against=run.against, verdict="differs", findings=whole.findings))
            return
        found = self._explain(run, differences, comparison)
        verdict = "differs" if found else comparison.verdict if comparison else "ran"
        largest = comparison.largest if comparison else None
        if run.config.kill_after is None and name not in SERVING:
            self._rows.append(RunRow(name=name, against=run.against, verdict=verdict, largest=largest, findings=tuple(found)))

    def _problem(self, name: str) -> str:
        """Return why a run cannot be compared; "" if it can."""
        outcome = self._outcomes[name]
        if outcome.timed_out:
            return f"did not end in {self._options.timeout_s:g} s; raise --timeout, or give arguments of a shorter run"
        if outcome.failed:
            return outcome.error or f"ended with the exit codes {outcome.codes}"
        trains = name != BASE or self._records[name].steps
        return "" if trains else "no update of an optimizer was seen; give the arguments with which the script trains"

    def _draws_per_rank(self) -> bool:
        """Return True if a transform of the script draws per rank, so that losses depend on the ranks by design."""
        return self._records[BASE].note("transform_draws") is not None

    def _complete(self, name: str) -> RunRecord | None:
        """Return the record of a run that has not failed; None if there is none."""
        return None if self._failed(name) else self._records.get(name)

    def _modules(self) -> list[ModuleError]:
        written = self._complete(BASE if self._options.keep_precision else WRITTEN)
        exact, rounded = self._complete(FLOAT32), self._complete(ROUNDED)
        return [] if written is None or exact is None or rounded is None else module_errors(exact, written, rounded)

    def _failed(self, name: str) -> bool:
        return name in self._outcomes and self._outcomes[name].failed

    def _explain(self, run: PlannedRun, checks: Sequence[Difference], comparison: Comparison | None) -> list[int]:
        """Add the findings of a run, and return their numbers. A cause that was found already is not reported twice."""
        record = self._records[run.config.name]
        reference = self._records[run.against] if run.against else None
        candidates = list(checks)
        if comparison is not None and comparison.first is not None:
            candidates.append(comparison.first)
        numbers = []
        for difference in candidates:
            cause = explain(difference, record, reference, comparison, run.config, run.after is not None)
            known = next((n for n, each in enumerate(self._findings) if each.cause.code == cause.code), None)
            if known is None:
                known = len(self._findings)
                self._findings.append(Finding(run=run.config.name, against=run.against, difference=difference, cause=cause))
            if known not in numbers:
                numbers.append(known)
        return numbers

    def report(self, seconds: float) -> ProveReport:
        """Return the report."""
        notes = self._records[BASE].notes if BASE in self._records else ()
        return ProveReport(
            script=str(self._options.script),
            steps=self._options.steps,
            rows=tuple(self._rows),
            findings=tuple(self._findings),
            notes=tuple(dict(note) for note in notes),
            plain=BASE in self._records and not self._records[BASE].rows("layout"),
            modules=tuple(self._modules()),
            rounding=max(self._rounding.values(), default=None),
            keep_precision=self._options.keep_precision,
            seconds=seconds,
            cpu_seconds=sum(
                row["cpu_s"] for each in self._records.values() for rows in each.ranks for row in rows if row["kind"] == "end"
            ),
        )
