"""Low precision: in which dtype the forward runs, and how its gradients survive."""
