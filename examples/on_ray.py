"""Run a script, unchanged, on a Ray cluster: python examples/on_ray.py --ranks 2 examples/train_custom.py --out /shared/ckpt

Ray Train starts one worker per rank and restarts all of them if one fails. Each start resumes from the newest checkpoint. The
folder or URL of the checkpoints must be the same on all nodes. One killed rank and a restart changes no digit of the result.
"""

import argparse
import os
import runpy
import sys

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer


def run_script(config: dict) -> None:
    """Run the script in this worker. ``dt.init_dist`` uses the process group that Ray has opened."""
    os.chdir(config["folder"])
    sys.argv = config["command"]
    sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as stop:
        if stop.code:
            raise RuntimeError(f"{sys.argv[0]} exited with {stop.code}") from stop


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--ranks", type=int, default=2, help="workers, one per rank (default: 2)")
parser.add_argument("--gpu", action="store_true", help="one GPU for each worker, with NCCL")
parser.add_argument("--max-restarts", type=int, default=3, help="restarts after a failure (default: 3)")
parser.add_argument("command", nargs=argparse.REMAINDER, help="script, and its arguments")
args = parser.parse_args()
TorchTrainer(
    run_script,
    train_loop_config={"command": args.command, "folder": os.getcwd()},
    scaling_config=ScalingConfig(num_workers=args.ranks, use_gpu=args.gpu),
    torch_config=TorchConfig(backend="nccl" if args.gpu else "gloo"),
    run_config=RunConfig(failure_config=FailureConfig(max_failures=args.max_restarts)),
).fit()
