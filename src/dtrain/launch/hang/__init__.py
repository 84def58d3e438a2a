"""A job that has stopped making progress: noticed from what its ranks report, and explained from what they write down."""
