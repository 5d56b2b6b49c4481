"""The command line: `megalite train | verify | data | draw`.

Settings are checked before PyTorch is imported and before any rank starts. A user's mistake is one line and an exit
code of sysexits.h: 64 usage, 65 data, 78 configuration, 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from megalite.config import Config, ModelConfig, resolve
from megalite.config_file import load
from megalite.errors import ConfigError, DataError, MegaliteError
from megalite.launch.prepare import prepare, tokenize_visibly
from megalite.launch.torchrun import World, join_torchrun, launched
from megalite.model.presets import PRESETS
from megalite.plan import plan_stages

if TYPE_CHECKING:
    from rich.console import Console

# Every rank of a machine finds the same mistake, and its first rank says so. torchrun ends all ranks when one leaves:
# the others stay this many seconds.
FIRST_WORD = 2.0


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of `megalite` and of `python -m megalite`."""
    options = _parser().parse_args(arguments)
    world = None
    try:
        world = launched()
        code = options.command(options, world)
    except MegaliteError as error:
        print(f"megalite: error: {error}", file=sys.stderr, flush=True)
        code = error.exit_code
    except KeyboardInterrupt:
        code = 130
    if world is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        # A rank that fails must not wait for the others while it takes its groups down; and where one is done, gloo's
        # threads may outlive what Python takes down at its end, which aborted a finished run once.
        os._exit(code)
    sys.exit(code)


# --- train and verify: the same way onto the ranks -----------------------------------------------------------------


def train_command(options: argparse.Namespace, world: World | None) -> int:
    return _on_ranks(options, world, prepare, _train_rank)


def verify_command(options: argparse.Namespace, world: World | None) -> int:
    return _on_ranks(options, world, lambda config: None, _verify_rank)


def _on_ranks(
    options: argparse.Namespace,
    world: World | None,
    before: Callable[[Config], None],
    rank_main: Callable[[World, Config], None],
) -> int:
    """Load the config, do what comes `before` on one process a machine, and call `rank_main` on every rank."""
    try:
        config = resolve(load(options.config, options.overrides, PRESETS), world.size if world else None)
        plan_stages(config)  # what cannot run is refused before anything starts
        if world is None:
            from megalite.launch import local

            local.warm()
            before(config)
            local.run_local(rank_main, config.mesh.size, (config,), timeout=config.run.timeout)
            return 0
        if world.local_rank == 0:
            before(config)
    except MegaliteError as error:
        if world is None or world.local_rank == 0:
            raise
        time.sleep(FIRST_WORD)
        return error.exit_code
    world = join_torchrun(config.run.timeout)
    try:
        rank_main(world, config)
    except MegaliteError as error:
        if world.rank == 0 or isinstance(error, DataError):
            raise
        return error.exit_code
    from megalite.parallel.world import leave

    leave()
    return 0


def _train_rank(world: World, config: Config) -> None:
    from megalite.parallel.world import local_device
    from megalite.train.loop import pretrain

    pretrain(config, local_device(world.local_rank, world.local_size), world.local_size)


def _verify_rank(world: World, config: Config) -> None:
    from megalite.parallel.world import local_device
    from megalite.train.verify import shrunk, verify

    twin = shrunk(config)
    rows = verify(twin, local_device(world.local_rank, world.local_size))
    if world.rank == 0:
        _print_rows(rows, twin)
    if not all(row.passed for row in rows):
        raise Diverged(f"{next(row for row in rows if not row.passed)}: this mesh does not compute the dense model")


class Diverged(MegaliteError):
    """The configured mesh and the mesh of one differ by more than rounding."""

    exit_code = 1


def _print_rows(rows: Sequence, config: Config) -> None:
    from rich.console import Console
    from rich.table import Table

    mesh, model = config.mesh, config.model
    cut = f", ring {mesh.ring} × ulysses {mesh.ulysses} {mesh.layout}" if mesh.sp > 1 else ""
    cut += f", {mesh.schedule} of {mesh.microbatches} microbatches" if mesh.pp > 1 else ""
    table = Table(
        title=f"dp {mesh.dp} × pp {mesh.pp} × sp {mesh.sp} × tp {mesh.tp} against the mesh of one, float64",
        caption=f"twin: vocabulary {model.vocab_size}, hidden {model.hidden}, {model.layers} layers, "
        f"{model.heads} heads, {model.kv_heads} kv heads, ffn {model.ffn}, sequence {config.train.seq_len}{cut}",
    )
    table.add_column("compared")
    table.add_column("largest relative error", justify="right")
    table.add_column("allowed", justify="right")
    table.add_column("")
    for row in rows:
        table.add_row(row.name, f"{row.error:.1e}", f"{row.bound:.0e}", "[green]ok[/]" if row.passed else "[red]OUT[/]")
    Console(width=None if sys.stdout.isatty() else 110).print(table)


# --- data ---------------------------------------------------------------------------------------------------------


def data_command(options: argparse.Namespace, world: World | None) -> int:
    from megalite.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(options.tokenizer) if options.tokenizer else None
    tokenize_visibly(options.text, options.output, tokenizer, options.vocab_size)
    return 0


# --- draw ---------------------------------------------------------------------------------------------------------


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


# --- the parser ---------------------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        print(f"megalite: error: {message}; see `{self.prog} --help`", file=sys.stderr)
        sys.exit(os.EX_USAGE)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="megalite", description="Pretrain GPT-like transformers under DP × TP × PP × SP.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, run, about in (
        ("train", train_command, "pretrain as a config says; starts this machine's ranks where torchrun has not"),
        ("verify", verify_command, "the config's mesh against the mesh of one: loss, every gradient, the step"),
    ):
        command = commands.add_parser(name, help=about, description=about)
        command.add_argument("config", metavar="CONFIG.toml", type=Path)
        command.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings on top of the file's")
        command.set_defaults(command=run)
    about = "text files, folders or .jsonl into a folder of tokens"
    command = commands.add_parser("data", help=about, description=about)
    command.add_argument("text", nargs="+", type=Path, metavar="TEXT")
    command.add_argument("-o", "--output", required=True, type=Path, metavar="DIR")
    command.add_argument("--tokenizer", type=Path, metavar="tokenizer.json", help="default: train a byte-level BPE")
    command.add_argument("--vocab-size", type=int, default=ModelConfig.vocab_size, help="of a trained tokenizer")
    command.set_defaults(command=data_command)
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
    return parser
