"""The process supervisor behind ``dtrain launch``. Nothing in here imports torch."""
