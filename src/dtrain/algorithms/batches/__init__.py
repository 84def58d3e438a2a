"""What is done to a batch before it is split, and how targets are written."""
