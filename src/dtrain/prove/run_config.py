"""Describe one run of a proof: what the command changes in the script from outside (``RunConfig``)."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from dtrain.typing import Plain

Dtype = Literal["fp64", "fp32", "as written"]

CONFIG_VARIABLE = "DTRAIN_PROVE"
"""Environment variable with the path of a rank's ``RunConfig``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """One run of the script on some ranks, and its changes from outside.

    Args:
        name: name of the run, unique in the proof, as in ``"2 ranks, replicate"``.
        folder: folder of the run's records and output.
        work_folder: current folder of the ranks. A resumed run has the folder of the killed run.
        script: path of the script.
        args: arguments of the script.
        ranks: number of ranks.
        steps: number of steps to run.
        dtype: dtype of the whole computation.
        strategy: strategy of ``shard_model``; None keeps the script's strategy.
        microbatch_size: microbatch size; None keeps the script's size.
        even_random: if True, random numbers are equal for all samples, so that they do not depend on the layout.
        recompute: if False, activation checkpointing is off.
        kill_after: step after which all ranks are killed; None runs to the end.
        has_dtrain_loop: if True, the script runs dtrain's step, so the steps of a loop by hand prepare the training.
        first_step: number of the first step in a script that does not use dtrain's step, in a resumed run.
        activations: if True, record the outputs of all modules in the first forward, and their gradients.
        perturb: if True, change the last bit of the outputs of modules, to measure the effect of rounding.
        perturb_seed: seed of these changes.
        check_exports: if True, load exported files again, and compare outputs.
    """

    name: str
    folder: str
    work_folder: str
    script: str
    args: tuple[str, ...] = ()
    ranks: int = 1
    steps: int = 4
    dtype: Dtype = "fp64"
    strategy: str | None = None
    microbatch_size: int | None = None
    even_random: bool = False
    recompute: bool = True
    kill_after: int | None = None
    has_dtrain_loop: bool = False
    first_step: int = 0
    activations: bool = False
    perturb: bool = False
    perturb_seed: int = 0
    check_exports: bool = False

    def write(self) -> Path:
        """Write the config into its folder, which is created, and return the path."""
        path = Path(self.folder) / "run.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")
        return path

    @classmethod
    def read(cls, path: Path) -> RunConfig:
        """Read a config that ``write`` has written."""
        values: dict[str, Plain] = json.loads(path.read_text(encoding="utf-8"))
        values["args"] = tuple(values["args"])  # type: ignore[arg-type, assignment]
        return cls(**values)  # type: ignore[arg-type]


SAVE_INTERVAL = 2
"""Steps between two saves in a short run: ``state.crossed`` is True after each second step."""

SKETCH_SIZE = 2048
"""Largest number of numbers that represent a recorded tensor; see ``run_log``."""
