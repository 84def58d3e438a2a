"""Read ledgers and metrics of all ranks and attempts of a run."""
