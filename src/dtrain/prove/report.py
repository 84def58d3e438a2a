"""Show what the runs of a proof have found (``ProveReport``): the table of runs, the first difference of each, its cause."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal
from xml.etree import ElementTree

from dtrain.arguments import format_count
from dtrain.prove.causes import Cause
from dtrain.prove.checks import FAR, ModuleError
from dtrain.prove.compare import Difference
from dtrain.prove.run_records import KINDS

_MAX_MODULES = 20
_MAX_METRICS = 10

RowVerdict = Literal["bitwise", "tolerance", "allowed", "differs", "failed", "nothing", "ran", "not run"]

_BAD = ("differs", "failed", "nothing")
_WORDS: Mapping[str, str] = {
    "bitwise": "equal bit for bit",
    "tolerance": "equal within rounding",
    "allowed": "differs as allowed",
    "differs": "DIFFERS",
    "failed": "FAILED",
    "nothing": "SHOWS NOTHING",
    "ran": "no contradiction",
    "not run": "not compared",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRow:
    """A run of the table.

    Args:
        name: name of the run.
        against: name of the run that it was compared with.
        verdict: result of the comparison.
        largest: largest relative difference.
        findings: numbers of the findings, from 0.
        text: error of a run that failed, why a run shows nothing, or what rounding hides.
    """

    name: str
    against: str
    verdict: RowVerdict
    largest: float | None = None
    findings: tuple[int, ...] = ()
    text: str = ""


def fact_name(kind: str, name: str) -> str:
    """Return the name of a fact in texts, as in ``"gradient of head.weight"``."""
    return f"{KINDS.get(kind, kind)} {name}".rstrip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowed:
    """A known difference, which does not count.

    Args:
        name: name of a fact or code of a cause, with the wildcards of ``fnmatch``.
        reason: why it is right.
        runs: names of the runs with this difference.
    """

    name: str
    reason: str
    runs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The first difference of a run, with its likely cause."""

    run: str
    against: str
    difference: Difference
    cause: Cause

    @property
    def line(self) -> str:
        """Line of the script that the fact comes from, as in ``"loop.py:31"``; "" if none is known."""
        facts = self.difference.other, self.difference.reference
        return next((fact.line for fact in facts if fact is not None and fact.line), "")

    @property
    def subject(self) -> str:
        """Step and name of the fact that differs, as in ``"step 0, gradient of head.weight"``."""
        return f"step {self.difference.step}, {fact_name(self.difference.kind, self.difference.name)}"

    def as_dict(self) -> dict[str, Any]:
        """Return the finding as plain data."""
        names = ("step", "kind", "name", "text", "relative")
        return {
            "run": self.run,
            "against": self.against,
            **{name: getattr(self.difference, name) for name in names},
            "ranks": list(self.difference.ranks),
            "line": self.line,
            "cause": self.cause.code,
            "sentence": self.cause.sentence,
            "shown": self.cause.shown,
            "evidence": self.cause.evidence,
            "page": self.cause.page,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ProveReport:
    """Result of ``prove``.

    Args:
        script: path of the script.
        steps: number of steps of each run.
        rows: runs, in the order of the table.
        findings: differences with their causes.
        notes: what the script does that was changed or could not be seen.
        dropped: metrics that were not compared: those that differ in two equal runs, and numbers of the layout.
        not_seen: what the runs could not show, in sentences.
        allowed: known differences, which do not count.
        is_fast: if True, only the main runs were compared.
        plain: if True, the loop does not use dtrain's step.
        modules: errors of the script's dtypes, in the order of the program.
        rounding: largest difference that counts as rounding, as measured; None for the tolerance of float64.
        keep_precision: if True, the runs computed in the script's own dtypes.
        seconds: duration of the proof.
        cpu_seconds: processor time of all ranks that were not killed.
    """

    script: str
    steps: int
    rows: tuple[RunRow, ...]
    findings: tuple[Finding, ...]
    notes: tuple[Mapping[str, Any], ...] = field(default=(), repr=False)
    dropped: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    not_seen: tuple[str, ...] = ()
    allowed: tuple[Allowed, ...] = ()
    is_fast: bool = False
    plain: bool = False
    modules: tuple[ModuleError, ...] = field(default=(), repr=False)
    rounding: float | None = None
    keep_precision: bool = False
    seconds: float = 0.0
    cpu_seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """True if no run differs, failed, or shows nothing."""
        return bool(self.rows) and not self.findings and not any(row.verdict in _BAD for row in self.rows)

    def remarks(self) -> list[str]:
        """Return what was changed, and what was not seen, in sentences."""
        codes = {note["code"] for note in self.notes}
        remarks = list[str]()
        if self.plain:
            remarks.append(
                "The loop does not use dtrain's step: weights of losses and microbatch sizes were not seen or changed."
            )
        else:
            if "sharding" not in codes:
                remarks.append("The model is not sharded by shard_model, so no other strategy was run.")
            if by_hand := sorted({note["optimizer"] for note in self.notes if note["code"] == "update_by_hand"}):
                remarks.append(f"Updates of {' and '.join(by_hand)} outside of dtrain's step were not compared.")
        if "gpu" in codes:
            remarks.append("The script names a GPU. All runs used the CPU, so kernels and memory of the GPU were not seen.")
        if files := sorted({note["path"] for note in self.notes if note["code"] == "overwrite"}):
            remarks.append(
                f"The script writes {' and '.join(files)}, which the current folder has already. If it reads them, the runs "
                "did not begin at the first step. Run it in a folder without its results."
            )
        if "frozen_statistics" in codes:
            remarks.append("Batch norm ran with its initial statistics, because those of a batch depend on the layout.")
        if names := sorted({note["name"] for note in self.notes if note["code"] == "transform_draws"}):
            remarks.append(f"{', '.join(names)} draws numbers per rank, so losses were not compared between numbers of ranks.")
        for note in self.notes:
            if note["code"] == "export_not_run":
                why = note["error"] or "no model of the script has the names of its tensors"
                remarks.append(f"{note['path']} was not loaded again: {why}.")
        reasons = ("they differ in two equal runs", "they are numbers of the layout")
        for metrics, reason in zip(self.dropped, reasons, strict=True):
            if metrics:
                more = f" and {len(metrics) - _MAX_METRICS} more" if len(metrics) > _MAX_METRICS else ""
                remarks.append(f"Metrics that were not compared, because {reason}: {', '.join(metrics[:_MAX_METRICS])}{more}.")
        remarks += self.not_seen
        if self.rounding is not None:
            remarks.append(
                f"Differences within a measured tolerance count as rounding, of at most {self.rounding:.1g}: "
                f"{FAR:.0f} times the effect of one more rounding of each module's output."
            )
        errors = {note["error"] for note in self.notes if note["code"] == "failed_past_end"}
        remarks += [f"After the last step, in an epoch without batches, the script raised {error}" for error in sorted(errors)]
        if "loop_cut" in codes:
            remarks.append("The loop could not be shortened and was ended, so the code after it did not run.")
        for allowed in self.allowed:
            where = f"differs in {', '.join(allowed.runs)}" if allowed.runs else "differs in no run. Remove it"
            remarks.append(f"Allowed: {allowed.name} ({allowed.reason}) {where}.")
        if self.is_fast:
            remarks.append("A fast proof compares no metrics, resumes, strategies or microbatch sizes.")
        elif not any("killed" in row.name for row in self.rows):
            remarks.append(
                "No checkpoint was saved before the last step, so no resume was checked. "
                + (
                    "If the script saves every few hundred steps, give it arguments with which it saves after two."
                    if self.plain
                    else "Save where state.crossed(n) is True instead of step % n == 0: here it is True after each second step."
                )
            )
        return remarks

    def text(self) -> str:
        """Return the answer as text."""
        width = max([len(row.name) for row in self.rows] + [3])
        lines = [f"{'run':{width}}  result"]
        for row in self.rows:
            numbers = f" ({', '.join(str(number + 1) for number in row.findings)})" if row.findings else ""
            size = f", {row.largest:.0e} of the norm" if row.verdict == "tolerance" and row.largest else ""
            lines.append(f"{row.name:{width}}  {_WORDS[row.verdict]}{size}{numbers}{': ' + row.text if row.text else ''}")
        for number in range(len(self.findings)):
            lines += ["", *self._finding_lines(number)]
        if remarks := self.remarks():
            lines += ["", *remarks]
        if self.keep_precision:
            lines += self._module_lines()
        verdicts = [row.verdict for row in self.rows]
        counts = [format_count(len(self.findings), "difference"), format_count(verdicts.count("failed"), "failed run")]
        if nothing := verdicts.count("nothing"):
            counts.append(f"{format_count(nothing, 'run')} that show{'s' if nothing == 1 else ''} nothing")
        verdict = "all runs agree" if self.passed else ", ".join(counts)
        lines += ["", f"prove: {verdict} ({format_count(len(self.rows), 'run')} of {self.steps} steps, {self.seconds:.0f} s)"]
        return "\n".join(lines)

    def junit(self) -> str:
        """Return the report as JUnit XML: a test case for each run, with the text of its findings as its failure."""
        bad = [row.verdict in _BAD for row in self.rows]
        counts = {"tests": str(len(self.rows)), "failures": str(sum(bad)), "time": f"{self.seconds:.1f}"}
        suite = ElementTree.Element("testsuite", {"name": f"prove {self.script}", **counts})
        for row, is_bad in zip(self.rows, bad, strict=True):
            case = ElementTree.SubElement(suite, "testcase", classname=self.script, name=row.name)
            if is_bad:
                text = "\n".join(line for number in row.findings for line in self._finding_lines(number))
                message = row.text or self.findings[row.findings[0]].subject
                ElementTree.SubElement(case, "failure", type=row.verdict, message=message).text = text or row.text
            elif row.verdict == "not run":
                ElementTree.SubElement(case, "skipped", message=row.text)
        ElementTree.indent(suite)
        return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"

    def _finding_lines(self, number: int) -> list[str]:
        finding = self.findings[number]
        difference = finding.difference
        ranks = f" (ranks {', '.join(map(str, difference.ranks))})" if difference.ranks else ""
        against = f" against {finding.against}" if finding.against else ""
        line = f", at {finding.line}" if finding.line else ""
        return [
            f"{number + 1}. {finding.run}{against}: {finding.subject} {difference.text}{ranks}{line}",
            f"   {finding.cause.advice}",
            *[f"   {finding.cause.evidence}"] * bool(finding.cause.evidence),
            f'   See the page "{finding.cause.page}" of the documentation ({finding.cause.code}).',
        ]

    def _module_lines(self) -> list[str]:
        """Return the table of modules, the largest error first, and the first module that rounding does not explain."""
        if not self.modules:
            return ["", "No module computes in fewer bits than float32."]
        shown = sorted(self.modules, key=lambda module: -module.output)[:_MAX_MODULES]
        width = max(len(module.name or "model") for module in shown)
        lines = ["", f"{'module':{width}}  dtype     output   gradient  rounding  (first step, relative to float32)"]
        for module in shown:
            gradient = "-" if module.gradient is None else f"{module.gradient:.1e}"
            lines.append(
                f"{module.name or 'model':{width}}  {module.dtype:8}  {module.output:.1e}  {gradient:8}  {module.rounding:.1e}"
                f"{'  FAR' if module.is_far or module.has_other_gradient else ''}"
            )
        first = next((module for module in self.modules if module.is_far and module.leaf), None)
        if len(self.modules) > len(shown):
            more = format_count(len(self.modules) - len(shown), "more module")
            lines.append(f"and {more}, with smaller errors")
        if first is not None:
            lines.append(f"The first module in the program whose error rounding does not explain: {first.name} ({first.kind}).")
        return lines

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain data."""
        return {
            "script": self.script,
            "steps": self.steps,
            "passed": self.passed,
            "seconds": round(self.seconds, 1),
            "cpu_seconds": round(self.cpu_seconds, 1),
            "runs": [
                {
                    "name": row.name,
                    "against": row.against,
                    "verdict": row.verdict,
                    "largest": row.largest,
                    "findings": list(row.findings),
                    "error": row.text,
                }
                for row in self.rows
            ],
            "findings": [finding.as_dict() for finding in self.findings],
            "modules": [
                {
                    "name": module.name,
                    "class": module.kind,
                    "dtype": module.dtype,
                    "output": module.output,
                    "gradient": module.gradient,
                    "rounding": module.rounding,
                    "far": module.is_far or module.has_other_gradient,
                }
                for module in self.modules
            ],
            "rounding": self.rounding,
            "allowed": [asdict(allowed) for allowed in self.allowed],
            "remarks": self.remarks(),
        }
