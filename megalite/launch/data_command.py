"""`megalite data`: text into tokens; `megalite data audit`: the proof that a run lost and repeated none of them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from megalite.config import ModelConfig
from megalite.config_file import load
from megalite.errors import DataError
from megalite.launch.prepare import tokenize_visibly
from megalite.launch.torchrun import World

AUDIT = "data audit"  # one word to argparse, which then knows it from a text of that name


def add_data(commands: Any) -> None:
    """Add both commands and what they take to argparse's subparsers."""
    about = "text files, folders or .jsonl into a folder of tokens"
    command = commands.add_parser("data", help=about, description=about)
    command.add_argument("text", nargs="+", type=Path, metavar="TEXT")
    command.add_argument("-o", "--output", required=True, type=Path, metavar="DIR")
    command.add_argument("--tokenizer", type=Path, metavar="tokenizer.json", help="default: train a byte-level BPE")
    command.add_argument("--vocab-size", type=int, default=ModelConfig.vocab_size, help="of a trained tokenizer")
    command.set_defaults(command=data_command)
    about = "whether a run consumed every sample once, through all its restarts, from its own record"
    command = commands.add_parser(AUDIT, help=about, description=about)
    command.add_argument("run", type=Path, metavar="RUN")
    command.set_defaults(command=audit_command)


def data_command(options: argparse.Namespace, world: World | None) -> int:
    from megalite.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(options.tokenizer) if options.tokenizer else None
    tokenize_visibly(options.text, options.output, tokenizer, options.vocab_size)
    return 0


def audit_command(options: argparse.Namespace, world: World | None) -> int:
    from megalite.data.ledger import audit
    from megalite.train.loop import open_data

    config = load(options.run / "config.toml")
    found = audit(options.run, open_data(config).train, config.train.global_batch)
    if found.problems:
        more = f"; and {len(found.problems) - 1} more" if len(found.problems) > 1 else ""
        raise DataError(f"{options.run}: {found.problems[0]}{more}")
    again = f", {found.repeated} of them taken again" if found.repeated else ""
    torn = f"; step {found.steps + 1} was begun and is not done" if found.torn else ""
    tokens = found.samples * config.train.seq_len
    print(
        f"{options.run}: {found.steps} steps in {found.attempts} attempt{'s' * (found.attempts > 1)}{again}: "
        f"{found.samples:,} samples ({tokens:,} tokens), none lost, none repeated, all as the data has them{torn}"
    )
    return 0
