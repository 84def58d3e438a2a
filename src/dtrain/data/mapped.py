"""``memory_mapped``: a TensorDict on disk that all ranks of a node read through one page cache."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from dtrain import storage
from dtrain.dist.turns import local_rank_zero_first
from dtrain.errors import ConfigError


def memory_mapped(folder: str | Path, make: Callable[[], Any]) -> Any:
    """The ``TensorDict`` in ``folder``, memory-mapped; made and written there first, once per node, if there is none.

    Tensors then take memory once per node and not once per rank and loader worker, and starting costs no reading.

    Args:
        folder: of tensordict's own format; on a disk of the node.
        make: ``() -> TensorDict`` with a batch size ``[n]``; runs on local rank 0 only, and only if there is no folder.

    Collective: one exchange of JSON; all ranks must call it.

    Raises:
        ConfigError: ``make`` gives no TensorDict, or one without a first axis; on local rank 0, the others raise a PeerError.
    """
    from tensordict import TensorDict, TensorDictBase  # takes a second or two to import

    where = storage.real_path(folder)
    with local_rank_zero_first("memory_mapped") as first:
        if first and not storage.exists(where):
            made = make()
            if not isinstance(made, TensorDictBase) or not made.batch_dims:
                raise ConfigError(f"memory_mapped: make must give a TensorDict with a batch size, got {type(made).__name__}")
            # Renamed when it is whole: a folder that is there can be read.
            part = where.with_name(f"{where.name}.tmp-{secrets.token_hex(4)}")
            storage.make_folders(part.parent)
            try:
                cast("Any", made).memmap(part)
                storage.rename(part, where)
            finally:
                if storage.exists(part):
                    storage.remove_folder(part)
        return TensorDict.load_memmap(where)
