"""Prove correct scripts: the examples and the loops of ``dtrain new``, which must give no difference.

    python benchmarks/prove_clean.py                       # all runs: over an hour on two busy cores
    python benchmarks/prove_clean.py --only 'gan|dpo'      # the rows whose name matches a regular expression
    python benchmarks/prove_clean.py --list                # the names of the rows, without a run

Each row is one ``dtrain prove`` with arguments that make the script small, in a folder of its own. A line has the verdict, the
number of runs, the wall seconds, the processor seconds of all ranks, and the row. The ranks of all rows are forks of one
process, so torch is imported once.
"""

import argparse
import os
import re
import shlex
import sys
import sysconfig
import tempfile
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dtrain.cli.main import TASKS
from dtrain.cli.main import new as write_loop
from dtrain.prove.proof import prove
from measure import machine

ROOT = Path(__file__).parents[1]
TEXT = ("--text", str(Path(sysconfig.get_path("stdlib")) / "asyncio" / "*.py"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One proof: a script of ``examples/``, or a task of ``dtrain new``; its arguments, and options of ``prove``."""

    script: str
    args: tuple[str, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        shown = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in self.options)
        return f"{self.script} {shlex.join(self.args)} {shown}".replace("(", "").replace(",)", "").replace(")", "").strip()


TWO, THREE = ("world_sizes", (2,)), ("world_sizes", (3,))
WRITTEN = ("keep_precision", True)
VARIANTS = ((TWO,), (THREE,), (TWO, WRITTEN), (THREE, WRITTEN), (TWO, ("steps", 3)), (TWO, ("steps", 6)), (TWO, ("seed", 1)))
"""Options of the proofs of each light script, which take some 10 seconds of processor time."""

SMALL = {
    "train_custom": ("--until", "20ba"),
    "train_resnet": ("--until", "4ba"),
    "train_gan": ("--steps", "4", "--save-every", "2"),
    "train_dpo": ("--read", "4ba", "--until", "4ba"),
    "train_diffusion": ("--until", "5ba", "--size", "8"),
    # Its warm-up takes 20 steps, and a run of 4 steps has a learning rate of 0.
    "train_embeddings": ("--until", "40ba", "--batch", "32"),
    "pretrain_bert": ("--until", "4ba"),
    "pretrain_gpt": ("--steps", "4", *TEXT),
    "tensor_parallel": ("--steps", "4", "--tp", "1", *TEXT),
    "finetune_bert": ("--until", "4ba", "--workers", "0"),
}
"""Arguments that make each example small."""


LIGHT = ("blank", "vision", "diffusion", "train_gan", "lm")


def rows() -> Iterator[Row]:
    """Yield all rows: each script on 2 ranks, the light ones also with further options, and other arguments of some."""
    for script in (*SMALL, *TASKS):
        small = SMALL.get(script, () if script == "blank" else ("--until", "4ba"))
        for options in VARIANTS if script in LIGHT else VARIANTS[:1]:
            yield Row(script=script, args=small, options=options)
    yield Row(script="pretrain_gpt", args=(*SMALL["pretrain_gpt"], "--strategy", "replicate"), options=(TWO,))
    yield Row(script="train_resnet", args=(*SMALL["train_resnet"], "--strategy", "full_shard"), options=(TWO,))
    yield Row(script="train_resnet", args=SMALL["train_resnet"], options=(TWO, WRITTEN))
    yield Row(script="finetune_bert", args=(*SMALL["finetune_bert"], "--precision", "fp32"), options=(TWO,))
    yield Row(script="finetune_bert", args=SMALL["finetune_bert"], options=(TWO, WRITTEN))


def script_of(row: Row, folder: Path) -> Path:
    """Return the path of a row's script, which is written first if it is a loop of ``dtrain new``."""
    if row.script not in TASKS:
        return ROOT / "examples" / f"{row.script}.py"
    path = folder / f"{row.script}.py"
    write_loop(str(path), task=row.script)
    return path


def run(row: Row) -> bool:
    """Run a row, print its line, and the whole answer if it has a difference. Returns True if there is none."""
    with tempfile.TemporaryDirectory(prefix="prove-clean-") as folder:
        os.chdir(folder)
        try:
            report = prove(script_of(row, Path(folder)), row.args, timeout_s=900.0, **dict(row.options))
        except Exception:  # noqa: BLE001 - the other rows continue
            traceback.print_exc()
            return False
        finally:
            os.chdir(ROOT)
    verdict, seconds = "agrees" if report.passed else "DIFFERS", f"{report.seconds:4.0f} s, {report.cpu_seconds:4.0f} s cpu"
    print(f"{verdict:8} {len(report.rows):2} runs {seconds}  {row.name}", flush=True)
    if not report.passed:
        print(report.text(), flush=True)
    return report.passed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="REGEX", help="rows whose name matches")
    parser.add_argument("--list", action="store_true", help="print the rows and end")
    args = parser.parse_args()
    chosen = [row for row in rows() if re.search(args.only, row.name)]
    if args.list:
        print("\n".join(row.name for row in chosen))
        return 0
    print(machine(), flush=True)
    agreed = sum(run(row) for row in chosen)
    print(f"{agreed} of {len(chosen)} proofs report no difference")
    return int(agreed < len(chosen))


if __name__ == "__main__":
    sys.exit(main())
