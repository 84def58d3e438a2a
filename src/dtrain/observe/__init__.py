"""What a run reports: global numbers from local metrics, and where they go."""
