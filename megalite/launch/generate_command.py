"""`megalite generate`: text from a trained model, as it is drawn."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megalite.errors import DataError
from megalite.launch.torchrun import World

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from megalite.launch.stored import Stored
    from megalite.model.gpt import GPT

UNFINISHED = "\ufffd"  # what a character decodes to of which bytes are still to come


def add_generate(commands: Any) -> None:
    """Add the command and what it takes to argparse's subparsers."""
    about = "text from a run's newest checkpoint, from one checkpoint, or from a model of Hugging Face's"
    command = commands.add_parser("generate", help=about, description=about)
    command.add_argument("model", metavar="RUN|DIR", type=Path)
    command.add_argument("--prompt", default="", metavar="TEXT", help="what to go on from; default: nothing")
    command.add_argument(
        "--tokens", type=_number(int, 1, 2**31), default=100, metavar="N", help="at most; default: 100"
    )
    heat = command.add_mutually_exclusive_group()
    heat.add_argument("--temperature", type=_number(float, 0, 1e6), default=0.8, metavar="T", help="default: 0.8")
    heat.add_argument("--greedy", action="store_const", dest="temperature", const=0.0, help="always the likeliest word")
    command.add_argument(
        "--top-k", type=_number(int, 0, 2**31), default=50, metavar="K", help="of the K likeliest; 0: all; default: 50"
    )
    command.add_argument(
        "--top-p", type=_number(float, 0, 1), default=1.0, metavar="P", help="of the likeliest that make P; default: 1"
    )
    command.add_argument("--seed", type=_number(int, 0, 2**63 - 1), default=0, metavar="S", help="default: 0")
    command.add_argument(
        "--tokenizer", type=Path, metavar="tokenizer.json", help="default: that of the data, or in DIR"
    )
    command.set_defaults(command=generate_command)


def _number(kind: type[int] | type[float], least: float, most: float) -> Callable[[str], float]:
    def number(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = kind(least) - 1
        if not least <= value <= most:
            what = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"{text!r} given; {what} from {least:,} to {most:,} would do")
        return value

    return number


def generate_command(options: argparse.Namespace, world: World | None) -> int:
    from megalite.launch.stored import stored

    with stored(options.model) as found:
        tokenizer, start = _prompt(options, found)
        model = _model(found)
    _write(model, tokenizer, start, options)
    return 0


def _prompt(options: argparse.Namespace, found: Stored) -> tuple[Tokenizer, list[int]]:
    """The tokenizer and the prompt's ids, one at least; DataError where they do not fit the model."""
    from megalite.data.tokenizer import end_of_text, load_tokenizer

    path = options.tokenizer or found.tokenizer
    if path is None:
        raise DataError(f"{found.path}: no tokenizer found for it; --tokenizer tokenizer.json would do")
    tokenizer = load_tokenizer(path)
    start = tokenizer.encode(options.prompt).ids or [end_of_text(tokenizer) or 0]
    if max(start) >= found.config.vocab_size:
        raise DataError(
            f"{path}: id {max(start)} in the prompt; ids below model.vocab_size={found.config.vocab_size}, as of the "
            "tokenizer that the model was trained with, would do"
        )
    return tokenizer, start


def _model(found: Stored) -> GPT:
    """On the mesh of one, in the dtype that its weights are kept in."""
    import torch

    from megalite.checkpoint.boxes import whole
    from megalite.model.gpt import GPT
    from megalite.model.hf import initialise
    from megalite.parallel.world import local_device, usable_cores

    torch.set_num_threads(usable_cores())
    weights, device = found.weights, local_device(0, 1)
    dtype = weights.read("norm.weight", whole(weights.shape("norm.weight"))).dtype
    torch.set_default_dtype(dtype)
    with torch.device("meta"):  # nothing is drawn that is read in the end
        model = GPT(found.config)
    model.to_empty(device=device)
    initialise(model, weights)
    count = sum(parameter.numel() for parameter in model.parameters())
    _note(f"{found.path}: {count / 1e6:.2f} M parameters, {str(dtype).removeprefix('torch.')} on {device.type}")
    return model


def _write(model: GPT, tokenizer: Tokenizer, start: list[int], options: argparse.Namespace) -> None:
    """The prompt and what follows, as it comes, until the end of the text; the speed in the end."""
    import torch

    from megalite.data.tokenizer import end_of_text
    from megalite.model.generate import stream

    end = end_of_text(tokenizer)
    prompt = torch.tensor([start], device=next(model.parameters()).device)
    how = {name: getattr(options, name) for name in ("temperature", "top_k", "top_p", "seed")}
    times = [time.perf_counter()]

    def drawn() -> Iterator[int]:
        for token in stream(model, prompt, options.tokens, stop=end, **how):
            times.append(time.perf_counter())
            if token.item() != end:
                yield int(token)

    print(options.prompt, end="", flush=True)
    for text in texts(tokenizer, start, drawn()):
        print(text, end="", flush=True)
    print(flush=True)
    _note(_speed(times))


def _note(line: str) -> None:
    print(f"megalite: {line}", file=sys.stderr, flush=True)


def texts(tokenizer: Tokenizer, before: list[int], tokens: Iterable[int]) -> Iterator[str]:
    """What tokens add to the text of those before, one or several at a time: whole characters only.

    They are decoded with those of the last text, since the first ones of a text may be decoded in another way.
    """
    ids, new = list(before), len(before)  # the tokens from `new` on are not shown yet
    shown = tokenizer.decode(ids)
    for token in tokens:
        ids.append(token)
        text = tokenizer.decode(ids)
        if not text.endswith(UNFINISHED):
            yield text[len(shown) :]
            ids, new = ids[new:], len(ids) - new
            shown = tokenizer.decode(ids)
    yield tokenizer.decode(ids)[len(shown) :]


def _speed(times: list[float]) -> str:
    """times: when generation began, and when each token was there"""
    count, first, rest = len(times) - 1, times[1] - times[0], times[-1] - times[1]
    after = f", then {(count - 1) / rest:,.0f} tokens/s" if count > 1 else ""
    return f"{count} token{'s' * (count > 1)}: the first after {first:.2f} s{after}"
