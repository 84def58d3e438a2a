"""What has to be the same on all nodes of a job: versions, the script, and the data that the user names."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from dtrain.launch.plan import Target
from dtrain.launch.target import find_source
from dtrain.versions import versions

_DIGITS = 16  # of a digest: told apart by people


def collect_facts(target: Target, paths: Iterable[str]) -> dict[str, str]:
    """The facts of this node, by what they are called.

    Args:
        target: its source is compared by a digest.
        paths: files and folders; compared by size, a folder by how many entries it has.

    A path that is not there is a fact, too: the meeting names the node on which it is missing, on all of them.
    """
    facts = dict(versions())
    source = None if target.kind == "command" else find_source(target)
    if source is not None:
        facts[f"the content of {target.name}"] = hashlib.sha256(source.read_bytes()).hexdigest()[:_DIGITS]
    return facts | {path: _size(path) for path in paths}


def _size(path: str) -> str:
    try:
        if os.path.isdir(path):
            return f"a folder of {len(os.listdir(path))} entries"
        return f"{Path(path).stat().st_size} bytes"
    except OSError as error:
        return f"{error.strerror}"
