"""What a run is made of, worked out before it: from a config, without processes and without torch.

stages               the schedule of the pipeline, checked, and which layers each of its stages has
measured_division    which layers they would better have, by the times of a run
memory               bytes of activations that a block keeps
rank_memory          bytes that each rank needs in a step: weights, gradients, optimizer, activations
"""

from megalite.plan.stages import Stage, Stages, plan_stages

__all__ = ["Stage", "Stages", "plan_stages"]
