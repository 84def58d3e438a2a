"""What a run has left behind, read, and shown: ``dtrain report``. Imports no torch."""
