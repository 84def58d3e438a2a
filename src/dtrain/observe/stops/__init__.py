"""When to stop: decisions from the numbers that a loop has, the same on every rank."""
