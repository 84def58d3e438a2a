"""Structured dropout: stochastic depth and gyro dropout."""
