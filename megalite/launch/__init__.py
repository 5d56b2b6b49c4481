"""On which machines: the command line, and how ranks are started.

cli       megalite train | verify | data        torchrun  joining ranks that torchrun has started
local     starting the ranks of one machine
"""
