"""Check an installation of the package alone: no extra, and no checkout on the path.

    python tests/installed.py RUN_DIR   # any run that was observed; with the interpreter that has the wheel or the sdist

Run by ``nox -s package``. It needs no pytest, so that only dtrain's own dependencies are installed.
"""

import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

import dtrain as dt
import public
from dtrain import storage
from dtrain.data.token_stream import load_tokenizer
from dtrain.packages import EXTRA_MODULES

CHECKOUT = Path(__file__).resolve().parents[1]


def main(run: str) -> None:
    assert not Path(dt.__file__).is_relative_to(CHECKOUT), f"{dt.__file__} is not an installed package"
    assert (Path(dt.__file__).parent / "py.typed").exists()
    public.load_all()
    present = [module for modules in EXTRA_MODULES.values() for module in modules if importlib.util.find_spec(module)]
    assert set(present) <= {"fsspec"}, f"torch brings fsspec; what brings {present}?"
    with tempfile.TemporaryDirectory() as folder:
        asked = calls(Path(folder))
        assert set(asked) == set(EXTRA_MODULES) - {"streaming"}, "streaming is compression, parquet and images"
        for extra, call in asked.items():
            said = error_of(call)
            assert said.endswith(f': pip install "dtrain[{extra}]"'), f"{extra}: {said}"
            print(said)
        report = command("report", run, "--output", f"{folder}/report.html")
        assert (report.returncode, report.stderr) == (0, ""), report.stderr
        assert Path(f"{folder}/report.html").read_text().startswith("<!doctype html>")
    assert command("--version").stdout == f"dtrain {dt.__version__}\n"
    assert "complete" in command("--show-completion", "bash").stdout


def error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except dt.errors.ConfigError as error:
        return str(error)
    return "nothing was raised"


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "dtrain", *words], capture_output=True, text=True, timeout=120, check=False)


def calls(folder: Path) -> dict[str, Callable[[], object]]:
    """Check, for each extra, the functions that cannot work without it."""
    rows = folder / "rows.parquet"
    rows.write_bytes(b"PAR1")
    return {
        "hf": lambda: load_tokenizer("bert-base-uncased"),
        "http": lambda: storage.resolve_path("http://host/x"),
        "s3": lambda: storage.resolve_path("s3://bucket/x"),
        "gcs": lambda: storage.resolve_path("gs://bucket/x"),
        "azure": lambda: storage.resolve_path("az://container/x"),
        "oci": lambda: storage.resolve_path("oci://bucket/x"),
        "sftp": lambda: storage.resolve_path("sftp://host/x"),
        "compression": lambda: dt.data.write_shards([{"x": 1}], folder / "packed", format="mds", compression="zstd"),
        "parquet": lambda: dt.data.ShardedDataset(folder),
        "images": lambda: dt.data.write_shards([{"x": 1}], folder / "pictures", format="mds", columns={"x": "jpeg"}),
        "fp8": fp8,
        "plot": lambda: dt.schedules.plot({"lr": dt.schedules.cosine(1.0, 0.0, 10)}, 10),
        "tensorboard": lambda: dt.loggers.tensorboard(folder / "tensorboard"),
        "wandb": lambda: dt.loggers.wandb("project", path=folder / "wandb"),
        "mlflow": lambda: dt.loggers.mlflow("experiment", path=folder / "mlflow"),
    }


def fp8() -> object:
    """Call a function that checks the GPU before it imports the package: this process pretends to have a GPU."""
    torch.cuda.is_available, torch.cuda.get_device_capability = (lambda: True), (lambda: (8, 9))
    return dt.shard.convert_to_fp8(torch.nn.Sequential(torch.nn.Linear(16, 16)))


if __name__ == "__main__":
    main(*sys.argv[1:])
