"""Run one benchmark for a GPU in this process: print its tables, and write its file with the facts of the device.

``python benchmarks/gpu.py`` starts this module with the right path.
"""

from __future__ import annotations

import argparse
import importlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from gpu import BENCHMARKS
from gpu_device import Setting
from gpu_results import ResultFile, Table, collect_facts


def main() -> None:
    """Run the named benchmark; exit with 1 if a row of it says that something failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=BENCHMARKS)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--toy", action="store_true")
    args = parser.parse_args()
    cuda = torch.cuda.is_available()
    if not args.toy and not cuda:
        parser.error("no CUDA device is usable; --toy --out FOLDER makes a dry run on a CPU")
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    try:
        file = run(args.name, Setting(device=device, toy=args.toy, seconds=args.seconds, folder=args.out))
    except KeyboardInterrupt:
        raise SystemExit(f"\n{args.name}: interrupted; its file has the finished rows") from None
    if file.failed:
        raise SystemExit(1)


def run(name: str, setting: Setting) -> ResultFile:
    """Run one benchmark, and write its file after each row."""
    command = f"python benchmarks/gpu.py {name} --seconds {setting.seconds:.0f}{' --toy' if setting.toy else ''}"
    benchmark: Callable[[Setting], Iterator[Table]] = getattr(importlib.import_module(BENCHMARKS[name].module), name)
    file = ResultFile(folder=setting.folder, name=name, facts=collect_facts(setting.device, command), dry_run=setting.toy)
    print(f"\n{name}: " + ", ".join(f"{fact} {value}" for fact, value in file.facts.items()), flush=True)
    begun = time.perf_counter()
    for table in benchmark(setting):
        file.add(table)
    file.write(complete=True)
    print(f"\n{name}: {time.perf_counter() - begun:.0f} s, written to {file.path}", flush=True)
    return file


if __name__ == "__main__":
    main()
