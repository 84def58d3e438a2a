"""Object stores, one module per kind of server. Each call is one attempt; ``dtrain.storage.remote`` retries."""
