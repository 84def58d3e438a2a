"""Print torch's facts as one line of JSON: ``python torch_probe.py``.

The program runs in a child process, so that a crash, a hang or a failed import of torch is a fact and not a traceback. No
module imports it, and it is the only module of the command line that imports torch.
"""

import json
import warnings
from typing import Any


def probe_torch() -> dict[str, Any]:
    """Collect the facts; the keys are the fields of ``TorchBuild``."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        import torch
        import torch.distributed as dist

        # torch warns with the reason if a driver exists and cannot be used.
        cuda = torch.cuda.is_available()
        count = torch.cuda.device_count() if cuda else 0
        distributed = dist.is_available()
        nccl = distributed and dist.is_nccl_available()
        version = torch.cuda.nccl.version() if nccl else None
        return {
            "version": str(torch.__version__),
            "folder": torch.__path__[0],
            "cuda": torch.version.cuda or torch.version.hip,
            "devices": [torch.cuda.get_device_name(index) for index in range(count)],
            "gloo": distributed and dist.is_gloo_available(),
            "nccl": ".".join(map(str, version)) if version else None,
            "threads": torch.get_num_threads(),
            "warnings": [" ".join(str(warning.message).split()) for warning in caught],
        }


if __name__ == "__main__":
    facts = probe_torch()
    # A line of its own, because libraries may print during the import.
    print("\n" + json.dumps(facts))
