"""Measure a normal step of two checkouts against each other, to see that the hooks of ``dtrain prove`` cost nothing.

    python benchmarks/prove_cost.py                         # this checkout against itself: the A/A band
    python benchmarks/prove_cost.py --against /path/to/src  # against a checkout without the hooks

Each run is a process of its own that trains a tiny model, the worst case, and prints the processor time of a step.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import dtrain
from measure import Run, compare, machine, timed_rounds, verdict_line

AT_MOST = 1.01

STEPS = """
import time, torch, dtrain as dt
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
step = dt.compose_step(lambda model, batch: dt.soft_cross_entropy(model(batch), batch[:, :4].argmax(1)))
state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1))
batch = torch.randn(16, 8)
for index in range(1200):
    if index == 200:
        began = time.process_time()
    state, metrics = step(state, batch)
    dt.reduce_metrics(metrics)
print((time.process_time() - began) / 1000)
"""


def seconds_per_step(source: Path) -> float:
    """Return the processor time of a step, in seconds, in a new process that imports dtrain from ``source``."""
    environment = os.environ | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", STEPS], env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    own = Path(dtrain.__file__).parents[1]
    parser.add_argument("--against", type=Path, default=own, help="folder src of the other checkout (default: this one)")
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    sources = {"with": own, "against": args.against}
    found: dict[str, float] = {}

    def run(name: str) -> None:
        found[name] = seconds_per_step(sources[name])

    candidates: dict[str, Run] = {name: (lambda name=name: run(name)) for name in sources}

    def timer(candidate: Run) -> dict[str, float]:
        candidate()
        name = next(each for each, other in candidates.items() if other is candidate)
        return {"cpu": found[name]}

    rounds = timed_rounds(candidates, timer, rounds=args.rounds)["cpu"]
    comparison = compare(rounds["with"], rounds["against"])
    print(machine())
    print(f"step: {comparison.a_s * 1e6:.1f} us and {comparison.b_s * 1e6:.1f} us, A/A band {comparison.band}")
    print(verdict_line("a step with the hooks of prove", comparison.ratio, at_most=AT_MOST))


if __name__ == "__main__":
    main()
