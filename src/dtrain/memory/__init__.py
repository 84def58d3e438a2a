"""How much memory this process's tensors take: a gauge to read it by, and the errors that say that there is no more."""
