"""The ``dtrain`` command. Starting it imports no torch; a sub-command that reads checkpoints does so when it runs."""
