"""List, verify, prune and convert checkpoints that ``dt.save_sharded`` wrote.

    for info in dt.checkpoint.list_steps("runs/gpt/ckpt"):
        print(info.step, info.bytes, info.path)
    dt.checkpoint.verify("runs/gpt/ckpt")  # the newest step
    dt.checkpoint.prune("runs/gpt/ckpt", keep_last=3)
    dt.checkpoint.convert("runs/gpt/ckpt", "model.safetensors", to="safetensors")

A checkpoint is committed by one rename. Every read is checked against a digest, and no file is a pickle.
"""

from typing import TYPE_CHECKING

from dtrain.lazy_imports import attach

if TYPE_CHECKING:
    from dtrain.checkpoint.checkpoint_info import CheckpointInfo as CheckpointInfo
    from dtrain.checkpoint.checkpoint_info import list_steps as list_steps
    from dtrain.checkpoint.commit import SaveResult as SaveResult
    from dtrain.checkpoint.conversion.convert import ConvertResult as ConvertResult
    from dtrain.checkpoint.conversion.convert import convert as convert
    from dtrain.checkpoint.conversion.convert import save_pretrained_files as save_pretrained_files
    from dtrain.checkpoint.extra import not_saved as not_saved
    from dtrain.checkpoint.extra import per_rank as per_rank
    from dtrain.checkpoint.load import Restored as Restored
    from dtrain.checkpoint.load_weights import LoadWeightsResult as LoadWeightsResult
    from dtrain.checkpoint.reader import verify as verify
    from dtrain.checkpoint.retention import prune as prune
    from dtrain.checkpoint.save import SaveHandle as SaveHandle

__getattr__, __dir__ = attach(__name__, __file__)
