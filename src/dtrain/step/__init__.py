"""One training step: gradients, their application, the composition of both, and evaluation."""
