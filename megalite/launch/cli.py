"""The command line: `megalite train | verify | data | data audit | draw | export | generate`.

Settings are checked before PyTorch is imported and before any rank starts. A user's mistake is one line and an exit
code of sysexits.h: 64 usage, 65 data, 78 configuration, 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from megalite.config import Config
from megalite.errors import MegaliteError
from megalite.launch.data_command import AUDIT, add_data
from megalite.launch.draw_command import add_draw
from megalite.launch.export_command import add_export
from megalite.launch.generate_command import add_generate
from megalite.launch.on_ranks import on_ranks
from megalite.launch.prepare import prepare
from megalite.launch.torchrun import World, launched


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of `megalite` and of `python -m megalite`."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args([AUDIT, *words[2:]] if words[:2] == AUDIT.split() else words)
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
    return on_ranks(options.config, options.overrides, world, _train_rank, before=prepare)


def verify_command(options: argparse.Namespace, world: World | None) -> int:
    return on_ranks(options.config, options.overrides, world, _verify_rank)


def _train_rank(world: World, config: Config) -> None:
    from megalite.launch.guarded import guarded
    from megalite.parallel.world import local_device
    from megalite.train.loop import pretrain

    with guarded(world, config) as heard:
        pretrain(config, local_device(world.local_rank, world.local_size), world.local_size, heard, world.attempt > 0)


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
    add_data(commands)
    add_draw(commands)
    add_export(commands)
    add_generate(commands)
    return parser
