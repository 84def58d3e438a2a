"""Tell tests which torch runs: what an older one lacks is refused, or left out with a reason."""

import torch

from dtrain.packages import parse_release


def torch_before(version: str) -> bool:
    """Return True if the installed torch is older than ``version``."""
    return parse_release(torch.__version__) < parse_release(version)
