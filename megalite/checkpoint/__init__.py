"""What is kept: a run's state in files that any mesh can read.

boxes        boxes of a whole tensor: what a rank holds, and what of it it writes
held         Held: what a rank holds of one tensor
source       where weights come from, read box by box
"""
