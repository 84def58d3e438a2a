"""Tell tests the version of torch: a feature that an older torch lacks is refused, or left out with a reason."""

import torch

from dtrain.packages import parse_release


def torch_before(version: str) -> bool:
    """Return True if the installed torch is older than ``version``."""
    return parse_release(torch.__version__) < parse_release(version)
