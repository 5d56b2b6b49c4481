"""On a CUDA device: the same numbers as on the CPU. Two ranks share the one GPU over gloo, since NCCL refuses that."""

import pytest
import torch
import torch.distributed as dist

from megalite.config import ModelConfig, OptimizerConfig
from megalite.model.gpt import GPT
from megalite.model.presets import PRESETS
from megalite.parallel.mesh import Mesh
from megalite.parallel.parameters import cut
from megalite.train.step import TrainStep

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def batch(rows: int, length: int = 17) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(1001, (rows, length + 1), generator=torch.Generator().manual_seed(0))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def losses(model: GPT, tokens: torch.Tensor, targets: torch.Tensor, steps: int = 10) -> list[float]:
    step = TrainStep(model, OptimizerConfig(lr=1e-3), micro_batch=1)
    device = next(model.parameters()).device
    return [step(tokens.to(device), targets.to(device)).loss for _ in range(steps)]


@pytest.fixture(params=["gpt2-tiny", "llama-tiny"])
def config(request: pytest.FixtureRequest) -> ModelConfig:
    return ModelConfig(**PRESETS[request.param])


def test_gradients_are_those_of_the_cpu(config: ModelConfig) -> None:
    tokens, targets = batch(3)
    there = GPT(config).double()
    here = GPT(config).double().cuda()
    there(tokens, targets).backward()
    here(tokens.cuda(), targets.cuda()).backward()
    for (name, mine), theirs in zip(here.named_parameters(), there.parameters(), strict=True):
        assert (mine.grad.cpu() - theirs.grad).abs().max() <= 1e-9 * max(theirs.grad.abs().max(), 1e-3), name


def test_ten_float32_steps_are_those_of_the_cpu(config: ModelConfig) -> None:
    tokens, targets = batch(4)
    assert losses(GPT(config).cuda(), tokens, targets) == pytest.approx(losses(GPT(config), tokens, targets), rel=1e-5)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("axis", ["dp", "tp"])
def test_two_ranks_on_one_gpu_are_the_dense_model(config: ModelConfig, axis: str, sequence_parallel: bool) -> None:
    def on_rank() -> tuple[list[float], list[float], float]:
        torch.set_default_dtype(torch.float64)
        tokens, targets = batch(4)
        mesh = Mesh(**{axis: dist.get_world_size()})
        share = slice(mesh.dp.rank * 2, mesh.dp.rank * 2 + 2) if axis == "dp" else slice(None)
        with torch.device("cuda"):
            dense, parallel = GPT(config), GPT(config, mesh, sequence_parallel=sequence_parallel)
        expected, actual = losses(dense, tokens, targets), losses(parallel, tokens[share], targets[share])
        table = TrainStep(parallel, OptimizerConfig()).table
        wholes = dict(dense.named_parameters())
        apart = max(
            (weight - cut(wholes[name].detach(), table[name], mesh.tp.rank)).abs().max().item()
            for name, weight in parallel.named_parameters()
        )
        return expected, actual, apart

    pytest.importorskip("cloudpickle", reason="cloudpickle is not installed, and run_ranks needs it")
    from megalite.testing import run_ranks

    for expected, actual, apart in run_ranks(on_rank, 2, timeout=300):
        assert actual == pytest.approx(expected, rel=1e-10)
        assert apart < 1e-8


def test_compiled_is_eager(config: ModelConfig) -> None:
    tokens, targets = (x.cuda() for x in batch(2))
    model = GPT(config).cuda()
    assert torch.compile(model)(tokens, targets).item() == pytest.approx(model(tokens, targets).item(), rel=1e-5)
