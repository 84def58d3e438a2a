"""Run folders, as ``dtrain.runs`` says what is in them, into the model of a report: whatever is whole, and what is not."""
