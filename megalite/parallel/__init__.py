"""Where it is computed: a mesh of ranks, collectives on its axes, and layers built from them.

mesh         Mesh and Axis: dp × pp × sp × tp            tensor     Column- and RowParallelLinear     (tp)
collectives  conjugate pairs of collectives              vocab      embedding and cross entropy       (tp)
traffic      bytes counted, calls remembered             sequence   tokens split between linears      (tp)
sharding     Shard: which slice a rank holds             ddp        gradients in buckets              (dp)
parameters   cut, join, sum partial gradients            world      joining and leaving the ranks
"""
