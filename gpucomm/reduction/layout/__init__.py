"""Where gradients lie: parameters and their indices, buckets and their slots, the dtype on the wire."""
