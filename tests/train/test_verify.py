"""`verify`: passes where the mesh computes the dense model, and names what differs where a bug is planted."""

from dataclasses import replace

import pytest
import torch

from megalite.config import Config, DataConfig, MeshConfig, ModelConfig, TrainConfig, check, resolve
from megalite.model.presets import PRESETS
from megalite.parallel.ddp import GradientBuckets
from megalite.parallel.mesh import Axis
from megalite.testing import run_ranks
from megalite.train import gradients, step
from megalite.train import verify as verification
from megalite.train.verify import shrunk, verify


def twin(preset, dp, tp, sequence_parallel=True, **train):
    settings = {"global_batch": 8, "seq_len": 64, "micro_batch": 1, **train}
    config = Config(
        ModelConfig(**PRESETS[preset]), MeshConfig(dp, tp=tp, sequence_parallel=sequence_parallel), train=TrainConfig()
    )
    return shrunk(resolve(check(replace(config, train=replace(config.train, **settings)))))


def twin_of_sp(preset, mesh, window=0, documents=False, **train):
    settings = {"global_batch": 8, "seq_len": 96, "micro_batch": 1, **train}
    model = ModelConfig(**PRESETS[preset], window=window)
    data = DataConfig(separate_documents=documents)
    return shrunk(resolve(check(Config(model, mesh, data, TrainConfig(**settings)))))


def rows(config, plant=lambda patch: None):
    def run():
        with pytest.MonkeyPatch.context() as patch:
            plant(patch)
            return verify(config, torch.device("cpu"))

    every = run_ranks(run, config.mesh.size)
    assert all(one == every[0] for one in every)  # the same list on every rank
    return every[0]


def failed(found):
    return [row.name for row in found if not row.passed]


@pytest.mark.parametrize(
    "config",
    [
        twin("llama-tiny", 2, 2),
        twin("llama-tiny", 1, 2, sequence_parallel=False, z_loss=1e-3),
        twin("gpt2-tiny", 2, 2, seq_len=63),
        twin("gpt2-tiny", 1, 3, seq_len=63),
        twin("gpt2-tiny", 3, 1, global_batch=6),
        twin("smollm2-135m", 1, 3),
    ],
    ids=lambda c: f"dp{c.mesh.dp} tp{c.mesh.tp} {c.model.norm} {c.mesh.sequence_parallel}",
)
def test_good_meshes_pass(config):
    found = rows(config)
    assert not failed(found)
    names = [row.name for row in found]
    assert names[:4] == ["loss of step 1", "loss of step 2", "loss of step 3", "gradient norm"]
    assert {"gradient of embedding.weight", "stepped blocks.0.mlp.up.weight"} <= set(names)
    assert max(row.error for row in found) < 1e-11  # far from the bounds
    assert {row.bound for row in found} == {1e-10, 1e-9}


@pytest.mark.parametrize(
    "config",
    [
        twin_of_sp("llama-tiny", MeshConfig(1, sp=4)),
        twin_of_sp("llama-tiny", MeshConfig(1, sp=4, ulysses=1, layout="striped", keep_kv=True), documents=True),
        twin_of_sp("gpt2-tiny", MeshConfig(2, sp=2, ulysses=1, tp=2), window=50),
        twin_of_sp("gpt2-tiny", MeshConfig(1, sp=3, layout="contiguous", tp=2), window=7, documents=True, seq_len=99),
    ],
    ids=lambda c: f"dp{c.mesh.dp} ring{c.mesh.ring} ulysses{c.mesh.ulysses} tp{c.mesh.tp} {c.model.norm}",
)
def test_good_meshes_of_sp_pass(config):
    found = rows(config)
    assert not failed(found)
    assert max(row.error for row in found) < 1e-11


def test_tokens_of_another_layout_are_found_out():
    """The tokens are laid as one layout has it, and the model takes them for those of another."""

    def plant(patch):
        whole = verification.own_positions
        patch.setattr(verification, "own_positions", lambda layout, *rest: whole("striped", *rest))

    found = failed(rows(twin_of_sp("llama-tiny", MeshConfig(1, sp=2, ulysses=1)), plant))
    assert {"loss of step 1", "gradient norm", "gradient of embedding.weight"} <= set(found)


def test_gradients_that_travel_over_dp_and_not_over_sp_are_named():
    def plant(patch):
        init = GradientBuckets.__init__
        patch.setattr(
            GradientBuckets, "__init__", lambda self, parameters, axis, *more: init(self, parameters, Axis(), *more)
        )

    found = failed(rows(twin_of_sp("llama-tiny", MeshConfig(1, sp=2)), plant))
    assert "gradient norm" in found and "gradient of embedding.weight" in found
    assert "loss of step 1" not in found


def test_norms_that_are_not_summed_are_named():
    def plant(patch):
        patch.setattr(gradients, "sum_partial_pieces", lambda pieces, table, axis: None)

    found = failed(rows(twin("llama-tiny", 1, 2), plant))
    wrong = {"norm.weight"} | {f"blocks.{i}.{part}_norm.weight" for i in range(2) for part in ("attention", "mlp")}
    assert {name for name in found if name.startswith("gradient of")} == {f"gradient of {name}" for name in wrong}
    assert "gradient norm" in found and "loss of step 1" not in found and "loss of step 2" in found


def test_replicated_kv_heads_that_are_not_summed_are_named():
    def plant(patch):
        patch.setattr(gradients, "sum_partial_pieces", lambda pieces, table, axis: None)

    config = twin("llama-tiny", 1, 2, sequence_parallel=False)
    config = replace(config, model=replace(config.model, kv_heads=1))
    found = failed(rows(config, plant))
    qkv = [f"gradient of blocks.{i}.attention.qkv.weight" for i in range(2)]
    assert [name for name in found if name.startswith("gradient of")] == qkv


def test_gradients_that_do_not_travel_over_dp_are_named():
    def plant(patch):
        patch.setattr(GradientBuckets, "finish", lambda self: None)
        patch.setattr(GradientBuckets, "_issue_full", lambda self, _=None: None)

    found = failed(rows(twin("llama-tiny", 2, 1), plant))
    assert "gradient norm" in found and "gradient of embedding.weight" in found
    assert "loss of step 1" not in found


def test_a_mean_of_the_ranks_means_is_found_out():
    def plant(patch):
        over = step._over

        def own_count_for_all(axis, value):
            return over(axis, value) if value.is_floating_point() else value.repeat(axis.size)

        patch.setattr(step, "_over", own_count_for_all)

    found = failed(rows(twin("llama-tiny", 2, 1), plant))
    assert {"loss of step 1", "gradient norm", "gradient of embedding.weight"} <= set(found)


def test_a_norm_that_is_wrong_in_the_ninth_digit_is_named():
    def plant(patch):
        whole = gradients.gradient_norm

        def wrong(model, table, mesh, buckets):
            return whole(model, table, mesh, buckets) * (1 + 1e-9 * (mesh.size > 1))

        patch.setattr(gradients, "gradient_norm", wrong)

    assert failed(rows(twin("llama-tiny", 1, 2), plant)) == ["gradient norm"]


@pytest.mark.parametrize("preset", PRESETS)
def test_a_twin_has_the_structure_of_what_it_stands_for(preset):
    whole = ModelConfig(**PRESETS[preset])
    for tp in range(1, 17):
        config = Config(whole, MeshConfig(dp=2, tp=tp), train=TrainConfig(seq_len=61, global_batch=12, micro_batch=3))
        if whole.heads % tp or whole.ffn % tp or (whole.kv_heads % tp and tp % whole.kv_heads):
            continue
        config = resolve(check(config))
        small = shrunk(config)
        model = small.model
        resolve(check(small))
        kept = ("heads", "kv_heads", "tied", "norm", "positions", "activation", "bias")
        assert all(getattr(model, name) == getattr(whole, name) for name in kept)
        for name in ("vocab_size", "ffn"):
            assert getattr(model, name) % (2 * tp) == getattr(whole, name) % (2 * tp), name
            assert getattr(model, name) <= getattr(whole, name)
        assert small.train.seq_len % (2 * tp) == 61 % (2 * tp)
        assert small.train.global_batch // 2 // small.train.micro_batch == 2  # microbatches remain
        assert small.train.dtype == "float64"


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize(("sp", "ulysses", "tp"), [(2, 1, 1), (2, 2, 2), (4, 2, 2), (8, 1, 1), (8, 4, 1), (3, 1, 4)])
def test_a_twin_keeps_how_the_sequence_is_cut(sp, ulysses, tp, layout):
    model = ModelConfig(heads=8, kv_heads=4, window=100)
    mesh = MeshConfig(2, sp=sp, ulysses=ulysses, tp=tp, layout=layout, keep_kv=True)
    for pieces in (1, 5, 40):
        seq_len = pieces * mesh.sequence_divisor
        config = Config(model, mesh, DataConfig(separate_documents=True), TrainConfig(seq_len=seq_len))
        small = shrunk(resolve(check(config)))
        assert resolve(check(small)).mesh == small.mesh == replace(mesh, microbatches=1, bucket_mb=small.mesh.bucket_mb)
        assert small.data.separate_documents
        assert small.train.seq_len <= min(seq_len, max(12, 2 * tp) * sp + 2 * tp * sp)
        assert (small.train.seq_len - seq_len) % (2 * tp * sp) == 0
        assert 0 < small.model.window < max(2, small.train.seq_len)
    without = shrunk(resolve(check(replace(config, model=replace(model, window=0)))))
    assert without.model.window == 0
