"""megalite: pretrain GPT-like transformers under DP × TP × PP × SP, provably equal to the dense computation.

config     every setting                          parallel   where it is computed: mesh, collectives, layers
model      what is computed                       train      when: the loop, the step, the optimizer
data       tokens and their order                 launch     on which machines: command line, torchrun
plan       what is worked out before the run
checkpoint  what is kept, for any mesh to read
testing    run a function on N ranks; compare a parallel module with its dense twin
"""

__version__ = "0.1.0"
