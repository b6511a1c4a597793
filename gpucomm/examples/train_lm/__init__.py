"""Trains a byte-level GPT on real text, data-parallel over the ranks: `python -m gpucomm.examples.train_lm --help`.

options.py   the command line, and what a run is made of (Settings)
launch.py    starts one process per rank, and ends them all
train.py     what one rank does: model, wrapper, Trainer, sample        <- read this first
compare.py   the same beside stock DistributedDataParallel, timed
model.py     the GPT
text.py      text, and the batches drawn from it
memory.py    does the run fit into this machine?
"""
