"""Text between ranks, as bytes and not as pickles: what one has to say, known to all of an axis."""

from __future__ import annotations

import torch

from megalite.parallel.in_flight import issue_all_gather
from megalite.parallel.mesh import Axis


def exchanged(text: str, axis: Axis) -> list[str]:
    """Every rank's text, in rank order. All ranks of the axis call it; each text travels as long as the longest."""
    if axis.size == 1:
        return [text]
    device = "cuda" if axis.overlaps else "cpu"
    own = torch.tensor(list(text.encode()), dtype=torch.uint8, device=device)
    lengths = issue_all_gather(torch.tensor([len(own)], device=device), axis, 0).wait().tolist()
    padded = torch.nn.functional.pad(own, (0, max(lengths) - len(own)))
    rows = issue_all_gather(padded, axis, 0).wait().view(axis.size, -1).cpu()
    return [bytes(row[:length].tolist()).decode() for row, length in zip(rows, lengths, strict=True)]


def said(text: str, axis: Axis) -> str:
    """What the first rank of the axis says."""
    return exchanged(text if axis.rank == 0 else "", axis)[0]


def first_of(text: str, axis: Axis) -> str:
    """The text of the first rank that has one, "" where none has: an error on one rank is then one on all."""
    return next(filter(None, exchanged(text, axis)), "")
