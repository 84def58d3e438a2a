"""Meters: functions of a state that give numbers for people, by name, at the steps that the loop logs."""
