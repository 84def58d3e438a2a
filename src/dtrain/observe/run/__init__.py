"""The folder of a run, written: what was run, where the time of each rank went, and the way to the checkpoints' root."""
