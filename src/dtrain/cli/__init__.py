"""The ``dtrain`` command. Nothing in here imports torch."""
