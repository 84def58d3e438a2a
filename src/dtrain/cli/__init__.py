"""The ``dtrain`` command: one module per command group. Imports no torch at startup."""
