"""An accelerator for machines without one: torch takes its tensors, generators and streams for a device's.

``start()`` compiles ``simulated_accelerator.cpp`` once for each version of torch, which takes ten seconds of a core, and
registers the device ``simulated``. Its operations run on the CPU, and refuse what a GPU refuses: tensors of two devices, and a
generator of another device. What differs from a GPU: each operation ends before the next begins, the allocator has no counters,
autocast changes nothing, and kernels for GPUs, NCCL and ``torch.compile`` are missing.
"""

import hashlib
import os
import subprocess
import tempfile
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

NAME = "simulated"
SOURCE = Path(__file__).with_suffix(".cpp")
BUILD = Path(__file__).parents[1] / "build"


def start() -> None:
    """Register the accelerator in this process, if it is not yet."""
    if hasattr(torch, NAME):
        return
    torch.ops.load_library(str(compiled()))
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, device_module(torch.ops.simulated_accelerator.default_generator()))
    torch.utils.generate_methods_for_privateuse1_backend()


def compiled() -> Path:
    """Return the compiled library for this version of torch; compile it at its first use."""
    root = Path(torch.__file__).parent
    digest = hashlib.sha256(SOURCE.read_bytes() + f"{torch.__version__} {root}".encode()).hexdigest()[:12]
    library = BUILD / f"simulated-accelerator-{digest}.so"
    if not library.exists():
        BUILD.mkdir(exist_ok=True)
        includes = [f"-I{root / 'include' / folder}" for folder in ("", "torch/csrc/api/include")]
        libraries = [f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch"]
        with tempfile.TemporaryDirectory(dir=BUILD) as folder:
            made = Path(folder) / "library.so"
            command = ["g++", "-shared", "-fPIC", "-O1", "-std=c++20", *includes, str(SOURCE), "-o", str(made), *libraries]
            subprocess.run(command, check=True)
            # Processes that compile at the same time replace each other's equal file.
            os.replace(made, library)
    return library


def device_module(generator: torch.Generator) -> ModuleType:
    """Return the module ``torch.simulated``, with what ``torch.cuda`` has and the core uses."""
    module: Any = ModuleType(f"torch.{NAME}")
    module.default_generators = (generator,)
    module.is_available = module.is_initialized = lambda: True
    # torch.utils.checkpoint keeps the random state of a device that has been started.
    module._initialized = True
    module.is_bf16_supported = lambda: True
    module._is_in_bad_fork = lambda: False
    module.device = lambda device: nullcontext()
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module.set_device = lambda device: None
    module.get_device_name = lambda device=None: "simulated accelerator"
    module.manual_seed = module.manual_seed_all = generator.manual_seed
    module.get_rng_state = lambda device=None: generator.get_state()
    module.set_rng_state = lambda state, device=None: generator.set_state(state)
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    checked: ModuleType = module
    return checked
