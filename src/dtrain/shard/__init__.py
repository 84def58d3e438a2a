"""How a model is laid out over ranks: sharding, precision, storage for models made on the meta device."""
