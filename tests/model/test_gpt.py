"""The model against transformers' GPT-2 and Llama at the same weights, its parts against PyTorch's, on every mesh."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama

from megalite.config import ModelConfig
from megalite.model.attention import Attention
from megalite.model.context import causal_attention, context
from megalite.model.generate import generate
from megalite.model.gpt import GPT, Part
from megalite.model.mlp import gelu, gelu_tanh, swiglu
from megalite.model.norm import RMSNorm, norm
from megalite.model.presets import PRESETS
from megalite.model.rope import rotary, rotated_qkv
from megalite.parallel.mesh import Axis, Mesh
from megalite.parallel.parameters import cut, shard_table
from megalite.testing import run_ranks

LLAMA = ModelConfig(**PRESETS["llama-tiny"])
GPT2 = ModelConfig(**PRESETS["gpt2-tiny"])
BOTH = pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])


@pytest.fixture(autouse=True)
def _one_thread_and_float64():
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    yield
    torch.set_default_dtype(dtype)
    torch.set_num_threads(threads)


def draw(*shape, seed=3):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def ids(config, batch, length):
    return torch.randint(config.vocab_size, (batch, length), generator=torch.Generator().manual_seed(6))


# --- transformers ---------------------------------------------------------------------------------------------------


def lift_float32_islands(monkeypatch):
    """transformers computes Llama's norms and rotary angles in float32 whatever the model's dtype: here in its dtype.

    The formulas are the same; only the casts go. Attention is sdpa, since the eager one takes its softmax in float32.
    """

    def rms_norm(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))

    def rotary(self, x, position_ids):
        dim = self.config.head_dim
        powers = torch.arange(0, dim, 2, dtype=torch.float64) / dim
        frequencies = 1.0 / self.config.rope_parameters["rope_theta"] ** powers
        angles = position_ids[..., None].double() * frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()

    monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "forward", rms_norm)
    monkeypatch.setattr(modeling_llama.LlamaRotaryEmbedding, "forward", rotary)


def hf_llama(config):
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden,
            intermediate_size=config.ffn,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_seq_len,
            rms_norm_eps=config.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            tie_word_embeddings=config.tied,
            attn_implementation="sdpa",
        )
    )


def hf_gpt2(config):
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=config.vocab_size,
            n_positions=config.max_seq_len,
            n_embd=config.hidden,
            n_layer=config.layers,
            n_head=config.heads,
            n_inner=config.ffn,
            layer_norm_epsilon=config.norm_eps,
            resid_pdrop=0,
            embd_pdrop=0,
            attn_pdrop=0,
            tie_word_embeddings=config.tied,
            attn_implementation="sdpa",
        )
    )


def llama_names(of, config):
    """Ours by name, put together from theirs: `of(name)` gives their weight, or their gradient."""
    ours = {"embedding.weight": of("model.embed_tokens.weight"), "norm.weight": of("model.norm.weight")}
    for i in range(config.layers):
        theirs, mine = f"model.layers.{i}", f"blocks.{i}"
        qkv = [of(f"{theirs}.self_attn.{part}_proj.weight") for part in "qkv"]
        ours[f"{mine}.attention.qkv.weight"] = torch.cat(qkv)
        ours[f"{mine}.attention.out.weight"] = of(f"{theirs}.self_attn.o_proj.weight")
        ours[f"{mine}.mlp.up.weight"] = torch.cat([of(f"{theirs}.mlp.{part}_proj.weight") for part in ("gate", "up")])
        ours[f"{mine}.mlp.down.weight"] = of(f"{theirs}.mlp.down_proj.weight")
        ours[f"{mine}.attention_norm.weight"] = of(f"{theirs}.input_layernorm.weight")
        ours[f"{mine}.mlp_norm.weight"] = of(f"{theirs}.post_attention_layernorm.weight")
    return ours if config.tied else {**ours, "head.weight": of("lm_head.weight")}


def gpt2_names(of, config):
    ours = {"embedding.weight": of("transformer.wte.weight"), "positions.weight": of("transformer.wpe.weight")}
    for kind in ("weight", "bias"):
        ours[f"norm.{kind}"] = of(f"transformer.ln_f.{kind}")
        for i in range(config.layers):
            theirs, mine = f"transformer.h.{i}", f"blocks.{i}"
            ours[f"{mine}.attention_norm.{kind}"] = of(f"{theirs}.ln_1.{kind}")
            ours[f"{mine}.mlp_norm.{kind}"] = of(f"{theirs}.ln_2.{kind}")
            for here, there in (
                ("attention.qkv", "attn.c_attn"),
                ("attention.out", "attn.c_proj"),
                ("mlp.up", "mlp.c_fc"),
                ("mlp.down", "mlp.c_proj"),
            ):
                ours[f"{mine}.{here}.{kind}"] = of(f"{theirs}.{there}.{kind}").t()  # theirs are [in, out]
    return ours if config.tied else {**ours, "head.weight": of("lm_head.weight")}


VARIANTS = {
    "llama, grouped queries, untied": (LLAMA, hf_llama, llama_names),
    "llama, tied": (dataclasses.replace(LLAMA, tied=True), hf_llama, llama_names),
    "llama, one kv head": (dataclasses.replace(LLAMA, kv_heads=1), hf_llama, llama_names),
    "llama, as many kv heads": (dataclasses.replace(LLAMA, kv_heads=6), hf_llama, llama_names),
    "llama, larger heads, other theta": (
        dataclasses.replace(LLAMA, head_dim=12, rope_theta=500_000.0, norm_eps=1e-3),
        hf_llama,
        llama_names,
    ),
    "gpt2, tied": (GPT2, hf_gpt2, gpt2_names),
    "gpt2, untied": (dataclasses.replace(GPT2, tied=False), hf_gpt2, gpt2_names),
}


def closest(actual, expected):
    return ((actual - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_gradients_are_those_of_transformers(monkeypatch, variant):
    lift_float32_islands(monkeypatch)
    config, make, names = VARIANTS[variant]
    theirs, ours = make(config).double(), GPT(config)
    with torch.no_grad():
        for number, (name, parameter) in enumerate(theirs.named_parameters()):
            one = 1.0 if "norm" in name or ".ln_" in name else 0.0
            parameter.copy_(one + 0.2 * draw(*parameter.shape, seed=number))
        weights = names(theirs.get_parameter, config)
        assert weights.keys() == dict(ours.named_parameters()).keys()
        for name, parameter in ours.named_parameters():
            parameter.copy_(weights[name])
    tokens = ids(config, 3, 29)
    direction = draw(3, 29, config.vocab_size)
    expected, actual = theirs(tokens).logits, ours(tokens)
    assert expected.dtype == torch.float64
    assert closest(actual, expected) < 1e-12
    expected.backward(direction)
    actual.backward(direction)
    gradients = names(lambda name: theirs.get_parameter(name).grad, config)
    for name, parameter in ours.named_parameters():
        assert closest(parameter.grad, gradients[name]) < 1e-11, name


@pytest.mark.parametrize("variant", ["llama, tied", "gpt2, untied"])
def test_the_loss_is_that_of_transformers(monkeypatch, variant):
    lift_float32_islands(monkeypatch)
    config, make, names = VARIANTS[variant]
    theirs, ours = make(config).double(), GPT(config)
    with torch.no_grad():
        weights = names(theirs.get_parameter, config)
        for name, parameter in ours.named_parameters():
            parameter.copy_(weights[name])
    tokens = ids(config, 3, 30)
    labels = tokens.clone()
    labels[0, 5:20] = -100
    expected = theirs(tokens, labels=labels).loss
    assert expected.dtype == torch.float32  # whatever the logits are
    torch.testing.assert_close(ours(tokens[:, :-1], labels[:, 1:]).float(), expected, rtol=1e-6, atol=0)


# --- the loss, and what is refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@BOTH
def test_the_fused_loss_is_the_cross_entropy_of_the_logits(config, reduction):
    model = GPT(dataclasses.replace(config, init_std=0.3))
    tokens, targets = ids(config, 3, 17), ids(config, 3, 17).roll(1, 1)
    targets[1, 2:9] = -100
    expected = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction=reduction)
    expected.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    actual = model(tokens, targets, reduction=reduction)
    actual.backward()
    torch.testing.assert_close(actual, expected, rtol=1e-13, atol=0)
    for name, parameter in model.named_parameters():
        assert closest(parameter.grad, gradients[name]) < 1e-12, name


@BOTH
def test_z_loss_is_the_square_of_the_log_sum_exp(config):
    model = GPT(config)
    tokens = ids(config, 2, 9)
    plain, more = model(tokens, tokens), model(tokens, tokens, z_loss=0.5)
    torch.testing.assert_close(more - plain, 0.5 * model(tokens).logsumexp(-1).square().mean(), rtol=1e-12, atol=0)


@BOTH
def test_a_sequence_beyond_the_positions_is_an_error(config):
    model = GPT(config)
    model(ids(config, 1, 128))
    with pytest.raises(ValueError, match="a sequence of 129 tokens given; at most max_seq_len=128 would do"):
        model(ids(config, 1, 129))


@BOTH
def test_no_token_sees_a_later_one(config):
    model = GPT(dataclasses.replace(config, init_std=0.3))
    tokens = ids(config, 1, 20)
    other = tokens.clone()
    other[0, 12:] = (other[0, 12:] + 1) % config.vocab_size
    torch.testing.assert_close(model(tokens)[:, :12], model(other)[:, :12], rtol=1e-13, atol=1e-13)
    assert (model(tokens)[:, 12:] - model(other)[:, 12:]).abs().min() > 0


@BOTH
def test_float32_is_float64_rounded(config):
    tokens = ids(config, 2, 33)
    wide = GPT(config)
    torch.set_default_dtype(torch.float32)
    model = GPT(config)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    loss = model(tokens, tokens)
    loss.backward()
    expected = wide(tokens, tokens)
    expected.backward()
    assert loss.dtype == torch.float32
    assert abs(loss.item() / expected.item() - 1) < 1e-6
    for (name, parameter), other in zip(model.named_parameters(), wide.parameters(), strict=True):
        assert parameter.grad.dtype == torch.float32
        assert closest(parameter.grad.double(), other.grad) < 1e-4, name


@BOTH
def test_sizes_that_do_not_divide_are_errors(config):
    axis = Axis("tp", 4, 0, object())
    with pytest.raises(ValueError, match="heads=6 does not divide over the 4 ranks of tp"):
        Attention(config, axis, None)
    with pytest.raises(ValueError, match="kv_heads=2 is neither a divisor nor a multiple of tp=3"):
        Attention(dataclasses.replace(config, kv_heads=2), Axis("tp", 3, 0, object()), None)


# --- initialisation -------------------------------------------------------------------------------------------------


@BOTH
def test_weights_are_those_of_gpt2s_recipe(config):
    model = GPT(dataclasses.replace(config, layers=8, hidden=96, head_dim=16), seed=3)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert (parameter == 0).all(), name
        elif "norm" in name:
            assert (parameter == 1).all(), name
        else:
            std = 0.02 / (16**0.5 if name.endswith(("out.weight", "down.weight")) else 1)
            assert parameter.std().item() == pytest.approx(std, rel=0.05), name
            assert abs(parameter.mean().item()) < std / 10, name


@BOTH
def test_each_weight_is_drawn_from_seed_and_name(config):
    first, again, other = GPT(config, seed=1), GPT(config, seed=1), GPT(config, seed=2)
    drawn = [name for name, parameter in first.named_parameters() if parameter.std() > 0]
    for name in drawn:
        assert torch.equal(first.get_parameter(name), again.get_parameter(name))
        assert not torch.equal(first.get_parameter(name), other.get_parameter(name))
    beginnings = {tuple(first.get_parameter(name).flatten()[:4].tolist()) for name in drawn}
    assert len(beginnings) == len(drawn)
    deeper = GPT(dataclasses.replace(config, layers=4), seed=1)  # another depth changes no other layer's draw
    assert torch.equal(deeper.blocks[1].mlp.up.weight, first.blocks[1].mlp.up.weight)


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("config", [dataclasses.replace(LLAMA, kv_heads=1), GPT2], ids=["llama", "gpt2"])
@pytest.mark.ranks(2, 3, 6)
def test_every_mesh_starts_from_the_same_weights(config, sequence_parallel):
    before = torch.random.get_rng_state()
    mesh = Mesh(tp=dist.get_world_size())
    model, dense = GPT(config, mesh, seed=7, sequence_parallel=sequence_parallel), GPT(config, seed=7)
    assert torch.equal(torch.random.get_rng_state(), before)  # PyTorch's own draws are nobody's business
    table = shard_table(model, mesh.tp)
    assert table.keys() == dict(dense.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, cut(dense.get_parameter(name).detach(), table[name], mesh.tp.rank)), name


@BOTH
def test_tied_weights_are_one_and_norms_are_partial_only_where_tokens_are_split(config):
    def partial(sequence_parallel):
        mesh = Mesh(tp=2)
        model = GPT(config, mesh, sequence_parallel=sequence_parallel)
        return {name for name, shard in shard_table(model, mesh.tp).items() if shard.partial and shard.replicated}

    names = dict(GPT(config).named_parameters()).keys()
    assert ("head.weight" in names) != config.tied
    alone = {
        name for name in names if "norm" in name or "positions" in name or name.endswith(("out.bias", "down.bias"))
    }
    assert run_ranks(partial, 2, True) == [alone] * 2
    assert run_ranks(partial, 2, False) == [set()] * 2


# --- on a mesh ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sequence_parallel", [True, False])
@BOTH
@pytest.mark.ranks(2, 3)
def test_logits_on_a_mesh_are_whole_and_the_dense_ones(config, sequence_parallel):
    torch.set_default_dtype(torch.float64)
    config = dataclasses.replace(config, kv_heads=1)
    mesh = Mesh(tp=dist.get_world_size())
    tokens = ids(config, 1, 17)
    actual, expected = GPT(config, mesh, sequence_parallel=sequence_parallel)(tokens), GPT(config)(tokens)
    assert actual.shape == (1, 17, 1001)
    assert ((actual - expected).abs().max() / expected.abs().max()).item() < 1e-13


# --- in parts ---------------------------------------------------------------------------------------------------------

DIVISIONS = {
    "even": [range(2), range(2, 4)],
    "nothing at either end": [range(0), range(1), range(1, 4), range(4, 4)],
    "all in one": [range(4)],
    "all beside the embedding": [range(4), range(4, 4)],
}


def parts_of(layers):
    return [Part(held, i == 0, i == len(layers) - 1) for i, held in enumerate(layers)]


def through(models, parts, tokens, *targets, **more):
    """From part to part; each of `models` holds one, or one model all."""
    x = None
    for model, part in zip(models, parts, strict=True):
        x = model(tokens, *targets, part=part, x=x, **more)
        if not part.head:
            assert x.shape == model.x_shape(tokens)
    return x


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("division", DIVISIONS)
@BOTH
def test_the_parts_of_a_model_make_up_the_whole(config, division, tied):
    """Values, loss and gradients: in one model, as a rank of a pipeline may hold several, and each in its own."""
    config = dataclasses.replace(config, layers=4, tied=tied)
    parts, tokens = parts_of(DIVISIONS[division]), ids(config, 2, 9)
    whole = GPT(config, seed=3)
    apart = [GPT(config, seed=3, parts=[part]) for part in parts]
    together = GPT(config, seed=3, parts=parts)
    expected = whole(tokens)
    assert torch.equal(through(apart, parts, tokens), expected)
    assert torch.equal(through([together] * len(parts), parts, tokens), expected)
    for models, divided in ((apart, parts), ([together] * len(parts), parts), ([whole], whole.parts)):
        through(models, divided, tokens, tokens.roll(1), z_loss=0.1).backward()
    summed = {}
    for model in apart:
        for name, parameter in model.named_parameters():
            summed[name] = summed.get(name, 0) + (0 if parameter.grad is None else parameter.grad)
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(summed[name], parameter.grad, rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(together.get_parameter(name).grad, parameter.grad, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@BOTH
def test_a_part_holds_what_it_computes_with_and_by_the_names_of_the_whole(config, tied):
    config = dataclasses.replace(config, layers=4, tied=tied)
    whole = dict(GPT(config, seed=3).named_parameters())
    parts = parts_of([range(1), range(1, 3), range(3, 4)])
    models = [GPT(config, seed=3, parts=[part]) for part in parts]
    names = [dict(model.named_parameters()).keys() for model in models]
    for model in models:
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, whole[name])
        assert {id(p) for p in model.parameters_of(model.parts[0])} == {id(p) for p in model.parameters()}
    assert frozenset().union(*names) == whole.keys()
    assert names[0] & names[1] == names[1] & names[2] == set()
    assert names[0] & names[2] == ({"embedding.weight"} if tied else set())
    assert [{name.split(".")[1] for name in held if name.startswith("blocks.")} for held in names] == [
        {"0"},
        {"1", "2"},
        {"3"},
    ]
    assert [model.has_copy_of_embedding for model in models] == [False, False, tied]
    assert [model.embedding is not None for model in models] == [True, False, tied]
    assert not GPT(config, parts=[parts[0], parts[2]]).has_copy_of_embedding  # a V's first rank


@BOTH
def test_the_parameters_of_each_of_several_parts(config):
    config = dataclasses.replace(config, layers=4, tied=True)
    first, last = Part(range(1), True, False), Part(range(3, 4), False, True)
    model = GPT(config, parts=[first, last])
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    held = [{names[id(parameter)] for parameter in model.parameters_of(part)} for part in (first, last)]
    assert held[0] & held[1] == {"embedding.weight"}
    assert held[0] | held[1] == set(names.values())
    assert all(name.startswith(("embedding", "positions", "blocks.0.")) for name in held[0])
    assert all(name.startswith(("embedding", "norm", "blocks.3.")) for name in held[1])


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.ranks(2, 3)
def test_what_goes_from_part_to_part_on_a_mesh(sequence_parallel):
    """Its shape, for tokens that divide over tp and that do not; the loss is that of the whole."""
    torch.set_default_dtype(torch.float64)
    config, mesh = dataclasses.replace(LLAMA, kv_heads=1, layers=2), Mesh(tp=dist.get_world_size())
    parts = parts_of([range(1), range(1, 2)])
    model = GPT(config, mesh, parts=parts, sequence_parallel=sequence_parallel)
    for shape in ((1, 7), (2, 3), (3, 8)):
        tokens = ids(config, *shape)
        split = mesh.tp.size if sequence_parallel else 1
        assert model.x_shape(tokens) == (-(-shape[0] * shape[1] // split), config.hidden)
        loss = through([model] * 2, parts, tokens, tokens.roll(1))
        assert loss.item() == pytest.approx(GPT(config)(tokens, tokens.roll(1)).item(), rel=1e-12)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@BOTH
def test_what_is_generated_is_the_same_on_every_mesh(config, temperature):
    config = dataclasses.replace(config, kv_heads=1, max_seq_len=16, init_std=0.3)  # 2 · 13 tokens: padded on 3 ranks

    def written():
        torch.set_default_dtype(torch.float64)
        model = GPT(config, Mesh(tp=dist.get_world_size()))
        return generate(model, ids(config, 2, 5), 20, temperature=temperature, top_k=7, seed=1).tolist()

    (alone,) = run_ranks(written, 1)
    assert [len(row) for row in alone] == [25, 25]
    assert [row[:5] for row in alone] == ids(config, 2, 5).tolist()
    assert run_ranks(written, 2) == [alone] * 2
    assert run_ranks(written, 3) == [alone] * 3


def test_the_likeliest_and_the_top_k():
    config = dataclasses.replace(LLAMA, init_std=0.3)
    model, start = GPT(config), ids(config, 2, 5)
    greedy = generate(model, start, 3, temperature=0)
    for i in range(5, 8):
        assert torch.equal(greedy[:, i], model(greedy[:, :i])[:, -1].argmax(-1))
    assert torch.equal(generate(model, start, 3, temperature=5.0, top_k=1), greedy)
    drawn = {tuple(generate(model, start[:1], 1, temperature=9.0, top_k=3, seed=s)[0, 5:].tolist()) for s in range(40)}
    best = model(start[:1])[0, -1].topk(3).indices.tolist()
    assert drawn == {(token,) for token in best}


@pytest.mark.parametrize(
    ("config", "targets"),
    [
        (LLAMA, True),
        (GPT2, False),
        pytest.param(LLAMA, False, marks=pytest.mark.full),
        pytest.param(GPT2, True, marks=pytest.mark.full),
    ],
    ids=["llama-loss", "gpt2-logits", "llama-logits", "gpt2-loss"],
)
def test_the_whole_model_compiles_without_a_graph_break(config, targets):
    torch.compiler.reset()
    config = dataclasses.replace(config, layers=1)
    model, tokens = GPT(config), ids(config, 2, 9)
    arguments = (tokens, tokens.roll(1)) if targets else (tokens,)
    outcomes = []
    for function in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        model.zero_grad()
        y = function(*arguments)
        y.sum().backward()
        outcomes.append([y.detach(), *(parameter.grad.clone() for parameter in model.parameters())])
    for actual, expected in zip(*outcomes, strict=True):
        assert closest(actual, expected) < 1e-12


# --- its parts ------------------------------------------------------------------------------------------------------


def same_with_gradients(actual, expected, *leaves, rtol=1e-12, atol=1e-13):
    """Two functions of the same leaves: values and gradients."""
    values, gradients = [], []
    for function in (actual, expected):
        y = function(*leaves)
        values.append(y.detach())
        gradients.append(torch.autograd.grad(y, leaves, draw(*y.shape, seed=9)))
    torch.testing.assert_close(values[0], values[1], rtol=rtol, atol=atol)
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol)


@pytest.mark.parametrize("shape", [(7, 10), (2, 3, 10), (1, 10)], ids=str)
@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e3])
def test_rms_norm_is_torchs(shape, scale):
    layer = RMSNorm(10, 1e-5)
    with torch.no_grad():
        layer.weight.copy_(draw(10))
    x = (scale * draw(*shape)).requires_grad_()

    def ours(x, weight):
        return layer(x)

    same_with_gradients(ours, lambda x, weight: F.rms_norm(x, (10,), weight, 1e-5), x, layer.weight, rtol=1e-11)


def test_rms_norm_of_bfloat16_has_float32_statistics():
    layer = RMSNorm(64, 1e-5).bfloat16()
    x = (300 * draw(4, 64)).bfloat16()
    y = layer(x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), F.rms_norm(x.float(), (64,), eps=1e-5), rtol=2**-8, atol=0)


def test_norm_is_what_the_config_says():
    assert isinstance(norm(LLAMA), RMSNorm)
    layer = norm(GPT2)
    assert isinstance(layer, nn.LayerNorm) and layer.bias is not None and layer.eps == GPT2.norm_eps
    assert norm(dataclasses.replace(GPT2, bias=False)).bias is None


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 6), (6, 2), (4, 1)])
def test_rope_turns_pairs_by_position_times_frequency(heads, kv_heads):
    """As complex numbers: (x_i + j x_{i+e/2}) · exp(j · position · θ^(−2i/e)); v is left as it is."""
    config = dataclasses.replace(LLAMA, head_dim=8, rope_theta=100.0)
    cos, sin = rotary(config, torch.arange(5), torch.float64)

    def direct(qkv):
        angle = torch.arange(5.0)[:, None] * 100.0 ** (-2 * torch.arange(4.0) / 8)
        turn = torch.polar(torch.ones_like(angle), angle)[None, :, None]
        turned = torch.complex(qkv[..., :4], qkv[..., 4:]) * turn
        both = torch.cat([turned.real, turned.imag], -1)
        return torch.cat([both[:, :, : heads + kv_heads], qkv[:, :, heads + kv_heads :]], 2)

    def ours(qkv):
        q, k, v = rotated_qkv(qkv, heads, kv_heads, cos, sin)
        assert (q.shape[2], k.shape[2], v.shape[2]) == (heads, kv_heads, kv_heads)
        return torch.cat([q, k, v], 2)

    qkv = draw(2, 5, heads + 2 * kv_heads, 8).requires_grad_()
    kept = qkv.detach().clone()
    same_with_gradients(ours, direct, qkv)
    assert torch.equal(qkv.detach(), kept)


def test_learned_positions_turn_nothing():
    tokens = torch.zeros(2, 5, dtype=torch.int64)
    about = context(GPT2, Mesh(), tokens, None, torch.float32, layout="zigzag", keep_kv=False)
    assert about.cos is None and (about.batch, about.length) == (2, 5)
    qkv = draw(2, 5, 10, 8)
    assert torch.equal(torch.cat(rotated_qkv(qkv, 6, 2, about.cos, about.sin), 2), qkv)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_attention_is_a_causal_softmax(kv_heads):
    def direct(q, k, v):
        k, v = (x.repeat_interleave(4 // kv_heads, 2) for x in (k, v))
        scores = torch.einsum("bshe,bthe->bhst", q, k) / 8**0.5
        scores = scores.masked_fill(torch.ones(7, 7, dtype=torch.bool).triu(1), -torch.inf)
        return torch.einsum("bhst,bthe->bshe", scores.softmax(-1), v)

    q, k, v = draw(2, 7, 4, 8), draw(2, 7, kv_heads, 8, seed=4), draw(2, 7, kv_heads, 8, seed=5)
    same_with_gradients(causal_attention, direct, *(x.requires_grad_() for x in (q, k, v)))


def test_activations():
    x = draw(3, 5, 8).requires_grad_()
    same_with_gradients(swiglu, lambda x: F.silu(x[..., :4]) * x[..., 4:], x)
    same_with_gradients(gelu, lambda x: x * 0.5 * (1 + torch.erf(x / 2**0.5)), x)
    same_with_gradients(
        gelu_tanh, lambda x: 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))), x
    )
    assert torch.autograd.gradcheck(swiglu, (x.transpose(0, 1),))
