"""Measure the memory that libraries take on a device, once per device, and store it in a file for plans.

Run ``dt.planning.measure_device().save("h200.json")`` on the device, and ``dtrain plan --facts h200.json`` on any machine.
"""

from __future__ import annotations

import msgspec
import torch
import torch.nn.functional as F

from dtrain import storage
from dtrain.arguments import check_int
from dtrain.device import device_name, is_accelerator
from dtrain.dist.init import get_dist_info
from dtrain.errors import ConfigError
from dtrain.memory.device_memory import get_device_memory

_MIB = 2**20
# Dtypes of the measured products. cuBLAS takes one workspace for all of them.
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MAX_FILE_BYTES = 2**16


class DeviceFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Memory that libraries take on one device, in bytes, from ``measure_device`` or ``load``.

    Args:
        device: product name of the device, such as ``"NVIDIA H200"``.
        torch: version of torch. Another version may take other workspaces.
        workspaces: workspaces of matrix products in torch's allocator, for the threads of forward and backward.
        bytes_per_group: buffers of one process group (NCCL) outside of torch's allocator, assumed unless you change the file.

    Raises:
        ConfigError: a number that is not an integer of at least 0.
    """

    device: str
    torch: str
    workspaces: int
    bytes_per_group: int

    def __post_init__(self) -> None:
        for name in ("workspaces", "bytes_per_group"):
            check_int("DeviceFacts", name, getattr(self, name), minimum=0, advice="Measure again with measure_device().")

    def save(self, path: storage.AnyPath | str) -> None:
        """Write the facts to a JSON file, which is replaced."""
        storage.replace_file(storage.resolve_path(path), msgspec.json.format(msgspec.json.encode(self), indent=1))

    @staticmethod
    def load(path: storage.AnyPath | str) -> DeviceFacts:
        """Read facts that ``save`` has written.

        Raises:
            ConfigError: the file cannot be read, or has no facts.
        """
        advice = "Write it with measure_device()."
        try:
            return msgspec.json.decode(storage.read_file(storage.resolve_path(path), limit=_MAX_FILE_BYTES), type=DeviceFacts)
        except msgspec.ValidationError as error:
            raise ConfigError(
                f"DeviceFacts.load: {str(path)!r} must have the names bytes_per_group, device, torch, workspaces, and each of "
                f"workspaces and bytes_per_group must be an integer of at least 0, got another content ({error}). {advice}"
            ) from None
        except (OSError, ValueError) as error:
            raise ConfigError(f"DeviceFacts.load: cannot read {str(path)!r} ({error}). {advice}") from None


ASSUMED_FACTS = DeviceFacts(device="", torch="", workspaces=2 * 32 * _MIB, bytes_per_group=256 * _MIB)
"""Assumptions for a device that was not measured.

- Workspaces: 32 MiB for the thread of the forward and for that of the backward. torch allocates one for each handle of cuBLAS,
  of which each thread has its own (``aten/src/ATen/cuda/CublasHandlePool.cpp``). NVIDIA recommends 32 MiB from Hopper on, and
  4 MiB before ("cublasSetWorkspace" in the reference of cuBLAS).
- NCCL: 256 MiB for the default channels of a communicator.
"""


def measure_device(device: torch.device | None = None) -> DeviceFacts:
    """Measure the memory that libraries take on this rank's device. A few small products run, forward and backward.

    Call the function in a process that has computed nothing on the device yet. ``bytes_per_group`` is not measured: it is the
    assumption of 256 MiB.

    Args:
        device: device with a counting allocator; that of ``init_dist`` by default.

    Host sync: yes.

    Example:
        with dt.init_dist():
            dt.planning.measure_device().save("facts.json")

    Raises:
        ConfigError: the memory of the device cannot be measured.
    """
    device = get_dist_info().device if device is None else device
    memory = get_device_memory(device)
    if memory is None:
        raise ConfigError(f"measure_device: device must count its memory, got {device}. Call it on an accelerator.")
    before = memory.read().live
    for dtype in _DTYPES:
        _multiply(device, dtype)
    if is_accelerator(device):
        torch.accelerator.synchronize(device)
    workspaces = memory.read().live - before
    return DeviceFacts(
        device=device_name(device),
        torch=str(torch.__version__),
        workspaces=max(0, workspaces),
        bytes_per_group=ASSUMED_FACTS.bytes_per_group,
    )


def _multiply(device: torch.device, dtype: torch.dtype) -> None:
    """Run a linear layer, forward and backward. Its tensors end with the call, and the workspaces stay."""
    weight = torch.zeros(64, 64, device=device, dtype=dtype, requires_grad=True)
    bias = torch.zeros(64, device=device, dtype=dtype, requires_grad=True)
    F.linear(torch.zeros(64, 64, device=device, dtype=dtype), weight, bias).sum().backward()
