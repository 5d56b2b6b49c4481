"""Hugging Face's GPT-2 and Llama: weights by their names as ours, and ours as theirs.

    HuggingFaceFolder ─ FromHuggingFace ─▶ our names ─ initialise ─▶ a model on any mesh
    checkpoint ─ to_hugging_face ─▶ their names

Which is which says hf_names; what of the settings both can say, hf_config.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megalite.checkpoint.boxes import Box
from megalite.checkpoint.held import Held
from megalite.checkpoint.hf_folder import HuggingFaceFolder
from megalite.checkpoint.source import WeightSource, load
from megalite.config import ModelConfig
from megalite.errors import CheckpointError
from megalite.model.gpt import GPT
from megalite.model.hf_config import check_settings, family_of, model_config
from megalite.model.hf_names import BUFFERS, HEAD, PREFIX, Theirs, tensors_of
from megalite.parallel.parameters import shard_table


class FromHuggingFace:
    """The weights of a folder by our names, in our layout: a WeightSource.

    Raises ConfigError where the folder has a model of other settings; CheckpointError where it lacks a tensor, or has
    one for which the model has no place.
    """

    def __init__(self, folder: HuggingFaceFolder, config: ModelConfig) -> None:
        check_settings(config, model_config(folder.config), folder.folder)
        self.folder, self.tensors = folder, tensors_of(config, family := family_of(config))
        prefix = PREFIX[family]
        bare = not any(name.startswith(prefix) for name in folder.names)  # written without the head
        self._drop = prefix if bare else ""
        needed = {self._name(part): part for parts in self.tensors.values() for part in parts}
        absent = {name for name in needed if name not in folder.names and not self._zero(name)}
        if absent:
            raise CheckpointError(f"{folder.folder}: no tensor {min(absent)}")
        others = {name for name in folder.names - needed.keys() if not name.endswith(BUFFERS)}
        if others - ({HEAD} if config.tied else set()):
            raise CheckpointError(f"{folder.folder}: {min(others)} is a tensor for which a {family} model has no place")
        for name in needed.keys() & folder.names:
            if (shape := folder.shape(name)) != needed[name].own_shape:
                raise CheckpointError(
                    f"{folder.folder}: {name} has shape {list(shape)}; {list(needed[name].own_shape)} would do"
                )

    def shape(self, name: str) -> tuple[int, ...]:
        """Of one of our parameters, whole."""
        if name not in self.tensors:
            raise CheckpointError(f"{self.folder.folder}: nothing there is {name}")
        parts = self.tensors[name]
        return (sum(part.shape[0] for part in parts), *parts[0].shape[1:])

    def read(self, name: str, box: Box) -> Tensor:
        """A box of one of our parameters, in the dtype of the file."""
        found = []
        for part in self.tensors[name]:
            if (common := box.intersection(part.box)) is not None:
                found.append(self._read(part, common.within(part.box)))
        return found[0] if len(found) == 1 else torch.cat(found)

    def _read(self, part: Theirs, box: Box) -> Tensor:
        name = self._name(part)
        if name not in self.folder.names:
            return torch.zeros(box.shape)
        if part.transposed:
            return self.folder.read(name, Box(box.offset[::-1], box.shape[::-1])).t()
        return self.folder.read(name, box)

    def _name(self, part: Theirs) -> str:
        return part.name.removeprefix(self._drop)

    def _zero(self, name: str) -> bool:
        """Whether it is a bias that config.json says is not there."""
        kind = "attention_bias" if ".self_attn." in name else "mlp_bias"
        return name.endswith("_proj.bias") and not self.folder.config.get(kind)


def initialise(model: GPT, source: WeightSource) -> None:
    """Fill this rank's part of a model, before it is divided by ZeRO, with the weights of a source of our names."""
    tp = model.mesh.tp
    table = shard_table(model, tp)
    load((Held(name, table[name], tp.rank, 0, p.detach().view(-1)) for name, p in model.named_parameters()), source)


def to_hugging_face(config: ModelConfig, source: WeightSource, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """All of their tensors of a model whose weights, by our names, are in `source`: name and values, one by one."""
    for ours, parts in tensors_of(config, family_of(config)).items():
        for part in parts:
            values = source.read(ours, part.box).to(dtype)
            yield part.name, (values.t() if part.transposed else values).contiguous()
