"""Servers that keep files, one module for each kind. Each call is one try; ``dtrain.storage.remote`` tries again."""
