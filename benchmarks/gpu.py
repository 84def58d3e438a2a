"""Run a benchmark for a GPU and write its figures with the facts of the device. Needs no installation.

    PYTHONPATH=src python benchmarks/gpu.py train                       # into benchmarks/results/gpu-train.json
    PYTHONPATH=src python benchmarks/gpu.py train overhead              # several, each ends within 8 minutes
    PYTHONPATH=src python benchmarks/gpu.py train --toy --out build/dry # a dry run at toy size, on a CPU too

``python benchmarks/figures.py`` then writes the tables of docs/gpu.md.
"""

from __future__ import annotations

import argparse
import importlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from gpu_device import Setting
from gpu_results import BENCHMARKS, RESULTS, ResultFile, Table, collect_facts, markdown

Benchmark = Callable[[Setting], Iterator[Table]]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the named benchmarks in order."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", choices=BENCHMARKS, metavar="NAME", help=", ".join(BENCHMARKS))
    parser.add_argument("--toy", action="store_true", help="a dry run at toy size; needs --out")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the files (%(default)s)")
    args = parser.parse_args(arguments)
    if args.toy and args.out.resolve() == RESULTS.resolve():
        parser.error("--toy needs --out FOLDER, because a dry run is no result")
    if not args.toy and not torch.cuda.is_available():
        parser.error("no CUDA device is usable; --toy --out FOLDER makes a dry run on a CPU")
    lacking = [name for name in args.names if not ended(name, Setting(device=default_device(), toy=args.toy), args.out)]
    if lacking:
        raise SystemExit(f"not run: {', '.join(lacking)}")


def ended(name: str, setting: Setting, folder: Path) -> bool:
    """Run one benchmark; return False, with a line that names the package, if a package is missing."""
    try:
        run(name, setting, folder)
    except ModuleNotFoundError as error:
        print(f"{name}: needs the package {error.name}, which is not installed", flush=True)
        return False
    return True


def default_device() -> torch.device:
    """Return the CUDA device of this process, else the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def run(name: str, setting: Setting, folder: Path) -> ResultFile:
    """Run one benchmark, print its tables, and write its file."""
    command = f"python benchmarks/gpu.py {name}{' --toy' if setting.toy else ''}"
    benchmark: Benchmark = getattr(importlib.import_module(BENCHMARKS[name]), name)
    file = ResultFile(folder=folder, name=name, facts=collect_facts(setting.device, command), dry_run=setting.toy)
    print(f"{name}: " + ", ".join(f"{fact} {value}" for fact, value in file.facts.items()), flush=True)
    begun = time.perf_counter()
    for table in benchmark(setting):
        file.add(table)
        print(f"\n{markdown(file.tables[-1])}", flush=True)
    file.write(complete=True)
    print(f"\n{name}: {time.perf_counter() - begun:.0f} s, written to {file.path}", flush=True)
    return file


if __name__ == "__main__":
    main()
