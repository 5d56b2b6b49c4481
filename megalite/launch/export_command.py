"""`megalite export`: what it takes, and what it says."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from megalite.launch.torchrun import World

DTYPES = ("float32", "bfloat16", "float16", "float64")


def add_export(commands: Any) -> None:
    """Add the command and what it takes to argparse's subparsers."""
    about = "a checkpoint as a Hugging Face folder, which transformers' from_pretrained loads"
    command = commands.add_parser("export", help=about, description=about)
    command.add_argument("run", type=Path, metavar="RUN", help="a run: its newest checkpoint; or a checkpoint")
    command.add_argument("-o", "--output", required=True, type=Path, metavar="DIR")
    command.add_argument("--dtype", choices=DTYPES, default="float32", help="of the weights; default: float32")
    command.set_defaults(command=export_command)


def export_command(options: argparse.Namespace, world: World | None) -> int:
    import torch

    from megalite.launch.export import export
    from megalite.launch.stored import stored

    with stored(options.run) as model:
        export(model.config, model.weights, options.output, getattr(torch, options.dtype), model.tokenizer)
        tokenizer = f"the tokenizer is {model.tokenizer}" if model.tokenizer else "without a tokenizer: none was found"
        print(f"{options.output}: {model.path} in {options.dtype}, its logits compared; {tokenizer}", flush=True)
    return 0
