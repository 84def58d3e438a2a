"""What this machine is: cores, memory, GPUs, network, installed packages. Read without torch, and without judging it."""
