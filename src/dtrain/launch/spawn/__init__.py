"""Start rank processes, from a preloaded fork server or as plain interpreters."""
