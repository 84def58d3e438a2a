"""What a training run would need of memory and network, found out on a machine that has neither the devices nor the ranks."""
