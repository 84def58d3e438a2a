"""Schedules: pure functions of a number. A schedule is evaluated for the step that is about to run."""
