"""What the ranks print: whole lines on the terminal, a file for each stream, the last lines for the report of a failure.

Nothing in here ever waits for a reader or for a disk that is full: what has no room is dropped, counted, and said.
"""
