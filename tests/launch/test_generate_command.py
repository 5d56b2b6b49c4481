"""`megalite generate`: the text that the model's `generate` makes, of whatever mesh's checkpoint; whole characters."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from megalite.checkpoint.saver import Saver
from megalite.config import Config, DataConfig, MeshConfig, ModelConfig, OptimizerConfig, TrainConfig
from megalite.data.tokenizer import END_OF_TEXT, end_of_text, train_bpe
from megalite.launch.cli import main
from megalite.launch.generate_command import texts
from megalite.model.generate import generate
from megalite.model.gpt import GPT
from megalite.parallel.mesh import Mesh
from megalite.testing import run_ranks
from megalite.train.state import held
from megalite.train.step import TrainStep

MODEL = ModelConfig(vocab_size=300, hidden=32, layers=2, heads=4, max_seq_len=24, init_std=0.2)
PROMPT = "the ring of tokens"


@pytest.fixture(autouse=True)
def _as_before():
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    yield
    torch.set_default_dtype(dtype)
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def tokenizer():
    return train_bpe([f"{PROMPT} and the {word} of keys" for word in ("blocks", "ranks", "heads")] * 9, 300)


@pytest.fixture
def place(tmp_path, tokenizer, monkeypatch):
    """A folder with a token folder's tokenizer.json, and in it."""
    (tmp_path / "tokens").mkdir()
    tokenizer.save(str(tmp_path / "tokens" / "tokenizer.json"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def save(run: Path, steps=(3,), model=MODEL, dtype="float32", **mesh):
    """Checkpoints of a run, as the ranks of a mesh keep it; the seed of the weights is the step."""
    axes = {name: size for name, size in mesh.items() if name != "zero"}
    data = DataConfig(paths=("tokens",))
    config = Config(model, MeshConfig(**mesh), data, TrainConfig(dtype=dtype, seq_len=24), OptimizerConfig())

    def on_rank():
        torch.set_default_dtype(getattr(torch, dtype))
        layout = Mesh(**axes)
        for done in steps:
            gpt = GPT(model, layout, seed=done)
            step = TrainStep(gpt, OptimizerConfig(), micro_batch=1, zero=mesh.get("zero", 0))
            saver = Saver(run / "checkpoints", layout.world)
            saver.begin(done, held(step), {"config": dataclasses.asdict(config)})
            saver.commit()

    run_ranks(on_rank, config.mesh.size)


def told(capsys, *arguments):
    """Exit code, standard output and error of `megalite generate ...`."""
    with pytest.raises(SystemExit) as left:
        main(["generate", *map(str, arguments)])
    return left.value.code, *capsys.readouterr()


def expected(tokenizer, step, count, **how):
    ids = tokenizer.encode(PROMPT).ids
    settings = {"stop": end_of_text(tokenizer), **how}
    made = generate(GPT(MODEL, seed=step), torch.tensor([ids]), count, **settings)[0].tolist()
    return tokenizer.decode(made) + "\n"


def test_a_run_of_any_mesh_writes_what_its_model_does(place, tokenizer, capsys):
    save(place / "run", (3, 12), dp=2, tp=2, zero=2)
    greedy = expected(tokenizer, 12, 30, temperature=0)
    code, out, err = told(capsys, "run", "--prompt", PROMPT, "--tokens", 30, "--greedy")
    assert (code, out) == (0, greedy)
    lines = err.splitlines()
    assert re.fullmatch(r"megalite: run/checkpoints/step-00000012: 0\.05 M parameters, float32 on (cpu|cuda)", lines[0])
    assert re.fullmatch(r"megalite: \d+ tokens?: the first after \d+\.\d\d s(, then [\d,]+ tokens/s)?", lines[1])
    assert len(lines) == 2
    older = told(capsys, "run/checkpoints/step-00000003", "--prompt", PROMPT, "--tokens", 9, "--temperature", 0)
    assert older[:2] == (0, expected(tokenizer, 3, 9, temperature=0))
    for arguments, how in (
        ([], {}),
        (["--seed", 5], {"seed": 5}),
        (["--top-k", 3, "--temperature", 2], {"top_k": 3, "temperature": 2.0}),
        (["--top-p", 0.4, "--top-k", 0], {"top_p": 0.4, "top_k": 0}),
    ):
        given = told(capsys, "run", "--prompt", PROMPT, "--tokens", 12, *arguments)
        assert given[:2] == (0, expected(tokenizer, 12, 12, **how))


def test_a_run_in_half_precision_writes_with_its_masters(place, tokenizer, capsys):
    save(place / "run", dtype="bfloat16", dp=1)
    code, out, err = told(capsys, "run", "--prompt", PROMPT, "--tokens", 9, "--greedy")
    assert code == 0 and "float32 on" in err
    torch.set_default_dtype(torch.bfloat16)
    rounded = GPT(MODEL, seed=3).float()
    ids = torch.tensor([tokenizer.encode(PROMPT).ids])
    made = generate(rounded, ids, 9, temperature=0, stop=end_of_text(tokenizer))[0].tolist()
    assert out == tokenizer.decode(made) + "\n"


def test_a_folder_of_hugging_face_writes_what_transformers_does(place, tokenizer, capsys):
    theirs = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.2, bos_token_id=0, eos_token_id=0,
        )
    ).eval()  # fmt: skip
    theirs.save_pretrained("there")
    tokenizer.save("there/tokenizer.json")
    ids = torch.tensor([tokenizer.encode(PROMPT).ids])
    made = theirs.generate(ids, max_new_tokens=20, do_sample=False)[0].tolist()
    code, out, _ = told(capsys, "there", "--prompt", PROMPT, "--tokens", 20, "--greedy")
    assert (code, out) == (0, tokenizer.decode(made) + "\n")


def test_the_end_of_a_text_ends_it(place, tokenizer, capsys):
    """A model whose likeliest word is always the end."""
    save(place / "run", model=dataclasses.replace(MODEL, init_std=0.0), dp=1)
    code, out, err = told(capsys, "run", "--prompt", PROMPT, "--greedy")
    assert (code, out) == (0, f"{PROMPT}\n")
    assert err.splitlines()[1].startswith("megalite: 1 token: the first after ")


def test_nothing_is_a_prompt_too(place, tokenizer, capsys):
    save(place / "run", dp=1)
    code, out, _ = told(capsys, "run", "--tokens", 5, "--greedy")
    made = generate(GPT(MODEL, seed=3), torch.tensor([[end_of_text(tokenizer)]]), 5, temperature=0)[0, 1:].tolist()
    assert (code, out) == (0, tokenizer.decode(made) + "\n")


def test_on_a_terminal_nothing_but_the_text_is_standard_output(place, tokenizer):
    save(place / "run", dp=1)
    command = [sys.executable, "-m", "megalite", "generate", "run", "--prompt", PROMPT, "--tokens", "4", "--greedy"]
    done = subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": str(Path(__file__).parents[2])})
    assert (done.returncode, done.stdout) == (0, expected(tokenizer, 3, 4, temperature=0)), done.stderr


# --- characters -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["plain words", "žluťoučký kůň, 🐎🐎 日本語", "\ufffd itself", ""])
def test_pieces_are_whole_characters(text):
    """A token a byte: of a character's bytes nothing is shown until the last."""
    tokenizer = train_bpe([], 257)
    ids = tokenizer.encode(text).ids
    for known in (0, len(ids) // 3):
        pieces = list(texts(tokenizer, ids[:known], ids[known:]))
        if "\ufffd" not in text and "\ufffd" not in tokenizer.decode(ids[:known]):
            assert tokenizer.decode(ids[:known]) + "".join(pieces) == text
            assert not any("\ufffd" in piece for piece in pieces)
        if not known:
            assert "".join(pieces) == text


def test_bytes_that_are_no_character_come_in_the_end():
    tokenizer = train_bpe([], 257)
    ids = tokenizer.encode("a🐎").ids
    assert "".join(texts(tokenizer, [], ids[:-1])) == "a\ufffd"


# --- mistakes -------------------------------------------------------------------------------------------------------


def refused(result, code, *says):
    lines = result[2].splitlines()
    assert result[:2] == (code, "") and len(lines) == 1 and lines[0].startswith("megalite: error: "), result
    for text in says:
        assert text in lines[0]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--top-p", "1.5"], "--top-p: '1.5' given; a number from 0 to 1 would do"),
        (["--top-k", "few"], "--top-k: 'few' given; a whole number from 0 to"),
        (["--tokens", "0"], "--tokens: '0' given; a whole number from 1 to"),
        (["--temperature", "nan"], "--temperature: 'nan' given"),
        (["--greedy", "--temperature", "1"], "not allowed with argument --greedy"),
        ([], "the following arguments are required: RUN|DIR"),
    ],
)
def test_usage(arguments, says, capsys):
    refused(told(capsys, *(["run"] if arguments else []), *arguments), 64, says)


def test_nothing_to_read(place, tokenizer, capsys):
    refused(told(capsys, "nowhere"), 66, "nowhere")
    refused(told(capsys, "tokens"), 66, "tokens")
    (place / "run" / "checkpoints").mkdir(parents=True)
    refused(told(capsys, "run"), 66, "run/checkpoints")


def test_a_damaged_checkpoint(place, capsys):
    save(place / "run", dp=1)
    file = place / "run" / "checkpoints" / "step-00000003" / "rank-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    refused(told(capsys, "run"), 66, "rank-00000.safetensors", "damaged")


def test_no_tokenizer_or_another(place, tokenizer, capsys):
    save(place / "run", dp=1)
    (place / "tokens" / "tokenizer.json").rename(place / "kept.json")
    refused(told(capsys, "run"), 65, "step-00000003: no tokenizer found for it; --tokenizer tokenizer.json would do")
    refused(told(capsys, "run", "--tokenizer", "none.json"), 65, "none.json: no such file")
    given = told(capsys, "run", "--prompt", PROMPT, "--tokens", 4, "--greedy", "--tokenizer", "kept.json")
    assert given[:2] == (0, expected(tokenizer, 3, 4, temperature=0))
    larger = Tokenizer.from_str(tokenizer.to_str())
    larger.add_tokens(["wordbeyond" + str(i) for i in range(300)])
    larger.save("larger.json")
    given = told(capsys, "run", "--prompt", "wordbeyond299", "--tokenizer", "larger.json")
    refused(given, 65, "larger.json: id ", "ids below model.vocab_size=300")
    assert END_OF_TEXT in larger.get_vocab()
