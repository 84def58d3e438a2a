"""``python -m dtrain``: the same as the ``dtrain`` command."""

from dtrain.cli.main import run

if __name__ == "__main__":
    run()
