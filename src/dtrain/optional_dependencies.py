"""List the extras of the package and their modules, and make errors for missing extras. Imports none of the modules."""

from __future__ import annotations

from dtrain.errors import ConfigError

EXTRA_MODULES: dict[str, tuple[str, ...]] = {
    "hf": ("transformers", "tokenizers"),
    "http": ("fsspec", "aiohttp"),
    "s3": ("fsspec", "s3fs"),
    "gcs": ("fsspec", "gcsfs"),
    "azure": ("fsspec", "adlfs"),
    "oci": ("fsspec", "ocifs"),
    "sftp": ("paramiko",),
    "compression": ("zstandard", "brotli", "snappy"),
    "parquet": ("pyarrow",),
    "images": ("PIL",),
    "streaming": ("zstandard", "brotli", "snappy", "pyarrow", "PIL"),
    "fp8": ("torchao",),
    "plot": ("matplotlib",),
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
    "mlflow": ("mlflow", "sqlalchemy", "alembic"),
}


def install_command(extra: str) -> str:
    """Return the command that installs ``extra``."""
    assert extra in EXTRA_MODULES, f"no extra {extra!r}"
    return f'pip install "dtrain[{extra}]"'


def missing_extra_error(need: str, extra: str) -> ConfigError:
    """Make the error for a missing package of ``extra``; ``need`` names the function and the package."""
    return ConfigError(f"{need}: {install_command(extra)}")
