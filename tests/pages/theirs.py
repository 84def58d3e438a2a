"""Run one process of a page's script of another library: ``torchrun ... theirs.py PAGE``, in an empty folder.

A stand-in replaces each name that the script assumes, as for ours. It prints how many batches the process has seen.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1]))
from pages.fences import DOCS, fences
from stand_ins import namespace

ON_A_CPU = {
    "from_fabric.md": {  # its FSDP refuses to run without GPUs
        "devices=8": "devices=2, accelerator='cpu'",
        "FSDPStrategy(auto_wrap_policy={Block})": "'ddp'",
        "empty_init=True": "empty_init=False",
    }
}
SAMPLES = 512


def main(page: str) -> None:
    (script,) = (block.text for block in fences(DOCS / page) if block.language == "py")
    for shown, instead in ON_A_CPU.get(page, {}).items():
        assert script.count(shown) == 1, f"{page} no longer has {shown!r}"
        script = script.replace(shown, instead)
    losses: list[float] = []

    def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        losses.append(loss.item())
        return loss

    names = namespace(cross_entropy=cross_entropy)
    rows = names["dataset"][:SAMPLES]
    names["dataset"] = [{name: rows[name][index] for name in ("input_ids", "labels")} for index in range(SAMPLES)]
    names["loader"] = torch.utils.data.DataLoader(names["dataset"], batch_size=8, shuffle=True)
    names["scheduler"] = torch.optim.lr_scheduler.LambdaLR(names["optimizer"], lambda step: 1.0)
    exec(compile(script, page, "exec"), names)
    assert all(map(math.isfinite, losses))
    sys.stdout.write(f"batches {len(losses)}\n")  # in one piece: two processes have one pipe


if __name__ == "__main__":
    main(sys.argv[1])
