"""Read the folder of a run and report on it: goodput, metrics, traces, HTML page. Imports no torch."""
