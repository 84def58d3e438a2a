"""Connect the launchers of several nodes: addresses, messages, rendezvous, compatibility checks."""
