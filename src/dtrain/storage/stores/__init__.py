"""Object stores, one module per kind of server. Each call is one try; ``dtrain.storage.remote`` retries."""
