"""What lets frameworks use gpucomm by name. Each file needs its framework, and nothing imports it but the user."""
