"""The reduction of one wrapper's gradients: reducer.py tells the story, one file for each noun in it."""
