"""Forward the output of ranks to log files and to the terminal."""
