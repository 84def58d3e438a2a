"""Pack documents into token sequences of fixed length."""
