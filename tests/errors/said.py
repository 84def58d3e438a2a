"""Messages that docs/errors.md shows, section by section: from torch in loops written by hand, and from dtrain.

The one table for the page and the tests: a test gives ``check`` the raised errors, and ``test_page.py`` compares
the page. ``...`` stands for any text: a path, a port, words that differ between releases.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """The messages of a section, in its order."""

    by_hand: tuple[str, ...] = ()
    here: tuple[str, ...] = ()


SAID = {
    "Resuming on another number of ranks": Said(
        by_hand=(
            "RuntimeError: Error(s) in loading state_dict for Linear:\n"
            "\tsize mismatch for weight: copying a param with shape torch.Size([2, 4]) from checkpoint, the shape in current "
            "model is torch.Size([4, 4]).",
        ),
        here=("dtrain: load_sharded: loaded .../ckpt/step-00000001 in ... s",),
    ),
    "Out of memory with full sharding": Said(
        by_hand=("torch.OutOfMemoryError: ... out of memory. Tried to allocate ...",),
        here=(
            "OutOfMemoryError: auto_microbatch: step 0: a microbatch of 1 does not fit on rank ...: ... out of memory. Tried "
            "to allocate ... MiB used by others). Try, in this order: activation checkpointing "
            "(dt.shard.checkpoint_activations), CPU offload (shard_model(offload='params')), a smaller model.",
        ),
    ),
    "A loss that is NaN from some step on": Said(
        here=(
            "NonFiniteError: step: the loss was infinite or NaN in 10 steps in a row, from step 3 on. The updates have "
            "spoiled the parameters, so load a checkpoint of step 2 or before, then lower the learning rate, clip, or look at "
            "the batches. dt.transforms.nonfinite skips such updates, and changes the number of steps that stops the run.",
        ),
    ),
    "First contact": Said(
        here=(
            "ConfigError: step: the arguments must be (state, batch), got (Tensor, TrainState). Swap them: "
            "`state, metrics = step(state, batch)`.",
            "ConfigError: init: got the optimizer before the model. Swap them: `state = step.init(model, optimizer)`.",
            "ConfigError: init: SGD holds 1 of 2 trainable parameters, so these would never train: bias. Add them, freeze them "
            "with requires_grad_(False), or pass missing_ok=True.",
            "ConfigError: microbatch_step: loss_fn must return a LossSum, got Tensor []. For a mean, wrap loss_fn in "
            'dt.mean_loss(loss_fn, weight=lambda batch: len(batch["labels"])). For a sum, return '
            "dt.LossSum(total=loss, weight=count).",
            "ConfigError: init: this process is one of 4 ranks (WORLD_SIZE=4), but init_dist is not open, so every rank would "
            "train alone. Put the loop into `with dt.init_dist() as info:`.",
        ),
    ),
    "The batch size of a custom batch": Said(
        here=(
            "ConfigError: batch: found no tensor to split in a Documents. Give tensors, mappings or sequences of "
            "tensors, or describe the batch with dt.batch_spec(count=..., split=...).",
            "ConfigError: batch: the first axis must be the batch axis in every tensor, got batch['x'][8, 3], batch['y'][6]. "
            "Describe the batch with dt.batch_spec: its axes, or count= and split=.",
        ),
    ),
    "A barrier that times out": Said(
        by_hand=(
            "torch.distributed.DistNetworkError: The client socket has timed out after 1000ms while trying to connect to "
            "(127.0.0.1, ...).",
            "torch.distributed.DistStoreError: Timed out after ... seconds waiting for clients. 1/2 clients joined.",
        ),
        here=(
            "DistError: init_dist: 1 of 2 ranks did not arrive within 1 s: missing [1]. Look at their output, or raise "
            "init_timeout_s.",
            "dtrain: launch: node 1 (...) did not reach node 0 at 127.0.0.1:... in 1 s, last: connection refused. Check that "
            "node 0 runs, and --master-addr and --master-port, which this node tried by interface lo. GLOO_SOCKET_IFNAME and "
            "NCCL_SOCKET_IFNAME choose the interface of the ranks.",
        ),
    ),
    "A fused kernel that is missing": Said(
        by_hand=("ModuleNotFoundError: No module named 'apex'",),
        here=(
            "UserWarning: fused_layer_norm: torch has no fused norm on a cpu. 1 norm became torch's unfused norms, with the "
            "same results.",
        ),
    ),
    "Checkpoints that are too large": Said(
        by_hand=("RuntimeError: [enforce fail at inline_container.cc:...] . unexpected pos ... vs ...",),
        here=(
            "CheckpointError: save_sharded: step 1: [Errno 28] No space left on device: '.../rank-00000.safetensors'. The step "
            "was not committed and earlier steps are unchanged. Free space or repair the file system, then save again.",
        ),
    ),
    "Training hangs after the first epoch": Said(
        by_hand=("RuntimeError: [...] Timed out waiting 1000ms for recv operation to complete",),
        here=(
            "StepError: step: ranks must run the same exchange, got 'all_gather leaving init_dist' from rank 1. Take the same "
            "steps on all ranks, as loader.until does, and run collectives in one order.",
        ),
    ),
    "A corrupt sample": Said(
        by_hand=(
            "ValueError: Caught ValueError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):...",
        ),
        here=("DataError: loader: sample 9: ValueError: broken data stream when reading image file",),
    ),
    "A loss that is not synchronised": Said(),
    "The same metric from every rank": Said(),
    "The same order in every epoch": Said(),
    "Objects that cannot be pickled": Said(
        by_hand=(
            "AttributeError: Can't ... local object '...<locals>.<lambda>'",
            "_pickle.UnpicklingError: Weights only load failed....",
        ),
        here=(
            "ConfigError: extra/schedule/warmup: state must be tensors and plain data (None, bool, int, float, str, list, "
            "tuple, dict), got builtins.function. Convert it in state_dict().",
            "ConfigError: loader: dataset.decode cannot be sent to a worker (AttributeError: Can't ... local object "
            "'...<locals>.<lambda>'). Open it where it is used.",
            "ConfigError: all_gather_json: takes plain data only: Object of type function is not JSON serializable. "
            "Pass numbers, texts, booleans, None, lists and dicts.",
        ),
    ),
    "A batch that grew with the number of ranks": Said(),
    "A port that is taken": Said(
        by_hand=(
            "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. port: "
            "..., useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use",
        ),
        here=(
            "DistError: init_dist: rank 0 cannot open the rendezvous at 127.0.0.1:... (The server socket has failed to "
            "listen ... address already in use). Give all ranks another MASTER_PORT, or start them with dtrain launch, which "
            "finds a free port.",
            "dtrain: launch: node 0 cannot listen at 127.0.0.1:...: address already in use. Choose another --master-port, or "
            "--master-addr, the same on each node.",
        ),
    ),
    "A rate of zero after a finished run was extended": Said(
        by_hand=("ValueError: Tried to step 4 times. The specified number of total steps is 3",),
        here=(
            "UserWarning: scale_lr: the rate of every group is 0 from this step on, because the schedule has ended before the "
            "run. Give the schedule the length of the run, as in dt.schedules.cosine(1.0, 0.0, loader.total_steps(length)).",
        ),
    ),
    "Gradients that are None": Said(
        here=(
            "ConfigError: init: 1 of 1 optimizer parameters are not in the model (first: shape (4, 4)). shard_model, "
            "materialize and edits of the model make new Parameter objects. Build the optimizer after them. "
            "Register a parameter of the loss in the model: model.scale = nn.Parameter(...).",
        ),
    ),
}


def told(error: BaseException) -> str:
    """An error as a traceback ends with it; ours without their module."""
    kind = type(error)
    plain = kind.__module__ == "builtins" or kind.__module__.startswith("dtrain")
    return f"{'' if plain else f'{kind.__module__}.'}{kind.__qualname__}: {error}"


def raised(call: Callable[[], Any]) -> str:
    """Return the error of a call, as text that may come from a rank."""
    try:
        result = call()
    except Exception as error:  # noqa: BLE001  # of any kind: the table knows which
        return told(error)
    return f"nothing was raised, but {result!r} returned"


def fits(shown: str, real: str) -> bool:
    """Return True if a message is the shown message."""
    pattern = ".*".join(re.escape(piece) for piece in shown.split("..."))
    return re.fullmatch(pattern, real.strip(), re.S) is not None


def check(section: str, *, by_hand: tuple[str, ...] = (), here: tuple[str, ...] = ()) -> None:
    """Compare raised errors with the table: all messages of a section, in its order."""
    said = SAID[section]
    for shown, real in zip((*said.by_hand, *said.here), (*by_hand, *here), strict=True):
        assert fits(shown, real), f"{section}: shown\n{shown}\nreal\n{real}"
