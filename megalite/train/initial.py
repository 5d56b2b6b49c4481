"""`model.init`: a run that begins with the weights of a Hugging Face folder, each rank with what it holds of them."""

from __future__ import annotations

from dataclasses import replace

from megalite.checkpoint.hf_folder import HuggingFaceFolder
from megalite.checkpoint.source import load
from megalite.errors import CheckpointError, MegaliteError
from megalite.model.hf import FromHuggingFace
from megalite.parallel.words import first_of
from megalite.parallel.zero import ShardedParameters
from megalite.train.state import WEIGHTS, held
from megalite.train.step import TrainStep


def initialise(step: TrainStep, folder: str) -> int:
    """Before the first step: fill the weights, in half precision their float32 masters; returns the bytes read here.

    All ranks call it, and all raise where one cannot: ConfigError where the folder has a model of other settings,
    CheckpointError where it is damaged.
    """
    error: MegaliteError | None = None
    read = 0
    try:
        there = HuggingFaceFolder(folder)
        source = FromHuggingFace(there, step.model.config)
        mine = [each for each in held(step) if each.name.startswith(WEIGHTS)]
        load((replace(each, name=each.name.removeprefix(WEIGHTS)) for each in mine), source)
        read = there.bytes_read
    except MegaliteError as caught:
        error = caught
    if first := first_of(str(error or ""), step.mesh.world):
        raise error or CheckpointError(first)
    if isinstance(step.buckets, ShardedParameters):
        step.buckets.publish()
    return read
