"""Models and data of the example scripts: nothing here trains, and nothing here is part of dtrain. Copy any part of it."""
