"""The optimizer's options as schedules."""
