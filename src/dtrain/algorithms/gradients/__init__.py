"""What is done to gradients before they are applied, or to how they come about."""
