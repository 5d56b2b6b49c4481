"""Pretrain a GPT from a script: the run of `make train`, with the parts that make it in sight.

    torchrun --nproc-per-node 4 examples/pretrain_gpt.py mesh.tp=2

Settings are those of configs/quickstart.toml; arguments override them. The corpus is made on first use.
"""

import os
import sys
from pathlib import Path

import torch

from megalite.config import resolve
from megalite.config_file import load
from megalite.data import load_tokenizer
from megalite.errors import DataError, MegaliteError
from megalite.launch.prepare import prepare
from megalite.launch.torchrun import join_torchrun, launched
from megalite.model.generate import generate
from megalite.model.presets import PRESETS
from megalite.parallel.layout import own_positions
from megalite.parallel.mesh import Mesh
from megalite.parallel.world import leave, local_device
from megalite.train.loop import open_data
from megalite.train.lr import learning_rate
from megalite.train.step import TrainStep

QUICKSTART = Path(__file__).parents[1] / "configs" / "quickstart.toml"


def main(overrides: list[str]) -> None:
    here = launched()
    config = resolve(load(QUICKSTART, overrides, PRESETS), here.size if here else None)
    if here and here.local_rank == 0:
        prepare(config)  # the others wait for this rank in join_torchrun
    world = join_torchrun(config.run.timeout)

    # Where: a mesh over all ranks. What: a model on it, of which a rank has its part. When: in one step forward and
    # backward in the order of the schedule, gradients summed and clipped, AdamW.
    train, sizes = config.train, config.mesh
    mesh = Mesh(sizes.dp, sizes.pp, sizes.sp, sizes.tp, sizes.ulysses, sizes.shard or None)
    device = local_device(world.local_rank, world.local_size)
    with device:
        torch.set_default_dtype(getattr(torch, train.dtype))
        step = TrainStep.of(config, mesh)
    data = open_data(config)
    own = own_positions(sizes.layout, mesh.ring.size, mesh.ulysses.size, mesh.sp.rank, train.seq_len)
    for index in range(train.steps):
        batch = data.train.batch(index, train.global_batch, mesh.dp.rank, mesh.dp.size, own).to(device)
        lr = learning_rate(index, train.steps, config.optimizer)
        result = step(batch.tokens, batch.targets, lr, documents=batch.documents)
        done = index + 1
        if world.rank == 0 and (done % 10 == 0 or done in (1, train.steps)):
            print(f"step {done}/{train.steps}  loss {result.loss:.3f}  grad_norm {result.grad_norm:.2f}", flush=True)

    # Every rank of pp, sp and tp generates the same tokens; one share of dp is enough, whose weights are then whole.
    with step.gathered():
        if mesh.dp.rank == 0 and data.files[0].tokenizer_path:
            tokenizer = load_tokenizer(data.files[0].tokenizer_path)
            prompt, logits_of = torch.tensor([tokenizer.encode("def ").ids], device=device), step.pipelined.logits
            written = generate(step.model, prompt, train.sample_tokens, seed=train.seed, logits_of=logits_of)
            if world.rank == 0:
                print(tokenizer.decode(written[0].tolist()))
    leave()


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except MegaliteError as error:
        # Every rank finds the same wrong setting: one of them says so, none waits for the others.
        if os.environ.get("LOCAL_RANK", "0") == "0" or isinstance(error, DataError):
            print(f"pretrain_gpt: error: {error}", file=sys.stderr, flush=True)
        os._exit(error.exit_code)
