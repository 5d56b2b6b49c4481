"""Where it is computed: a mesh of ranks, collectives on its axes, and layers built from them.

mesh         Mesh and Axis: dp × pp × sp × tp          tensor      Column- and RowParallelLinear    (tp)
collectives  arrows between states of a tensor         vocab       embedding and cross entropy      (tp)
in_flight    one collective, started and awaited       sequence    tokens split between linears     (tp)
traffic      bytes counted, calls remembered           ddp         gradients in buckets             (dp)
sharding     Shard: which slice a rank holds           world       joining and leaving the ranks
layout       which tokens of a sequence a rank has     ring        blocks of k, v go round          (sp)
tiles        what of the scores is computed            ulysses     tokens traded for heads          (sp)
kernels      attention with its log-sum-exp            local_attention   by tiles, on one rank
parameters   cut, join, sum partial gradients          forkserver  ranks as copies of one warm process
compare      relative errors, worst over the ranks     pipeline    stages in turn, and when each is idle (pp)
weight_gradients   of linears: added in place, at once or later
lookup       rows of a table                           words       text between ranks
zero         optimizer state, gradients and weights in slices, one on each replica (dp × sp)
bucket       what of them lies in one flat buffer
gathered     weights in slices, whole only while they compute
watchdog     finds the rank that hangs                peers       which ranks are together on each axis
blame        whom the others wait for
compression  sums of gradients in fewer bytes (dp × sp)
"""
