"""What attends is chosen by the mesh and the mask; documents and windows mean what they say; memory falls with sp."""

import dataclasses

import pytest
import torch

from megalite.config import ModelConfig
from megalite.model.generate import generate
from megalite.model.gpt import GPT
from megalite.parallel.layout import own_positions
from megalite.parallel.mesh import Mesh
from megalite.testing import run_ranks

LLAMA = ModelConfig(vocab_size=101, hidden=32, layers=2, heads=4, kv_heads=2, ffn=48, max_seq_len=64, init_std=0.1)


@pytest.fixture(autouse=True)
def _float64():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def draw(rows, length):
    return torch.randint(101, (rows, length), generator=torch.Generator().manual_seed(0))


def test_packed_documents_are_as_if_each_stood_alone():
    """Rope knows distances only, so that a document's logits do not depend on where in the sequence it stands."""
    model, tokens = GPT(LLAMA), draw(2, 20)
    documents = torch.tensor([[0] * 7 + [1] * 13, [0] * 12 + [1] * 8])
    logits = model(tokens, documents=documents)
    for row, end in ((0, 7), (1, 12)):
        for part in (slice(0, end), slice(end, 20)):
            alone = model(tokens[row : row + 1, part])
            assert (logits[row : row + 1, part] - alone).abs().max() <= 1e-12
    assert (model(tokens) - logits).abs().max() > 1e-3


def test_a_window_is_how_far_a_layer_sees():
    """After two layers of a window of 4, what is 7 tokens back does not matter, and what is 6 back does."""
    model, tokens = GPT(dataclasses.replace(LLAMA, window=4)), draw(1, 20)
    before = model(tokens)
    for back, matters in ((6, True), (7, False)):
        changed = tokens.clone()
        changed[0, 19 - back] = (changed[0, 19 - back] + 1) % 101
        assert ((model(changed)[0, 19] - before[0, 19]).abs().max() > 1e-9) == matters


@pytest.mark.parametrize(("sp", "ulysses"), [(2, 1), (2, 2), (4, 1), (4, 2)])
def test_what_is_kept_for_backward_falls_with_sp(sp, ulysses):
    """Bytes of the storages that autograd saves in a forward pass, parameters aside: 1/sp of the mesh of one's."""
    config = dataclasses.replace(LLAMA, kv_heads=4, max_seq_len=512)
    tokens = draw(1, 513)

    def saved(size, ulysses):
        torch.set_default_dtype(torch.float64)
        mesh = Mesh(sp=size, ulysses=ulysses)
        model = GPT(config, mesh)
        own = torch.from_numpy(own_positions("zigzag", mesh.ring.size, ulysses, mesh.sp.rank, 512))
        parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        kept = {}

        def keep(x):
            storage = x.untyped_storage()
            if storage.data_ptr() not in parameters:
                kept[storage.data_ptr()] = storage.nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            loss = model(tokens[:, :-1][:, own], tokens[:, 1:][:, own])
        assert loss.isfinite()
        return sum(kept.values())

    whole = run_ranks(saved, 1, 1, 1)[0]
    for part in run_ranks(saved, sp, sp, ulysses):
        assert part <= 1.15 * whole / sp
        assert part >= 0.9 * whole / sp


def test_every_rank_of_sp_writes_what_the_mesh_of_one_writes():
    def text(sp, ulysses):
        torch.set_default_dtype(torch.float64)
        return generate(GPT(LLAMA, Mesh(sp=sp, ulysses=ulysses)), draw(1, 5), 9, seed=3)

    alone = run_ranks(text, 1, 1, 1)[0]
    for written in run_ranks(text, 4, 4, 2):
        assert torch.equal(written, alone)


def test_what_cannot_be_is_said():
    def run():
        with pytest.raises(ValueError, match=r"heads of a tp rank=3 does not divide over the 2 ranks of ulysses"):
            GPT(dataclasses.replace(LLAMA, heads=3, kv_heads=3, hidden=24, head_dim=8), Mesh(sp=2, ulysses=2))
        with pytest.raises(ValueError, match=r"a sequence of 66 tokens given; at most max_seq_len=64 would do"):
            GPT(LLAMA, Mesh(sp=2))(draw(1, 33))
        with pytest.raises(
            ValueError, match=r"a sequence of 10 tokens .* zigzag ring of 2 .* a multiple of 4 would do"
        ):
            GPT(LLAMA, Mesh(sp=2))(draw(1, 5))

    run_ranks(run, 2)
