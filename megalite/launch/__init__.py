"""On which machines: the command line, and how ranks are started.

cli       megalite train | verify | data          local     starting the ranks of one machine
prepare   the corpus and the data, before         torchrun  joining ranks that torchrun has started
"""
