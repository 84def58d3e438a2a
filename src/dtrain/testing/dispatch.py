from dtrain.dist.dispatch import Look, Watch  # noqa: F401
