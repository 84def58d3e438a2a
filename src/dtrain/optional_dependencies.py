"""What may be installed besides: the extras of the package, and the modules that each brings. Imports none of them."""

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
    "report": ("matplotlib",),
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
    "mlflow": ("mlflow", "sqlalchemy", "alembic"),
}


def install_command(extra: str) -> str:
    """What brings ``extra``, to be typed."""
    assert extra in EXTRA_MODULES, f"no extra {extra!r}"
    return f'pip install "dtrain[{extra}]"'


def missing_extra_error(need: str, extra: str) -> ConfigError:
    """The error to raise where a package of ``extra`` is not there; ``need`` says who needs which."""
    return ConfigError(f"{need}: {install_command(extra)}")
