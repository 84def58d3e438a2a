"""docs/from_composer.md: a sharded checkpoint as Composer writes it is converted by the command that the page shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

import dtrain as dt
from dtrain.checkpoint.weights import detect_format
from dtrain.cli import main
from pages.fences import DOCS
from stand_ins import GPT, VOCAB, Block


def model() -> nn.Module:
    """Put the model into a module of its own, as a ComposerModel does."""
    torch.manual_seed(0)
    wrapped = nn.Module()
    wrapped.gpt = GPT({"vocab": VOCAB})
    return wrapped


def save_as_composer_does(folder: str) -> None:
    """Save as mosaicml 0.32.1 does, with ``torch.distributed.checkpoint`` (``composer.utils.checkpoint._save_checkpoint``)."""
    sharded = dt.shard_model(model(), dt.build_mesh(), blocks=(Block,))
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-3)
    optimizer.zero_grad()
    state = {
        "model": get_model_state_dict(sharded),
        "optimizers": {"DecoupledAdamW": get_optimizer_state_dict(sharded, optimizer)},
        "timestamp": {"Timestamp": {"epoch": 3, "batch": 300}},
        "algorithms": [("EMA", {"decay": 0.99})],
        "run_name": "gpt",
    }
    rng = [{"python": (3, (1, 2), None), "torch": torch.get_rng_state()}]
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    dcp.save({"state": state, "rng": rng}, storage_writer=dcp.FileSystemWriter(folder), planner=planner)


@pytest.mark.costly
def test_sharded_composer_checkpoint_is_converted(ranks, tmp_path: Path, monkeypatch) -> None:
    text = (DOCS / "from_composer.md").read_text().replace("\\\n", " ")
    (command,) = re.findall(r"^dtrain checkpoints convert ckpt/ep3-ba300 .*$", text, re.M)
    arguments = command.split("#")[0].split()[1:]
    folder = tmp_path / arguments[2]
    ranks(2).run(save_as_composer_does, str(folder))
    assert {".metadata", "__0_0.distcp", "__1_0.distcp"} <= {path.name for path in folder.iterdir()}
    (tmp_path / "latest-rank0.pt").symlink_to(folder)  # as Composer makes it
    assert detect_format(tmp_path / "latest-rank0.pt", "convert") == "dcp"
    monkeypatch.chdir(tmp_path)
    codes = []
    for words in ([argument for argument in arguments if argument != "--trust"], arguments):
        monkeypatch.setattr("sys.argv", ["dtrain", *words])
        with pytest.raises(SystemExit) as left:
            main.run()
        codes.append(left.value.code)
    assert codes == [2, 0]
    weights = load_file(tmp_path / "weights" / "model.safetensors")
    whole = model().state_dict()
    assert weights.keys() == whole.keys()
    assert all(torch.equal(weights[name], whole[name]) for name in whole)
