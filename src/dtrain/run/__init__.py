"""Write the folder of a run: time ledger per rank, settings, metadata, upload."""
