"""Who am I, who are the others, and what do we agree on."""
