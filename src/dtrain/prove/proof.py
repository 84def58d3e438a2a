"""Run a script in several ways and compare the runs (``prove``)."""

from __future__ import annotations

import fnmatch
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dtrain.arguments import check_int, format_count
from dtrain.errors import ConfigError
from dtrain.prove.causes import EXPERIMENTS, OF_REACH, OF_SEEDS, OF_SLOPE, OF_WIDTH, Cause, cause
from dtrain.prove.checks import (
    check_record,
    check_training,
    compare_precision,
    computed_samples,
    module_errors,
    rounding_hides,
    rounding_of,
    slope_ratios,
)
from dtrain.prove.compare import MAX_ROUNDING, Comparison, Difference, FactKey, compare_records, metric_name, unstable_keys
from dtrain.prove.explain import explain, seeds_of_rank_0, width_of_batches
from dtrain.prove.explain_resume import lost_states
from dtrain.prove.parts import Parts, find_parts, join_parts
from dtrain.prove.report import Allowed, Finding, ProveReport, RowVerdict, RunRow, fact_name
from dtrain.prove.run_config import (
    AGAIN,
    BASE,
    EVEN,
    FLOAT32,
    MOVE,
    ROUNDED,
    ROUNDED_AGAIN,
    SERVING,
    WRITTEN,
    PlannedRun,
    RunConfig,
    first_runs,
    is_endless,
    many_ranks,
    next_runs,
)
from dtrain.prove.run_records import KINDS, RunRecord, read_record
from dtrain.prove.runs import RunOutcome, copy_work_folder, run_all

# Facts that do not depend on the random numbers of a step.
_DATA_KINDS = ("initial", "ties", "samples", "lr", "evaluation")
# Facts that do not depend on the weights, either.
_INPUT_KINDS = ("samples", "lr", "evaluation")
# Facts that follow from the length of a loader, which stays that of the script if its batches are replaced.
_OF_LOADERS = ("samples", "lr", "steps")
# Differences that follow from a state that a resume has lost.
_OF_LOST_STATE = ("loss", "gradient", "parameter", "buffer", "initial", "transform", "metric", "steps", "exported")
# Lost states of a resume from which other samples follow.
_OF_SAMPLES = {"generator", "rng", "samples"}
# Differences of gradients and slopes of losses that are no rounding.
_SLOPES_AGREE = 1e-4


def prove(
    script: str | Path,
    args: Sequence[str] = (),
    *,
    steps: int = 4,
    world_sizes: Sequence[int] = (2, 3),
    keep_precision: bool = False,
    fast: bool = False,
    allow: Mapping[str, str] = MappingProxyType({}),
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
        fast: if True, only one rank and the first of ``world_sizes`` are compared, without metrics.
        allow: reason of each known difference, which does not count. The name is that of a fact, as in ``"metric tokens"``,
            ``"gradient of head.*"`` or ``"tokens"``, or the code of a cause, as in ``"local_batch_norm"``.
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
    script = Path(script).absolute()
    check_int("prove", "steps", steps, minimum=2)
    for count in world_sizes:
        check_int("prove", "world_sizes", count, minimum=2)
    if not script.is_file():
        raise ConfigError(f"prove: script must be a Python file, got {str(script)!r}. Check the path.")
    started, folder = time.monotonic(), Path(tempfile.mkdtemp(prefix="dtrain-prove-"))
    say = on_progress or (lambda line: None)
    try:
        first = first_runs(script, args, folder, steps=steps, keep_precision=keep_precision)
        proof = _Proof(slots or len(os.sched_getaffinity(0)), timeout_s, allow, say)

        def plan(base: RunConfig, record: RunRecord) -> list[PlannedRun]:
            runs = next_runs(base, record, world_sizes[:1] if fast else world_sizes, seed)
            return [run for run in runs if run.config.name in (EVEN, *map(many_ranks, world_sizes))] if fast else runs

        proof.run(first[:1] if fast else first, plan)
        return proof.report(first[0].config, time.monotonic() - started)
    finally:
        if os.environ.get("DTRAIN_PROVE_KEEP"):
            say(f"records are in {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Repetition:
    """Two runs that were repeated with the same changes, and their comparison.

    ``shown`` is True if an experiment shows its cause, by ``result``.
    """

    run: PlannedRun
    comparison: Comparison
    shown: bool = False
    result: str = ""


class _Proof:
    """Runs of one proof, their records and findings."""

    def __init__(self, slots: int, timeout_s: float, allow: Mapping[str, str], on_progress: Callable[[str], None]) -> None:
        self._slots, self._timeout_s, self._on_progress = slots, timeout_s, on_progress
        self._allowed = {name: Allowed(name=name, reason=reason) for name, reason in allow.items()}
        self._records: dict[str, RunRecord] = {}
        self._outcomes: dict[str, RunOutcome] = {}
        self._rows: list[RunRow] = []
        self._findings: list[Finding] = []
        self._unstable: set[FactKey] = set()
        self._rounding: Mapping[FactKey, float] = {}
        self._of_layout: set[str] = set()
        self._not_seen: dict[str, None] = {}
        # By number of ranks.
        self._parts: dict[int, Parts | None] = {}
        # Findings of the resumes on the same ranks.
        self._lost: tuple[int, ...] = ()
        # By cause and kind of difference; None if the experiment says nothing.
        self._experiments: dict[tuple[str, str], _Repetition | None] = {}

    def run(self, first: Sequence[PlannedRun], plan: Callable[[RunConfig, RunRecord], list[PlannedRun]]) -> None:
        """Run and compare everything: the first runs, and those that ``plan`` chooses from the first run and its record."""
        self._execute(first)
        config, record = first[0].config, self._records[BASE]
        if self._outcomes[BASE].failed or (check_training(record) and not check_record(record)):
            self._add_row(first[0])
            return
        config = replace(config, whole={fact.name: fact.value.shape for fact in record.of_kind("initial")})
        if is_endless(record, config.steps):
            config = replace(config, cut_after=config.steps)
            self._records = {name: other.until(config.steps) for name, other in self._records.items()}
            record = self._records[BASE]
        if AGAIN in self._records:
            self._unstable = unstable_keys(record, self._records[AGAIN])
        later = plan(config, record)
        self._execute([run for run in later if run.after is None])
        self._execute([self._resumed(run) for run in later if run.after is not None])
        if config.dtype == "as written":
            rounded = [other for name in (ROUNDED, ROUNDED_AGAIN) if (other := self._complete(name)) is not None]
            self._rounding = rounding_of(record, rounded)
            self._unstable |= computed_samples(record, rounded)
        for run in (*first, *later):
            self._add_row(run)

    def _execute(self, runs: Sequence[PlannedRun]) -> None:
        for run in runs:
            if run.after is None:
                copy_work_folder(Path.cwd(), run.config.work_folder)

        def ended(outcome: RunOutcome) -> None:
            name = outcome.config.name
            self._outcomes[name] = outcome
            record = read_record(name, Path(outcome.config.folder), self._records.get(BASE))
            self._records[name] = self._join(record, outcome.config) if outcome.config.ranks > 1 else record
            self._on_progress(f"{name}: {outcome.seconds:.1f} s{', failed' if outcome.failed else ''}")

        run_all([run.config for run in runs], slots=self._slots, timeout_s=self._timeout_s, on_end=ended)

    def _join(self, record: RunRecord, config: RunConfig) -> RunRecord:
        """Return a run on several ranks with whole tensors, where ranks hold parts of them as plain tensors."""
        # A resume begins with other values than the run on one rank.
        if self._parts.get(config.ranks) is None and not config.first_step and len(record.ranks) == config.ranks:
            self._parts[config.ranks] = find_parts(record, self._records[BASE])
        parts = self._parts.get(config.ranks)
        return record if parts is None else join_parts(record, parts)

    def _resumed(self, run: PlannedRun) -> PlannedRun:
        """Return a run that resumes, with a copy of the folder of the killed run."""
        killed = str(run.after)
        shutil.copytree(self._outcomes[killed].config.work_folder, run.config.work_folder, symlinks=True)
        record, signatures = self._records[killed], self._records[BASE].signatures
        # In a loop that does not use dtrain's step, the steps of the resumed run count from the last save.
        of_loop = [index for index, signature in signatures.items() if not run.config.loop or signature in run.config.loop]
        first_step, updates = max(record.saves(of_loop), key=lambda save: save[0], default=(0, dict.fromkeys(of_loop, 0)))
        loop = {signatures[index]: count for index, count in updates.items()} if run.config.loop else {}
        return replace(run, config=replace(run.config, first_step=first_step, loop=loop))

    def _add_row(self, run: PlannedRun) -> None:
        """Compare a run, and add its row to the table, unless the run only serves others."""
        name = run.config.name
        whole_names = [many_ranks(ranks) for ranks in self._world_sizes(run)]
        outcome, record = self._outcomes[name], self._records[name]
        # A script may refuse a strategy or a size, and says so. A run that hangs or crashes is a failure.
        waited = outcome.timed_out or outcome.follows
        if outcome.failed and run.optional and outcome.error and not waited and not any(map(self._failed, whole_names)):
            text = f"the script does not run this way: {outcome.error}"
            self._rows.append(RunRow(name=name, against=run.against, verdict="not run", text=text))
            return
        if outcome.failed and (count := record.updates_of_rank_0_alone()):
            text = f"a loop that only rank 0 runs was ended after {format_count(count, 'update')}; raise --steps"
            self._rows.append(RunRow(name=name, against=run.against, verdict="nothing", text=text))
            return
        if problem := self._problem(name):
            self._rows.append(RunRow(name=name, against=run.against, verdict="failed", text=problem))
            return
        differences, comparison = check_record(record), None
        if (same_ranks := self._whole(run)) is not None and record.ranks[1:]:
            # If all ranks lost a state, the resume on one rank says so.
            lost = lost_states(record, same_ranks)
            differences += [difference for difference in lost if len(difference.ranks) < len(record.ranks)]
        if name == self._written_name:
            differences += compare_precision(self._complete(FLOAT32), record, self._complete(ROUNDED))
        elif run.against:
            comparison = self._compare(run, self._records[run.against], record)
            self._of_layout |= comparison.of_layout
            parts = self._parts.get(run.config.ranks)
            self._not_seen |= dict.fromkeys([*comparison.not_seen, *([parts.remark()] if parts is not None else [])])
        whole = next((row for row in self._rows if run.after and row.name in whole_names), None)
        if whole is not None and whole.verdict in ("differs", "failed"):
            # The run differs on these ranks without a resume.
            self._rows.append(RunRow(name=name, against=run.against, verdict="differs", findings=whole.findings))
            return
        findings = self._explain(run, differences, comparison)
        if run.config.kill_after is None and name not in SERVING:
            self._rows.append(self._row(run, findings, comparison))

    def _row(self, run: PlannedRun, findings: tuple[int, ...], comparison: Comparison | None) -> RunRow:
        """Return the row of a run that did not fail."""
        name, parts = run.config.name, self._parts.get(max(self._world_sizes(run)))
        if parts is not None and parts.unknown and not findings:
            return RunRow(name=name, against=run.against, verdict="not run", text="ranks begin with weights of their own")
        text, is_hidden = rounding_hides(comparison) if comparison else ("", False)
        # A resume may have one step, in which not all models are seen twice. It is compared with a run that trains.
        if gap := "" if findings or run.after else check_training(self._records[name]):
            text, is_hidden = gap, True
        verdict: RowVerdict = comparison.verdict if comparison else "ran"
        allowed = [entry.name for entry in self._allowed.values() if name in entry.runs]
        if findings or is_hidden:
            verdict = "differs" if findings else "nothing"
        elif allowed:
            verdict, text = "allowed", f"allowed: {', '.join(allowed)}"
        largest = None if comparison is None else comparison.largest
        return RunRow(name=name, against=run.against, verdict=verdict, findings=findings, text=text, largest=largest)

    def _world_sizes(self, run: PlannedRun) -> set[int]:
        """Return the numbers of ranks of a run, and of the killed run that it continues."""
        return {run.config.ranks, *({self._outcomes[run.after].config.ranks} if run.after else ())}

    def _compare(self, run: PlannedRun, reference: RunRecord, record: RunRecord) -> Comparison:
        # If a transform draws per rank, losses depend on the ranks by design.
        draws_per_rank = self._records[BASE].note("transform_draws") is not None
        ranks = max(self._world_sizes(run))
        parts, kinds = self._parts.get(ranks), _DATA_KINDS if draws_per_rank and ranks > 1 else tuple(KINDS)
        if parts is not None and parts.unknown:
            kinds = _INPUT_KINDS
        comparison = compare_records(
            reference,
            record,
            same_layout=run.same_layout,
            # Without an equal run, a metric may be a time.
            kinds=[kind for kind in kinds if kind != "metric" or AGAIN in self._records],
            ignored=self._unstable,
            first_steps=record.first_steps if run.after else {},
            rounding={} if run.same_layout else self._rounding,
        )
        counted = [
            difference
            for difference in comparison.differences
            if not self._allow(run, difference.name, fact_name(difference.kind, difference.name))
        ]
        if comparison.differences and not counted:
            return replace(comparison, verdict="tolerance", differences=())
        return replace(comparison, differences=tuple(counted))

    def _allow(self, run: PlannedRun, *names: str) -> bool:
        """Return True if a difference of a run may be there, by one of its names."""
        for pattern, allowed in self._allowed.items():
            if pattern in names or any(fnmatch.fnmatchcase(name, pattern) for name in names):
                runs = dict.fromkeys([*allowed.runs, run.config.name])
                self._allowed[pattern] = replace(allowed, runs=tuple(runs))
                return True
        return False

    def _problem(self, name: str) -> str:
        """Return why a run cannot be compared; "" if it can."""
        outcome = self._outcomes[name]
        if outcome.timed_out:
            advice = "" if "wait" in str(outcome.error) else "; raise --timeout, or give arguments of a shorter run"
            return f"did not end in {self._timeout_s:g} s: {outcome.error}{advice}"
        return outcome.error or f"ended with the exit codes {outcome.codes}" if outcome.failed else ""

    def _explain(self, run: PlannedRun, checks: Sequence[Difference], comparison: Comparison | None) -> tuple[int, ...]:
        """Add the findings of a run, and return their numbers. A cause that was found already is not reported twice.

        After a first difference that can be taken out of both runs, the first difference that is left is a finding, too.
        """
        numbers: dict[int, None] = {}
        for difference in checks:
            likely = self._cause(run, difference)
            if not self._allow(run, likely.code):
                numbers[self._find(run, difference, likely)] = None
        corrected: tuple[str, ...] = ()
        known = {(check.step, check.kind, check.name) for check in checks}
        while comparison is not None and comparison.differences:
            difference = comparison.differences[0]
            if (difference.step, difference.kind, difference.name) in known:
                break
            if run.config.batches and difference.kind in _OF_LOADERS:
                break
            likely = self._cause(run, difference, corrected)
            if (corrected and likely.code == "unknown") or self._allow(run, likely.code):
                break
            lost = {self._findings[number].difference.kind for number in self._lost}
            follows = difference.kind in _OF_LOST_STATE or (difference.kind == "samples" and lost & _OF_SAMPLES)
            if run.after and not run.same_layout and lost and follows:
                # What the resume on the same ranks has lost shows in other ways.
                numbers |= dict.fromkeys(self._lost)
                break
            count = len(self._findings)
            numbers[self._find(run, difference, likely)] = None
            if len(self._findings) == count or (changed := self._corrected(run, difference, likely)) is None:
                break
            run, comparison, corrected = changed.run, changed.comparison, (*corrected, likely.code)
        if run.after and run.same_layout:
            self._lost = tuple(dict.fromkeys((*self._lost, *numbers)))
        return tuple(numbers)

    def _cause(self, run: PlannedRun, difference: Difference, corrected: Collection[str] = ()) -> Cause:
        """Return the likely cause of a difference, which is not one that both runs are without."""
        record, reference = self._records[run.config.name], self._records.get(run.against)
        whole = self._whole(run)
        causes = explain(difference, record, reference, run.config, run.after is not None, whole)
        return self._first_that_holds([likely for likely in causes if likely.code not in corrected], run, difference)

    def _whole(self, run: PlannedRun) -> RunRecord | None:
        """Return the record of the run on as many ranks that was not killed, for a run that resumes; None without one."""
        ranks = run.config.ranks
        return self._complete(many_ranks(ranks) if ranks > 1 else BASE) if run.after else None

    def _find(self, run: PlannedRun, difference: Difference, likely: Cause) -> int:
        """Return the number of the finding with a cause, which is added if it is new."""
        codes = [finding.cause.code for finding in self._findings]
        if likely.code not in codes:
            self._findings.append(Finding(run=run.config.name, against=run.against, difference=difference, cause=likely))
            return len(codes)
        return codes.index(likely.code)

    def _first_that_holds(self, causes: Sequence[Cause], run: PlannedRun, difference: Difference) -> Cause:
        """Return the first cause that the records or an experiment show; without one, the first that was not refuted."""
        untested: list[Cause] = []
        for candidate in causes:
            if candidate.shown:
                return candidate
            key = candidate.code, difference.kind
            if key not in self._experiments and candidate.code in EXPERIMENTS and not run.after:
                is_of_slope = candidate.code == OF_SLOPE
                self._experiments[key] = (
                    self._measure_slope(run, difference) if is_of_slope else self._without(candidate.code, run, difference)
                )
            experiment = self._experiments.get(key)
            if experiment is None:
                # Nothing but the slope points to a gradient that is not that of the loss.
                untested += [candidate] * (candidate.code != OF_SLOPE)
            elif experiment.shown:
                evidence = f"Shown by an experiment: {EXPERIMENTS[candidate.code]}, {experiment.result}."
                return replace(candidate, shown=True, evidence=evidence)
        return untested[0] if untested else cause("unknown")

    def _without(self, code: str, run: PlannedRun, difference: Difference) -> _Repetition | None:
        """Compare both runs without a supposed cause. ``shown`` if the difference goes; None if that cannot be tried."""
        seeds = seeds_of_rank_0(self._records[run.config.name].ranks) if code in OF_SEEDS else {}
        width = width_of_batches(self._records[run.against]) if code == OF_WIDTH else 0
        repetition = self._again(run, EXPERIMENTS[code], code, experiment=code, seeds=seeds, width=width)
        if repetition is None:
            return None
        names = (repetition.run.against, run.against), (repetition.run.config.name, run.config.name)
        if code in OF_REACH:
            reference, record = (self._records[name] for name, _ in names)
            reaches = _reaches(reference, record, too_far=code == "sequence_mask_lost")
            return None if reaches is None else replace(repetition, shown=reaches, result="other places of the output change")
        if not any(_differs_in_training(self._records[name], self._records[other]) for name, other in names):
            return None
        order = (*KINDS, "steps").index
        place = difference.step, order(difference.kind)
        later = all((other.step, order(other.kind)) > place for other in repetition.comparison.differences)
        result = "this difference goes" if repetition.comparison.differences else "the runs agree"
        return replace(repetition, shown=later, result=result)

    def _measure_slope(self, run: PlannedRun, difference: Difference) -> _Repetition | None:
        """Compare a gradient of the first step with the slope of the loss, in both runs; None if that cannot be tried."""
        if run.config.dtype != "fp64" or difference.step or difference.reference is None:
            return None
        again = [
            self._again(run, f"with {difference.name} moved by {share:g}", f"moved{share:+g}", shifted=(difference.name, share))
            for share in (MOVE, -MOVE)
        ]
        if (up := again[0]) is None or (down := again[1]) is None:
            return None
        place = 0, difference.reference.optimizer_index
        pairs = (up.run.against, down.run.against), (up.run.config.name, down.run.config.name)
        moved = [(self._records[first], self._records[second]) for first, second in pairs]
        ratios = slope_ratios(moved, (self._records[run.against], self._records[run.config.name]), place)
        if ratios is None:
            return None
        text = f"the gradient is {ratios[1]:.3g} times the slope of the loss, and equal to it in the other run"
        shown = abs(ratios[0] - 1.0) < _SLOPES_AGREE < abs(ratios[1] - 1.0)
        return replace(up, shown=shown, result=text)

    def _corrected(self, run: PlannedRun, difference: Difference, likely: Cause) -> _Repetition | None:
        """Return both runs again without a difference: with its cause taken out, or with equal batches; None if impossible."""
        experiment = self._experiments.get((likely.code, difference.kind))
        if experiment is not None and experiment.shown and likely.code not in (*OF_REACH, OF_SLOPE):
            return experiment
        if difference.kind != "samples" or run.after or run.config.batches or run.config.ranks == 1:
            return None
        loaders = {loader for row in self._records[run.against].rows("step") for loader in row.get("loaders", ())}
        folder = Path(self._outcomes[BASE].config.folder).with_name("batches")
        return self._again(run, "with equal batches", "replay", batches=str(folder), loaders=tuple(sorted(loaders)))

    def _again(self, run: PlannedRun, words: str, place: str, **changes: Any) -> _Repetition | None:
        """Repeat a run and the run that it is compared with, both with changes, and compare them; None if one of them fails."""
        reference, other = (
            replace(config, name=f"{config.name}, {words}", folder=f"{config.folder}-{place}", **changes)
            for config in (self._outcomes[name].config for name in (run.against, run.config.name))
        )
        # The second run reads the batches of the first. The experiment may have tested the cause of another difference.
        for configs in ((reference,), (other,)) if other.batches else ((reference, other),):
            self._execute([PlannedRun(config=config) for config in configs if config.name not in self._outcomes])
        records = self._complete(reference.name), self._complete(other.name)
        if records[0] is None or records[1] is None:
            return None
        again = replace(run, config=other, against=reference.name)
        return _Repetition(run=again, comparison=self._compare(run, records[0], records[1]))

    @property
    def _written_name(self) -> str:
        """Name of the run in the script's own dtypes."""
        return BASE if self._outcomes[BASE].config.dtype == "as written" else WRITTEN

    def _failed(self, name: str) -> bool:
        return name in self._outcomes and self._outcomes[name].failed

    def _complete(self, name: str) -> RunRecord | None:
        """Return the record of a run that has not failed; None if there is none."""
        return None if self._failed(name) else self._records.get(name)

    def report(self, base: RunConfig, seconds: float) -> ProveReport:
        """Return the report."""
        record, keep_precision = self._records[BASE], base.dtype == "as written"
        written, exact, rounded = (self._complete(name) for name in (self._written_name, FLOAT32, ROUNDED))
        modules = [] if written is None or exact is None or rounded is None else module_errors(exact, written, rounded)
        ranks = [rows for other in self._records.values() for rows in other.ranks]
        facts = [record.facts[key] for key in self._unstable if key in record.facts]
        unstable = sorted({metric_name(fact) for fact in facts if fact.kind == "metric"})
        return ProveReport(
            script=base.script,
            steps=base.steps,
            rows=tuple(self._rows),
            findings=tuple(self._findings),
            notes=tuple(record.notes),
            dropped=(tuple(unstable), tuple(sorted(self._of_layout))),
            not_seen=tuple(self._not_seen),
            allowed=tuple(self._allowed.values()),
            is_fast=AGAIN not in self._outcomes,
            plain=not record.rows("layout"),
            modules=tuple(modules),
            rounding=max((size for size in self._rounding.values() if size <= MAX_ROUNDING), default=None),
            keep_precision=keep_precision,
            seconds=seconds,
            cpu_seconds=sum(row["cpu_s"] for rows in ranks for row in rows if row["kind"] == "end"),
        )


def _reaches(reference: RunRecord, record: RunRecord, *, too_far: bool) -> bool | None:
    """Return True if a change of one input reaches more outputs than in the reference, or fewer; None if nobody counted."""
    expected, reached = (
        [row["reached"] for rows in run.ranks for row in rows if row["kind"] == "reach"] for run in (reference, record)
    )
    if not expected or not reached:
        return None
    return bool(sum(reached) > sum(expected) if too_far else sum(reached) < sum(expected))


def _differs_in_training(record: RunRecord, other: RunRecord) -> bool:
    """Return True if a loss, a gradient or the samples of a step differ in any bit."""
    kinds = ("samples", "loss", "gradient")

    def values(run: RunRecord) -> list[Any]:
        facts = [fact for kind in kinds for fact in run.of_kind(kind)]
        return [fact.value.digest if fact.kind == "gradient" else fact.value for fact in facts]

    return values(record) != values(other)
