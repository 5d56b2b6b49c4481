"""On a CUDA device: the same numbers as on the CPU. Two ranks share the one GPU over gloo, since NCCL refuses that."""

import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from megalite.config import Config, MeshConfig, ModelConfig, OptimizerConfig, TrainConfig, resolve
from megalite.model.gpt import GPT
from megalite.model.presets import PRESETS
from megalite.parallel.kernels import CudaEfficient, CudaFlash, Reference, kernel_for
from megalite.parallel.layout import LAYOUTS, own_positions
from megalite.parallel.mesh import Mesh
from megalite.parallel.parameters import cut
from megalite.parallel.pipeline.clock import Clock
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 2)])
@pytest.mark.parametrize("size", [64, 80, 20])
@pytest.mark.parametrize("causal", [True, False])
def test_blocks_of_keys_merge_and_give_the_gradients_of_the_reference(dtype, heads, kv_heads, size, causal) -> None:
    """Each half of the keys by the kernel of the device, with out and lse of all keys, against float64."""
    generator = torch.Generator().manual_seed(0)
    counts = (heads, kv_heads, kv_heads, heads)
    q, k, v, grad = (torch.randn(2, 96, n, size, generator=generator).to(dtype).cuda() for n in counts)
    kernel, scale = kernel_for(q), size**-0.5
    expected = {torch.bfloat16: CudaFlash, torch.float16: CudaFlash, torch.float32: CudaEfficient}
    assert isinstance(kernel, expected.get(dtype, Reference))
    truth, truth_lse = Reference().forward(*(x.double() for x in (q, k, v)), causal, scale)
    truths = Reference().backward(*(x.double() for x in (grad, q, k, v)), truth, truth_lse, causal, scale)
    if causal:
        out, lse = kernel.forward(q, k, v, True, scale)
        grads = kernel.backward(grad, q, k, v, out, lse, True, scale)
    else:
        halves = [(k[:, a], v[:, a]) for a in (slice(0, 40), slice(40, 96))]
        parts = [kernel.forward(q, *half, False, scale) for half in halves]
        lse = torch.logaddexp(parts[0][1], parts[1][1])
        out = sum(part * (part_lse - lse).exp().unsqueeze(-1) for part, part_lse in parts).to(dtype)
        of_halves = [kernel.backward(grad, q, *half, out, lse, False, scale) for half in halves]
        dq = of_halves[0][0] + of_halves[1][0]
        grads = dq, *(torch.cat(both, 1) for both in zip(*(x[1:] for x in of_halves), strict=True))
    bound = {torch.bfloat16: 4e-2, torch.float16: 5e-3, torch.float32: 2e-5, torch.float64: 1e-12}[dtype]
    for actual, whole in zip((out, *grads), (truth, *truths), strict=True):
        assert (actual.double() - whole).abs().max() <= bound * whole.abs().max()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ulysses", [1, 2])
def test_two_ranks_that_share_a_sequence_are_the_dense_model(config: ModelConfig, layout: str, ulysses: int) -> None:
    def on_rank() -> tuple[list[float], list[float]]:
        torch.set_default_dtype(torch.float64)
        tokens, targets = batch(4, 24)
        mesh = Mesh(sp=2, ulysses=ulysses)
        own = torch.from_numpy(own_positions(layout, mesh.ring.size, ulysses, mesh.sp.rank, 24))
        with torch.device("cuda"):
            dense, parallel = GPT(config), GPT(config, mesh, layout=layout)
        return losses(dense, tokens, targets), losses(parallel, tokens[:, own], targets[:, own])

    pytest.importorskip("cloudpickle", reason="cloudpickle is not installed, and run_ranks needs it")
    from megalite.testing import run_ranks

    for dense, parallel in run_ranks(on_rank, 2, timeout=300):
        assert parallel == pytest.approx(dense, rel=1e-10)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-1f1b", "zb-v"])
def test_two_ranks_of_a_pipeline_are_the_dense_model(config: ModelConfig, schedule: str) -> None:
    """Over gloo, whose messages between GPUs go by way of the host."""

    def on_rank() -> tuple[list[float], list[float]]:
        torch.set_default_dtype(torch.float64)
        tokens, targets = batch(4, 24)
        model, sizes = replace(config, layers=4), MeshConfig(pp=2, schedule=schedule)
        train = TrainConfig(global_batch=4, micro_batch=1, seq_len=24)
        whole = resolve(Config(model, sizes, train=train, optimizer=OptimizerConfig(lr=1e-3)), 2)
        with torch.device("cuda"):
            dense, step = GPT(model), TrainStep.of(whole, Mesh(pp=2))
        return losses(dense, tokens, targets), [step(tokens.cuda(), targets.cuda()).loss for _ in range(10)]

    pytest.importorskip("cloudpickle", reason="cloudpickle is not installed, and run_ranks needs it")
    from megalite.testing import run_ranks

    for dense, pipelined in run_ranks(on_rank, 2, timeout=300):
        assert pipelined == pytest.approx(dense, rel=1e-10)


def test_marks_of_a_gpu_lie_where_the_host_saw_them() -> None:
    clock, x = Clock(torch.device("cuda")), torch.ones(4096, 4096, device="cuda")
    clock.read([clock.mark()])
    for _ in range(3):
        torch.cuda.synchronize()
        before = time.perf_counter()
        first = clock.mark()
        torch.mm(x, x)
        last = clock.mark()
        torch.cuda.synchronize()
        after = time.perf_counter()
        start, end = clock.read([first, last])
        assert before - 1e-4 < start < end < after + 1e-4


def trained(device: str, optimizer: OptimizerConfig, dtype: torch.dtype) -> tuple[list[float], int, int]:
    """Losses of ten steps; bytes of masters and state on the device, and on the host."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            step = TrainStep(GPT(ModelConfig(**PRESETS["llama-tiny"])), optimizer)
    finally:
        torch.set_default_dtype(before)
    tokens, targets = (x.to(device) for x in batch(4))
    found = [step(tokens, targets).loss for _ in range(10)]
    kept = [p for group in step.optimizer.param_groups for p in group["params"]]
    kept += [x for state in step.optimizer.state.values() for x in state.values() if isinstance(x, torch.Tensor)]
    there = sum(x.nbytes for x in kept if x.is_cuda)
    assert all(x.is_pinned() for x in kept if x.ndim and not x.is_cuda and isinstance(x, torch.nn.Parameter))
    return found, there, sum(x.nbytes for x in kept) - there


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_offloaded_optimizer_steps_as_one_beside_the_weights(dtype: torch.dtype) -> None:
    here, device_bytes, _ = trained("cuda", OptimizerConfig(lr=1e-3), dtype)
    there, left, host_bytes = trained("cuda", OptimizerConfig(lr=1e-3, offload=True), dtype)
    assert not left and host_bytes == pytest.approx(device_bytes, rel=0.01)
    assert there == pytest.approx(here, rel=1e-5 if dtype == torch.float32 else 1e-2)
