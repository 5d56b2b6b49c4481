"""Where it is computed: a mesh of ranks, collectives on its axes, and layers built from them.

mesh         Mesh and Axis: dp × pp × sp × tp          tensor      Column- and RowParallelLinear    (tp)
collectives  arrows between states of a tensor         vocab       embedding and cross entropy      (tp)
in_flight    one collective, started and awaited       sequence    tokens split between linears     (tp)
traffic      bytes counted, calls remembered           ddp         gradients in buckets             (dp)
sharding     Shard: which slice a rank holds           world       joining and leaving the ranks
parameters   cut, join, sum partial gradients          forkserver  ranks as copies of one warm process
compare      relative errors, worst over the ranks
"""
