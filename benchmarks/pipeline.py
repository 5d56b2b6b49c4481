"""Pipelines on CPUs, two ranks of one thread each: speed against PyTorch's own, idle time, overhead, memory.

    python benchmarks/pipeline.py [--only speed,bubble,overhead,memory] [--rounds 12]

speed     a training step of each schedule against its twin of `torch.distributed.pipelining` (plain_pipeline.py), turn
          by turn in the same processes; our layers are divided by plan/stages.py, theirs as was fastest; CPU seconds
          are those of both ranks; aim: as fast or faster
bubble    idle share of the step by formula, simulated from the times that a run measures, and measured in that run;
          aim: simulated and measured at most 5 points apart
overhead  the executor's own time an action, aim: 200 µs; what timing costs, in % of a step, aim: 1
memory    the most bytes of activations that live at once, and the peak of a process that runs nothing else
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

sys.path.insert(0, str(Path(__file__).parent))

from attention import LiveBytes
from cpu_step import BATCH, MODEL, SEQ_LEN
from plain_llama import PlainLlama
from plain_pipeline import DIVISIONS, MICROBATCHES, RANKS, PlainPipeline, batches, whole_model
from race import print_ratios, take_turns

from megalite.config import Config, MeshConfig, OptimizerConfig, TrainConfig, resolve
from megalite.parallel import weight_gradients
from megalite.parallel.mesh import Mesh
from megalite.parallel.pipeline.executor import Pipeline
from megalite.parallel.pipeline.generators import GENERATORS
from megalite.parallel.pipeline.measured import Recorder, costs, predicted
from megalite.parallel.pipeline.saved import timeline
from megalite.parallel.pipeline.timeline import Timeline
from megalite.plan.stages import plan_stages
from megalite.testing import run_ranks
from megalite.train.step import TrainStep


class Pair(NamedTuple):
    """What is raced. ours: a schedule of ours   theirs: those of KINDS that stand against it, the fastest counts"""

    ours: str
    theirs: tuple[str, ...]


PAIRS = {
    "gpipe": Pair("gpipe", ("gpipe",)),
    "1f1b": Pair("1f1b", ("1f1b",)),
    "interleaved": Pair("interleaved-1f1b", ("interleaved",)),
    "zero bubble": Pair("zb-h1", ("zero-bubble", "zero-bubble-2")),
    "zb-v": Pair("zb-v", ("zb-v",)),
    "dualpipe-v": Pair("dualpipe-v", ("dualpipe-v",)),
}
P, M = RANKS, MICROBATCHES
FORMULAS: dict[str, Callable[[float, float, float], float]] = {  # of the seconds of F, B, W: idle over total time
    "gpipe": lambda f, b, w: (P - 1) / (M + P - 1),
    "1f1b": lambda f, b, w: (P - 1) / (M + P - 1),
    "interleaved-1f1b": lambda f, b, w: (P - 1) / (2 * M + P - 1),
    "zb-h1": lambda f, b, w: (P - 1) * (f + b - w) / (M * (f + b + w) + (P - 1) * (f + b - w)),
}


def contenders(pair: str) -> list[str]:
    """By name, ours first."""
    return [f"ours:{PAIRS[pair].ours}", *(f"theirs:{kind}" for kind in PAIRS[pair].theirs)]


def config_of(schedule: str) -> Config:
    """How megalite runs a schedule of this name here."""
    mesh = MeshConfig(pp=RANKS, schedule=schedule, microbatches=MICROBATCHES)
    return resolve(Config(MODEL, mesh, train=TrainConfig(global_batch=BATCH, seq_len=SEQ_LEN)), RANKS)


def ours(schedule: str) -> TrainStep:
    """A step of megalite over all ranks: takes the whole batch on each."""
    return TrainStep.of(config_of(schedule), Mesh(pp=RANKS))


def contender(name: str, whole: PlainLlama | None = None) -> TrainStep | PlainPipeline:
    """`ours:schedule` or `theirs:kind`. whole: theirs starts from its weights, as ours does from the same"""
    side, _, name = name.partition(":")
    return ours(name) if side == "ours" else PlainPipeline(name, DIVISIONS[name], OptimizerConfig(), whole)


# --- speed --------------------------------------------------------------------------------------------------------


def race(pair: str, rounds: int) -> tuple[dict[str, dict[str, list[float]]], dict[str, list[float]]]:
    """All contenders of a pair, turn by turn: their times, and the losses of all their steps."""
    losses: dict[str, list[float]] = {}
    whole = whole_model()

    def run(name: str) -> Callable[[], object]:
        step, data, seen = contender(name, whole), batches(), losses.setdefault(name, [])
        loss_of = attrgetter("loss") if isinstance(step, TrainStep) else itemgetter(0)
        return lambda: seen.append(loss_of(step(*next(data))))

    return take_turns({name: run(name) for name in contenders(pair)}, rounds), losses


def report_speed(rounds: int, pairs: list[str]) -> None:
    for pair in pairs:
        (schedule, kinds), (_, *theirs) = PAIRS[pair], contenders(pair)
        division = tuple(len(stage.layers) for stage in plan_stages(config_of(schedule)).stages)
        print(f"\nspeed: {pair}; blocks of our stages {division}, of theirs {[DIVISIONS[kind] for kind in kinds]}")
        (seen, losses), *others = run_ranks(race, RANKS, pair, rounds, timeout=3600)
        for name, of in seen.items():
            of["cpu"] = [sum(x) for x in zip(of["cpu"], *(other[name]["cpu"] for other, _ in others), strict=True)]
        print_ratios(seen, min(theirs, key=lambda name: statistics.median(seen[name]["wall"])))
        apart = max(max(of) / min(of) - 1 for of in zip(*losses.values(), strict=True))
        print(f"  largest relative difference of their losses in {rounds + 2} steps: {apart:.1e}")
        sys.stdout.flush()


# --- bubble -------------------------------------------------------------------------------------------------------


def timelines(schedule: str, steps: int) -> list[Timeline]:
    """Of `steps` training steps, after two that are not counted."""
    step, data = ours(schedule), batches()
    taken = []
    for _ in range(steps + 2):
        batch = next(data)
        dist.barrier()
        begin = step.pipelined.clock.mark()
        step(*batch)
        measured = step.pipelined.measured(begin, step.pipelined.clock.mark())
        taken.append(timeline(step.pipelined.schedule, *measured))
    return taken[2:]


def report_bubble(rounds: int, pairs: list[str], steps: int = 20) -> None:
    print(f"\nbubble: idle over total time in %, {RANKS} ranks, {MICROBATCHES} microbatches; median of {steps} steps")
    for schedule, formula in FORMULAS.items():
        taken = run_ranks(timelines, RANKS, schedule, steps, timeout=3600)[0]
        shares = sorted(100 * step.over_total for step in taken)
        measured, simulated = statistics.median(shares), predicted(taken)
        took = costs(taken)
        means = (statistics.mean(of) for of in (took.forward, took.backward_input, took.backward_weight))
        by_formula, expected = 100 * formula(*means), 100 * simulated.over_total
        print(
            f"  {schedule:16}  formula {by_formula:5.1f}  simulated {expected:5.1f}  measured {measured:5.1f} "
            f"({shares[0]:.1f} to {shares[-1]:.1f})  measured − simulated {measured - expected:+.1f} points, "
            f"measured − formula {measured - by_formula:+.1f}"
        )
        middle = min(taken, key=lambda step: abs(100 * step.over_total - measured))
        for name, bubble in (("simulated", simulated.bubble()), ("measured", middle.bubble())):
            causes = "  ".join(f"{cause} {100 * share:4.1f}" for cause, share in bubble.causes.items())
            busy = " ".join(f"{x:.3f}" for x in bubble.busy)
            print(f"    {name:9}  {causes}   step {bubble.step:.3f} s, busy {busy}")
        for name, of in vars(took).items():
            print(f"    {name:15} ms of each stage " + " ".join(f"{1e3 * x:6.2f}" for x in of))
        sys.stdout.flush()


# --- overhead -----------------------------------------------------------------------------------------------------


def executor_overhead(name: str, steps: int, microbatches: int = 64) -> list[float]:
    """Microseconds an action of this rank besides the stages': on the clock, where waiting for tiny messages is most of
    it; of this thread's CPU time; and between two actions in the median, where half of them wait for nothing."""
    ranks = dist.get_world_size()
    mesh, schedule = Mesh(pp=ranks), GENERATORS[name](ranks, microbatches)
    weight, first = nn.Parameter(torch.eye(8)), torch.ones(4, 8)

    def stage(number: int) -> Callable[[Tensor | None, int], Tensor]:
        def compute(x: Tensor | None, microbatch: int) -> Tensor:
            y = weight_gradients.linear(first if x is None else x, weight)
            return y.sum() if number == schedule.stages - 1 else y

        return compute

    pipeline = Pipeline(schedule, mesh.pp, {n: stage(n) for n in schedule.stages_of(mesh.pp.rank)}, torch.device("cpu"))
    seen = []
    for _ in range(steps + 2):
        dist.barrier()
        begin, cpu = time.perf_counter(), time.thread_time()
        pipeline.step(lambda stage, microbatch: (4, 8), torch.float32)
        wall, cpu = time.perf_counter() - begin, time.thread_time() - cpu
        inside = sum(end - start for start, end in pipeline.marks)
        between = statistics.median(after[0] - before[1] for before, after in itertools.pairwise(pipeline.marks))
        seen.append([*(1e6 * (whole - inside) / len(pipeline.marks) for whole in (wall, cpu)), 1e6 * between])
        weight.grad = None
    return [statistics.median(times) for times in zip(*seen[2:], strict=True)]


def timing_costs(schedule: str, steps: int) -> list[float]:
    """Median seconds of a step, of its marks, of collecting them from all ranks, and of keeping their account."""
    step, data = ours(schedule), batches()
    recorder, clock = Recorder(step.pipelined.schedule), step.pipelined.clock
    seen = []
    for _ in range(steps + 2):
        batch = next(data)
        dist.barrier()
        begin = clock.mark()
        step(*batch)
        dist.barrier()
        finish = clock.mark()
        measured = step.pipelined.measured(begin, finish)
        gathered = clock.mark()
        recorder.add(*measured)
        seen.append((finish - begin, gathered - finish, clock.mark() - gathered))
    whole, gathering, recording = (statistics.median(times) for times in zip(*seen[2:], strict=True))
    begin = time.perf_counter()
    for _ in range(10_000):
        clock.mark()
    mark = (time.perf_counter() - begin) / 10_000
    return [whole, mark * len(measured.times[step.pipelined.pp.rank]), gathering, recording]


def report_overhead(rounds: int, pairs: list[str]) -> None:
    print("\noverhead: of the executor, microseconds an action besides the stages' (clock / CPU / median gap)")
    for ranks, name in ((1, "gpipe"), (2, "gpipe"), (2, "1f1b"), (2, "zb-h1"), (2, "zb-v")):
        found = run_ranks(executor_overhead, ranks, name, rounds, timeout=600)
        each = "  ".join(f"rank {r}: " + " / ".join(f"{x:4.0f}" for x in of) for r, of in enumerate(found))
        print(f"  {ranks} rank{'s' * (ranks > 1):1} {name:8} {each}")
    print("overhead: of timing, % of a step on rank 0")
    for schedule in FORMULAS:
        whole, *parts = run_ranks(timing_costs, RANKS, schedule, rounds, timeout=3600)[0]
        marks, gathering, recording = (100 * part / whole for part in parts)
        print(
            f"  {schedule:16} marks {marks:.4f}  gathering {gathering:.3f}  account {recording:.3f}  "
            f"together {marks + gathering + recording:.3f} of a step of {whole:.3f} s"
        )


# --- memory -------------------------------------------------------------------------------------------------------


def live_activations(name: str) -> float:
    """MiB of this rank in its second step, of all tensors but parameters, their gradients and the optimizer's."""
    step, data, live = contender(name), batches(), LiveBytes()
    for _ in range(2):  # what the first step makes and keeps is in the second one's count
        for group in step.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
        moments = [x for state in step.optimizer.state.values() for x in state.values()]
        others = {StorageWeakRef(x.untyped_storage()) for x in moments}
        live.alive, live.peak = {ref: size for ref, size in live.alive.items() if ref not in others}, 0
        with live:
            step(*next(data))
    return live.peak / 2**20


def peak_memory(name: str, steps: int = 4) -> tuple[float, float]:
    """MiB of this rank's process before its model exists, and at its peak."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    step, data = contender(name), batches()
    for _ in range(steps):
        step(*next(data))
    return before, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def report_memory(rounds: int, pairs: list[str]) -> None:
    print("\nmemory: MiB of rank 0 and rank 1")
    for pair in pairs:
        for name in contenders(pair):
            live = run_ranks(live_activations, RANKS, name, timeout=600)
            command = [sys.executable, __file__, "--memory", name]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            peaks = [peak - before for before, peak in json.loads(done.stdout.splitlines()[-1])]
            print(
                f"  {name:22} activations {' '.join(f'{x:6.1f}' for x in live)}   peak of the process beyond "
                f"what was there before {' '.join(f'{x:5.0f}' for x in peaks)}"
            )
            sys.stdout.flush()


def main() -> None:
    reports = {"speed": report_speed, "bubble": report_bubble, "overhead": report_overhead, "memory": report_memory}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(reports))
    parser.add_argument("--pairs", default=",".join(PAIRS), help="of speed and memory")
    parser.add_argument("--rounds", type=int, default=12, help="of each contender, after two that are not counted")
    parser.add_argument("--memory", metavar="CONTENDER", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory:
        print(json.dumps(run_ranks(peak_memory, RANKS, options.memory, timeout=600)))
        return
    print(
        f"torch {torch.__version__}, {RANKS} ranks of one thread, float32, {MODEL}, batch {BATCH} of {SEQ_LEN} tokens"
    )
    for name in options.only.split(","):
        reports[name](options.rounds, options.pairs.split(","))


if __name__ == "__main__":
    main()
