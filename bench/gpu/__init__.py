"""What gpu_check.py runs on a machine with a GPU: parts.py lists it, a file for each part."""
