"""A program of its own: ``python torch_probe.py`` prints what torch says about itself as one line of JSON.

Run in a child process, so that a torch that crashes, hangs or cannot be imported is a fact and not a traceback. Imported by
nobody: it is the one file of the command line that imports torch.
"""

import json
import warnings
from typing import Any


def probe_torch() -> dict[str, Any]:
    """The facts; the keys are the fields of ``TorchBuild``."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        import torch
        import torch.distributed as dist

        cuda = torch.cuda.is_available()  # warns with the reason when a driver is there and cannot be used
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
    print("\n" + json.dumps(facts))  # on a line of its own, whatever a library printed while it was imported
