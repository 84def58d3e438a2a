"""Small checkpoints of several kinds, made once per process and copied for every test that breaks one."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from checkpoint.faults.nursery import LONG_S, fork_ranks

Files = dict[str, bytes]
"""The content of a root by path."""
EXTRA = {"note": {"text": "é"}, "table": [1, 2.5, None]}
KINDS = ("1 rank", "2 ranks", "two states", "frozen apart")


def states_of(kind: str, seed: int = 0) -> Any:
    """Return the state, or the states by name, of a checkpoint of this kind."""
    from checkpoint.states import plain_state

    if kind == "two states":
        return {name: plain_state(seed + index) for index, name in enumerate(("generator", "critic"))}
    state = plain_state(seed)
    if kind == "frozen apart":
        state.params["first.weight"].requires_grad_(False)
    return state


def _save(root: str, kind: str, seed: int) -> None:
    import dtrain as dt
    from checkpoint.states import train
    from dtrain.checkpoint import plan

    # So that the second rank has a tensor to write.
    plan.MIN_WRITER_BYTES = 1
    with dt.init_dist(device="cpu"):
        states = states_of(kind, seed)
        # Ranks without a mesh train equal replicas only with equal draws.
        dt.seed_all(seed)
        for _ in range(2):
            several = isinstance(states, dict)
            states = {name: train(state, 1) for name, state in states.items()} if several else train(states, 1)
            dt.save_sharded(root, states, extra=EXTRA, incremental=kind == "frozen apart").wait()


@cache
def sample(kind: str, seed: int = 0) -> Files:
    """Two steps of one run. To be called in a nursery."""
    from checkpoint.faults.kills import scratch

    with scratch() as folder:
        with fork_ranks(2 if kind == "2 ranks" else 1, _save, folder, kind, seed) as ranks:
            for rank in ranks:
                rank.answer(within_s=LONG_S)
        paths = [path for path in Path(folder).rglob("*") if path.is_file() and path.parent != Path(folder)]
        return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(paths)}


def write(files: Files, root: Path) -> Path:
    """A copy below ``root``. Returns the folder of the newest step."""
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return root / max(name.split("/")[0] for name in files)
