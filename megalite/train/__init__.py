"""When: what happens, in order, to make a model out of tokens.

loop       the run: steps, validation, metrics, summary    optimizer  AdamW and its decay groups
step       one step: microbatches, backward, update        lr         the learning rate as a function of the step
gradients  everything between backward and the update      metrics    metrics.jsonl, FLOPs, MFU
progress   what the console shows                          verify     this mesh against the mesh of one
pipelined  a model as the stages of a pipeline             precision  the loss scale of float16
memory     what a rank's memory holds in a step            muon       Muon, for matrices cut over tp
small_state   AdamW with bfloat16 state                  offload    AdamW in the host's memory
state      all that a step leaves for the next, by name    checkpoints  when a run is kept, and from where it goes on
control    what all ranks agree on after each step
opening       what a run says before its first step      initial    weights to begin with, of a Hugging Face folder
"""
