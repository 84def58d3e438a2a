"""Environment variables that change how a run behaves. The value is told only where it cannot be a secret."""

from __future__ import annotations

from collections.abc import Mapping

_SHOWN = (
    "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR MASTER_PORT "
    "OMP_NUM_THREADS MKL_NUM_THREADS OPENBLAS_NUM_THREADS KMP_AFFINITY "
    "CUDA_VISIBLE_DEVICES NVIDIA_VISIBLE_DEVICES CUDA_DEVICE_ORDER CUDA_LAUNCH_BLOCKING CUBLAS_WORKSPACE_CONFIG "
    "GLOO_SOCKET_IFNAME TP_SOCKET_IFNAME PYTORCH_CUDA_ALLOC_CONF PYTORCH_ALLOC_CONF TORCH_DISTRIBUTED_DEBUG "
    "SLURM_JOB_ID SLURM_NNODES SLURM_NODEID SLURM_NTASKS SLURM_PROCID SLURM_LOCALID"
)
_SHOWN_PREFIXES = ("NCCL_", "TORCH_NCCL_", "TORCHELASTIC_", "DTRAIN_")
_NAMED = (
    "PYTHONPATH PYTHONHOME LD_LIBRARY_PATH LD_PRELOAD HF_HOME HF_TOKEN WANDB_API_KEY "
    "AWS_PROFILE AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY GOOGLE_APPLICATION_CREDENTIALS AZURE_STORAGE_CONNECTION_STRING "
    "HTTP_PROXY HTTPS_PROXY http_proxy https_proxy"
)


def shown(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables whose value is told, sorted by name: ranks, threads, interfaces, switches of libraries."""
    names = set(_SHOWN.split())
    return {name: value for name, value in sorted(environ.items()) if name in names or name.startswith(_SHOWN_PREFIXES)}


def named(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Those that matter too, but may hold a secret or are long: names only, sorted."""
    return tuple(sorted(environ.keys() & set(_NAMED.split())))
