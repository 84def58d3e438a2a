"""Data whose position is a value: it resumes exactly, on any number of ranks."""
