"""Programs that show gpucomm at work; each runs with `python -m gpucomm.examples.NAME`."""
