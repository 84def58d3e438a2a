"""Read sharded datasets from disk, from a shared cache, or from object stores."""
