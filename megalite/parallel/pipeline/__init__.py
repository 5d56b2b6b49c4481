"""A step cut into stages and microbatches: who computes what in which order, how long it takes, and how it looks.

schedule     Action, Schedule: lists of actions       replay      when each action begins, or who deadlocks
generators   the published schedules                  simulate    schedule and costs -> Timeline
files        one's own: from a file or a function     timeline    Span, Timeline, idle time by cause
check        complete, in order, no deadlock          draw        text, account, Perfetto trace
svg          pictures for slides                      clock       marks on the time of all ranks (torch)
executor     one rank's actions, run (torch)          wire        what goes between two ranks (torch)
measured     costs of measured steps, prediction      saved       a measured step in a file

Plain values: nothing here imports torch unless it says so.
"""

from megalite.parallel.pipeline.check import activations, check
from megalite.parallel.pipeline.files import load, read
from megalite.parallel.pipeline.generators import (
    GENERATORS,
    dualpipe_v,
    gpipe,
    interleaved_1f1b,
    one_f_one_b,
    zb_h1,
    zb_h2,
    zb_v,
)
from megalite.parallel.pipeline.schedule import Action, Schedule, schedule_of
from megalite.parallel.pipeline.simulate import Costs, simulate
from megalite.parallel.pipeline.timeline import Bubble, Idle, Span, Timeline

__all__ = [
    "GENERATORS",
    "Action",
    "Bubble",
    "Costs",
    "Idle",
    "Schedule",
    "Span",
    "Timeline",
    "activations",
    "check",
    "dualpipe_v",
    "gpipe",
    "interleaved_1f1b",
    "load",
    "one_f_one_b",
    "read",
    "schedule_of",
    "simulate",
    "zb_h1",
    "zb_h2",
    "zb_v",
]
