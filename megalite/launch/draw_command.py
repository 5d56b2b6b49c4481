"""`megalite draw`: a pipeline schedule, or a measured step of a run, as a picture with its bubble by cause."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megalite.errors import ConfigError
from megalite.launch.torchrun import World

if TYPE_CHECKING:
    from rich.console import Console


def add_draw(commands: Any) -> None:
    """Add the command and what it takes to argparse's subparsers."""
    about = "a pipeline schedule, or a measured step of a run, as a picture with its bubble by cause"
    command = commands.add_parser("draw", help=about, description=about)
    command.add_argument(
        "schedule",
        metavar="SCHEDULE|RUN",
        help="gpipe, 1f1b, interleaved-1f1b, zb-h1, zb-h2, zb-v, dualpipe-v, a text or CSV file, FILE.py:function, "
        "or a run's folder: predicted and measured",
    )
    command.add_argument("--stages", type=int, metavar="P", help="ranks of the pipeline")
    command.add_argument("--microbatches", type=int, metavar="M")
    command.add_argument("--chunks", type=int, metavar="V", help="stages a rank, of interleaved-1f1b; default: 2")
    for name in ("forward", "backward-input", "backward-weight", "send"):
        command.add_argument(f"--{name}", type=float, default=float(name != "send"), metavar="TIME", help="of a stage")
    command.add_argument("--svg", type=Path, metavar="FILE", help="a picture for slides")
    command.add_argument("--trace", type=Path, metavar="FILE", help="JSON for ui.perfetto.dev")
    command.set_defaults(command=draw_command)


def draw_command(options: argparse.Namespace, world: World | None) -> int:
    from rich.console import Console

    from megalite.parallel.pipeline import GENERATORS, Costs, check, load, simulate
    from megalite.parallel.pipeline.draw import account, table, text, trace
    from megalite.parallel.pipeline.svg import svg

    console = Console(width=None if sys.stdout.isatty() else 110, highlight=False)
    source = Path(options.schedule)
    if options.schedule not in GENERATORS and (source.is_dir() or source.suffix == ".json"):
        return _draw_run(source, options, console)
    try:
        schedule = load(options.schedule, options.stages, options.microbatches, options.chunks)
        in_flight = check(schedule)
        costs = Costs(options.forward, options.backward_input, options.backward_weight, options.send)
        timeline = simulate(schedule, costs)
        _write_pictures(options, lambda: svg([timeline]), lambda: trace(timeline))
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from None
    bubble = timeline.bubble()
    console.print(text(timeline, console.width, console.color_system is not None))
    console.print(account(bubble), soft_wrap=True)
    console.print(table(bubble, in_flight))
    return 0


def _draw_run(source: Path, options: argparse.Namespace, console: Console) -> int:
    """A measured step below its prediction, and both accounts side by side."""
    from megalite.parallel.pipeline.check import activations
    from megalite.parallel.pipeline.draw import comparison, table, texts, trace
    from megalite.parallel.pipeline.saved import load
    from megalite.parallel.pipeline.simulate import by_formula
    from megalite.parallel.pipeline.svg import svg
    from megalite.plan.measured_division import advice

    try:
        for name in ("stages", "microbatches", "chunks"):
            if (given := getattr(options, name)) is not None:
                raise ValueError(f"--{name}: {given} given; a run says its own")
        saved = load(source)
        both, better = (saved.predicted, saved.measured), advice(saved)
        _write_pictures(
            options,
            lambda: svg(both, saved.titles, "s", saved.remark),
            lambda: trace(*both, titles=saved.titles),
        )
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from None
    schedule, bubble = saved.measured.schedule, saved.measured.bubble()
    console.print(texts(both, saved.titles, console.width, console.color_system is not None))
    console.print(comparison(by_formula(schedule, saved.costs), saved.predicted.bubble(), bubble))
    console.print(table(bubble, activations(schedule), "s"))
    for line in (saved.remark, better):
        if line:
            console.print(line, soft_wrap=True, markup=False)
    return 0


def _write_pictures(options: argparse.Namespace, svg: Callable[[], str], trace: Callable[[], str]) -> None:
    for path, written in ((options.svg, svg), (options.trace, trace)):
        if path is not None:
            path.write_text(written(), encoding="utf-8")
