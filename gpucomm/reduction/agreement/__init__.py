"""What the ranks agree on beside the gradients: headers, the verdict from them, the mean, what is not finite."""
