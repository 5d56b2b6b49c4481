"""Bytes of a rank before the run: parameters of the model's own Shards, model states per parameter, who needs most."""

import dataclasses

import pytest
import torch

from megalite.config import Config, MeshConfig, ModelConfig, TrainConfig, resolve
from megalite.model.gpt import GPT
from megalite.model.presets import PRESETS
from megalite.parallel.mesh import Mesh
from megalite.parallel.parameters import shard_table
from megalite.plan.rank_memory import held_weights, parameter_shards, predicted_memory
from megalite.plan.stages import plan_stages
from megalite.testing import run_ranks
from megalite.train.pipelined import parts_of


def config_of(model, mesh, **train):
    return resolve(Config(model, mesh, train=TrainConfig(**train)), mesh.size)


def held(stages, rank):
    return [stage for stage in stages.stages if stage.rank == rank]


@pytest.mark.parametrize("preset", PRESETS)
def test_parameters_are_those_of_the_model(preset):
    model = ModelConfig(**PRESETS[preset])
    mesh = MeshConfig(1, 2, schedule="interleaved-1f1b")
    if preset.endswith("tiny"):
        mesh = MeshConfig(1)
    stages = plan_stages(config_of(model, mesh, global_batch=8, seq_len=64))
    for rank in range(mesh.pp):
        with torch.device("meta"):
            table = shard_table(GPT(model, parts=parts_of(stages, rank)), Mesh().tp)
        assert {name: shard.shape for name, shard in parameter_shards(model, 1, held(stages, rank)).items()} == {
            name: shard.shape for name, shard in table.items()
        }


SMALL = ModelConfig(vocab_size=97, hidden=48, layers=3, heads=8, kv_heads=2, ffn=40)
OTHER = dataclasses.replace(SMALL, positions="learned", norm="layernorm", activation="gelu", bias=True, tied=True)


def shapes(config):
    mesh = Mesh(pp=config.mesh.pp, tp=config.mesh.tp)
    model = GPT.of(config, mesh, parts_of(plan_stages(config), mesh.pp.rank))
    return mesh.pp.rank, {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("model", [SMALL, OTHER], ids=["untied", "tied"])
@pytest.mark.parametrize("mesh", [MeshConfig(1, tp=4), MeshConfig(1, 2, tp=2)], ids=["tp 4", "pp 2 × tp 2"])
def test_parameters_of_a_rank_padded_and_replicated(model, mesh):
    """A vocabulary that divides over nothing, fewer kv heads than ranks, an embedding at both ends."""
    config = config_of(model, mesh, global_batch=4, seq_len=32)
    stages = plan_stages(config)
    for rank, found in run_ranks(shapes, mesh.size, config):
        shards = parameter_shards(model, mesh.tp, held(stages, rank))
        assert {name: shard.local_shape for name, shard in shards.items()} == found


DEEP = ModelConfig(vocab_size=1000, hidden=512, layers=4, heads=8)


@pytest.mark.parametrize(
    ("dtype", "zero", "microbatches", "bytes_each"),
    [  # over d = 8; Megatron-LM's distributed optimizer (float32 gradients) and ZeRO, §5, with them
        ("float32", 0, 2, 16),
        ("float32", 1, 2, 8 + 8 / 8),
        ("float32", 1, 1, 4 + 12 / 8),  # gradients leave as they are made
        ("float32", 2, 2, 4 + 12 / 8),
        ("bfloat16", 0, 2, 18),
        ("bfloat16", 1, 2, 6 + 12 / 8),
        ("bfloat16", 2, 2, 2 + 16 / 8),
        ("float64", 0, 2, 32),
    ],
)
def test_model_states_are_those_of_the_published_tables(dtype, zero, microbatches, bytes_each):
    mesh = MeshConfig(8, zero=zero, microbatches=microbatches)
    (memory,) = predicted_memory(config_of(DEEP, mesh, global_batch=16, seq_len=64, dtype=dtype))
    weights = held_weights(DEEP, 1, plan_stages(config_of(DEEP, mesh, global_batch=16, seq_len=64)).stages)
    assert memory.parameters + memory.gradients + memory.optimizer == pytest.approx(weights * bytes_each, rel=1e-6)


def test_hybrid_shards_divide_by_fewer():
    whole, half = (
        predicted_memory(config_of(DEEP, MeshConfig(8, zero=1, shard=shard), global_batch=8, seq_len=64))[0]
        for shard in (0, 4)
    )
    assert half.optimizer == 2 * whole.optimizer


def test_the_first_rank_of_1f1b_has_most_microbatches_in_flight_and_gpipe_has_all():
    model = dataclasses.replace(DEEP, vocab_size=8)  # so that the head weighs little

    def activations(schedule):
        mesh = MeshConfig(1, 4, schedule=schedule, division=(1, 1, 1, 1), microbatches=8)
        return [memory.activations for memory in predicted_memory(config_of(model, mesh, global_batch=8, seq_len=128))]

    first, second, third, _ = activations("1f1b")
    assert (first, second) == (pytest.approx(first / 4 * 4), pytest.approx(first / 4 * 3))
    assert third == first / 4 * 2
    assert activations("gpipe")[1] == first / 4 * 8


def test_recomputation_and_smaller_microbatches_need_less():
    def peak(**train):
        return predicted_memory(config_of(DEEP, MeshConfig(1), global_batch=16, seq_len=512, **train))[0].peak

    assert peak() > peak(recompute="selective") > peak(recompute="full")
    assert peak() > peak(micro_batch=4)
