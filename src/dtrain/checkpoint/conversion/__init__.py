"""Convert checkpoints to and from safetensors, Hugging Face and torch DCP, and compare them."""
