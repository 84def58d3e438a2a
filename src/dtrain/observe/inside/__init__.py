"""What is measured on the device within a step, and what watches over one: transforms that change nothing."""
