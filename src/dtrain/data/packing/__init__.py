"""Documents packed into blocks of one length, none of their tokens lost or repeated."""
