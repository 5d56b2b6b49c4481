"""On which machines: the command line, and how ranks are started.

cli           megalite train | verify | data            local     starting the ranks of one machine
draw_command  megalite draw                             torchrun  joining ranks that torchrun has started
prepare       the corpus and the data, before
"""
