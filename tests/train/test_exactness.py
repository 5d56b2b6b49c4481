"""The mesh never changes the mathematics: ten steps on dp × pp × sp × tp against the mesh of one, in float64."""

import itertools
import math
import random
from dataclasses import replace

import pytest
from trajectory import OPTIMIZER, STEPS, Case, Way, dense, distance

from megalite.parallel.layout import LAYOUTS, sequence_divisor
from megalite.testing import run_ranks

LOSS, NORM, GRADIENT = 1e-10, 1e-10, 1e-9  # relative
HEADS = {1: 6, 2: 6, 3: 6, 4: 4, 5: 5, 6: 6, 7: 7, 8: 8}  # that tp divides
BATCH = {1: 4, 2: 4, 3: 6, 4: 8, 5: 5, 6: 6, 7: 7, 8: 8}  # that dp divides


def check(case, way):
    expected = dense(case)
    found = run_ranks(lambda: distance(case, way, expected), way.ranks)
    loss, norm = max(d.loss for d in found), max(d.norm for d in found)
    gradient, name = max((d.gradient, d.name) for d in found)
    print(f"exactness: loss {loss:.1e} norm {norm:.1e} gradient {gradient:.1e} ({name})")
    assert loss <= LOSS
    assert norm <= NORM
    assert gradient <= GRADIENT, name
    assert frozenset.union(*(d.names for d in found)) == expected.gradients.keys()  # no layer is dropped


def kv_heads_of(heads, tp):
    """Every number of kv heads that tp ranks can hold."""
    return [k for k in range(1, heads + 1) if heads % k == 0 and (k % tp == 0 or tp % k == 0)]


def cases(dp, tp):
    """Every style and number of kv heads, tokens split over tp or not, with and without accumulation."""
    heads, batch = HEADS[tp], BATCH[dp]
    kv_heads = kv_heads_of(heads, tp)
    ways = [(True, 0)] + [(False, 0)] * (tp > 1) + [(tp % 2 == 0 or tp == 1, 1)] * (batch > dp)
    for style in ("llama", "gpt2", "llama tied"):
        for kv in {"llama": kv_heads, "gpt2": {kv_heads[0], heads}, "llama tied": [kv_heads[0]]}[style]:
            for sequence_parallel, micro_batch in ways:
                yield Case(style, heads, kv, batch), Way(dp, 1, tp, sequence_parallel, micro_batch)


def cases_of_sp(dp, sp, tp):
    """Every ulysses and layout, twice: windows, documents, styles, kv heads, accumulation, … take turns.

    A rank has an odd number of tokens of each sequence, or twice an odd number where zigzag wants two pieces.
    """
    turn = itertools.count(dp + sp + tp)
    for ulysses in (u for u in range(1, sp + 1) if sp % u == 0):
        heads = tp * ulysses * max(1, 6 // (tp * ulysses))
        kv_heads = kv_heads_of(heads, tp)
        for layout in LAYOUTS if ulysses < sp else ["zigzag"]:
            length = 3 * sequence_divisor(layout, sp // ulysses, ulysses)
            for i in itertools.islice(turn, 2):
                style, kv = ("llama", "gpt2", "llama tied")[i % 3], kv_heads[(i + i // 4) % len(kv_heads)]
                window, documents = i % 2 * (length // 3 + 1), i // 2 % 2 == 1
                micro_batch = i % 7 % 2 if BATCH[dp] > dp else 0
                case = Case(style, heads, kv, BATCH[dp], length, window=window, documents=documents)
                yield case, Way(dp, sp, tp, i % 5 != 1, micro_batch, ulysses, layout, keep_kv=i // 3 % 2 == 1)


PIPELINES = [
    *((name, 0) for name in ("gpipe", "1f1b", "zb-h1", "zb-h2", "zb-v", "dualpipe-v")),
    ("interleaved-1f1b", 2),
    ("interleaved-1f1b", 3),
]


def pipelined(way, many, tied, number):
    """A case of `many` microbatches for a way; styles, divisions, windows, … are drawn by the case's number."""
    draw = random.Random(number).choice
    stages = way.pp * (way.chunks or (2 if way.schedule in ("zb-v", "dualpipe-v") else 1))
    ones = [1] * (stages - 2)
    uneven = [1 + (stage + number) % 3 // 2 for stage in range(stages)]
    division = draw([[], uneven, [2, *ones, 0], [0, *ones, 0] if ones else [0, 2]])  # empty: by estimated cost
    heads = way.tp * way.ulysses * max(1, 6 // (way.tp * way.ulysses))
    micro_batch, window = draw([1, 1, 2]), draw([0, 4])
    case = Case(
        style=draw(["llama tied", "gpt2"] if tied else ["llama", "gpt2 untied"]),
        heads=heads,
        kv_heads=draw(kv_heads_of(heads, way.tp)),
        batch=way.dp * many * micro_batch,
        length=3 * sequence_divisor(way.layout, way.sp // way.ulysses, way.ulysses) if way.sp > 1 else draw([10, 11]),
        z_loss=draw([0, 0, 1e-2]),
        window=window,
        documents=draw([False, True]),
        layers=sum(division) or max(1, stages + draw([-1, 0, 1])),
    )
    return case, replace(way, division=tuple(division), micro_batch=micro_batch)


def cases_of_pp():
    """Every schedule with fewer microbatches than ranks, as many, no multiple and more, tied and untied."""
    number = itertools.count()
    for pp, (schedule, chunks) in itertools.product((2, 3, 4), PIPELINES):
        for many, tied in itertools.product((pp - 1, pp, 2 * pp - 1, 2 * pp), (False, True)):
            yield pipelined(Way(pp=pp, schedule=schedule, chunks=chunks), many, tied, next(number))


def cases_of_pp_with_others():
    """Every schedule on every mesh of up to 8 ranks whose pp is 2, 3 or 4 and not all of it."""
    number = itertools.count(1000)
    for dp, pp, sp, tp in itertools.product((1, 2, 3, 4), (2, 3, 4), (1, 2, 3, 4), (1, 2, 3, 4)):
        for schedule, chunks in PIPELINES if pp < dp * pp * sp * tp <= 8 else []:
            i = next(number)
            draw = random.Random(i).choice
            ulysses, layout, kept = draw([1, sp]), draw(LAYOUTS), draw([False, True])
            way = Way(dp, sp, tp, draw([True, True, False]), 0, ulysses, layout, kept, pp, schedule, chunks)
            yield pipelined(way, draw([1, pp, pp + 1, 2 * pp]), draw([False, True]), i)


RECOMPUTE = ("none", "full", "selective")


def cases_of_zero():
    """Every mesh of up to 8 ranks with zero 0 to 3, recomputed in three ways in turn; the rest is drawn."""
    number = itertools.count(3000)
    for dp, pp, sp, tp in itertools.product(range(1, 9), repeat=4):
        for zero in (0, 1, 2, 3) if dp * pp * sp * tp <= 8 else []:
            i = next(number)
            draw = random.Random(i).choice
            schedule, chunks = draw(PIPELINES if pp <= 4 else [("1f1b", 0), ("zb-h1", 0)]) if pp > 1 else ("1f1b", 0)
            ulysses, layout = draw(divisors(sp)), draw(LAYOUTS)
            split, kept, shard = draw([True, True, False]), draw([False, True]), draw([0, 0, *divisors(dp * sp)])
            way = Way(dp, sp, tp, split, 0, ulysses, layout, kept, pp, schedule, chunks)
            recompute = RECOMPUTE[(i // 4 + zero) % 3]
            many = draw([1, pp, pp + 1, 2 * pp] if pp > 1 else [1, 2, 3])
            yield pipelined(replace(way, zero=zero, shard=shard, recompute=recompute), many, draw([False, True]), i)


def divisors(number):
    return [n for n in range(1, number + 1) if number % n == 0]


EVERY_OF_ZERO = [*cases_of_zero()]
EVERY_OF_PP = [*cases_of_pp(), *cases_of_pp_with_others()]
EVERY = [case for dp in range(1, 9) for tp in range(1, 8 // dp + 1) for case in cases(dp, tp)]
MESHES_OF_SP = [m for m in itertools.product((1, 2, 3, 4), (2, 3, 4, 8), (1, 2, 3, 4)) if math.prod(m) <= 8]
EVERY_OF_SP = [case for mesh in MESHES_OF_SP for case in cases_of_sp(*mesh)]


def name_of(case):
    what, way = case
    split = " sequence" * (way.sequence_parallel and way.tp > 1)
    sp = f" sp{way.sp}={way.sp // way.ulysses}x{way.ulysses} {way.layout}{' kept' * way.keep_kv}" if way.sp > 1 else ""
    window, documents = f" window {what.window}" if what.window else "", " documents" * what.documents
    model = f"{what.style} heads {what.heads}/{what.kv_heads} length {what.length}{window}{documents}"
    zero = f" zero {way.zero}{f' shard {way.shard}' if way.shard else ''}" if way.zero else ""
    again = f" recompute {way.recompute}" if way.recompute != "none" else ""
    return f"dp{way.dp}{pipeline_of(case)}{sp} tp{way.tp}{split}{zero}{again} {model} micro {way.micro_batch}"


def pipeline_of(case):
    what, way = case
    if way.pp == 1:
        return ""
    chunks, division = f" chunks {way.chunks}" * (way.chunks > 0), "+".join(map(str, way.division)) or what.layers
    many = what.batch // way.dp // (way.micro_batch or 1)
    return f" pp{way.pp} {way.schedule}{chunks} layers {division} microbatches {many}"


HANDFUL = [
    (Case(), Way(tp=2)),
    (Case("gpt2"), Way(tp=2, micro_batch=1)),
    (Case("gpt2", kv_heads=1), Way(tp=3, sequence_parallel=False)),
    (Case(kv_heads=2, z_loss=1e-2), Way(tp=2, sequence_parallel=False, micro_batch=1)),
    (Case(heads=4, kv_heads=1), Way(tp=4)),
    (Case("gpt2"), Way(dp=2, micro_batch=1)),
    (Case(batch=6), Way(dp=3, tp=2, micro_batch=2)),
    # the sequence cut over sp
    (Case(length=12), Way(sp=2)),
    (Case("gpt2", length=6, documents=True), Way(sp=2, ulysses=2, micro_batch=1)),
    (Case(kv_heads=2, length=9, window=4, z_loss=1e-2), Way(sp=3, layout="striped")),
    (Case("llama tied", heads=4, kv_heads=2, length=12), Way(sp=4, ulysses=2, keep_kv=True)),
    (Case("gpt2", heads=4, kv_heads=1, length=15), Way(sp=3, tp=2, layout="contiguous", micro_batch=1)),
    (Case(length=6, batch=3, window=3), Way(sp=2, tp=2, layout="striped", micro_batch=1)),  # 3 tokens over a tp of 2
    (Case("gpt2", length=12, window=5, documents=True), Way(dp=2, sp=2, tp=2, keep_kv=True)),
    # a pipeline
    (Case(layers=3), Way(pp=2, micro_batch=1)),
    (Case("gpt2", layers=3), Way(pp=3, schedule="gpipe", micro_batch=2)),
    (Case("llama tied", layers=5), Way(pp=2, schedule="interleaved-1f1b", chunks=3, micro_batch=1)),
    (Case("gpt2", layers=4, batch=6), Way(dp=2, pp=2, schedule="zb-v", micro_batch=1)),
    (Case("gpt2", layers=2, length=12, documents=True), Way(pp=2, sp=2, tp=2, schedule="zb-h2", micro_batch=1)),
    (Case("llama tied", layers=4, window=5), Way(pp=2, schedule="dualpipe-v", micro_batch=1, division=(0, 1, 2, 1))),
    # divided among replicas
    (Case(), Way(dp=2, zero=1)),
    (Case("gpt2", batch=6), Way(dp=3, tp=2, micro_batch=1, zero=2, recompute="full")),
    (Case("llama tied", heads=4, kv_heads=1, batch=8), Way(dp=4, tp=2, micro_batch=1, zero=2, shard=2)),
    (Case(length=12), Way(sp=2, tp=2, zero=1, recompute="selective")),
    (Case("gpt2", layers=3), Way(dp=2, pp=2, schedule="zb-h1", micro_batch=1, zero=2)),
    (Case("gpt2", length=12), Way(dp=2, pp=2, sp=2, micro_batch=1, zero=2, shard=2, recompute="full")),
    (Case("llama tied", layers=4, batch=8), Way(dp=4, pp=2, schedule="zb-v", micro_batch=1, zero=3, shard=2)),
]
MORE = [
    (Case(kv_heads=3), Way(tp=3, micro_batch=2)),
    (Case("llama tied", heads=4, kv_heads=2), Way(dp=2, tp=4, micro_batch=1)),
    (Case("gpt2", batch=7), Way(dp=7)),
    (Case("gpt2", batch=6, z_loss=1e-3), Way(dp=2, tp=3, micro_batch=1)),
    (Case(heads=4, kv_heads=2, length=24, documents=True), Way(sp=8, ulysses=2, layout="contiguous")),
    (Case(layers=5, heads=4, kv_heads=2), Way(pp=4, tp=2, schedule="zb-h1", micro_batch=1)),
    (Case("llama tied", layers=4), Way(dp=2, pp=2, schedule="zb-v", micro_batch=1, zero=1, recompute="selective")),
    (Case("gpt2", batch=6), Way(dp=3, tp=2, micro_batch=1, zero=3, recompute="selective")),
]
FULL = [pytest.param(case, marks=pytest.mark.full) for case in MORE]


@pytest.mark.combination
@pytest.mark.parametrize("case", [*HANDFUL, *FULL], ids=name_of)
def test_ten_steps_on_a_mesh_are_those_of_the_mesh_of_one(case):
    check(*case)


@pytest.mark.full
@pytest.mark.combination
@pytest.mark.parametrize("case", EVERY, ids=name_of)
def test_ten_steps_on_every_mesh_are_those_of_the_mesh_of_one(case):
    check(*case)


@pytest.mark.full
@pytest.mark.combination
@pytest.mark.parametrize("case", EVERY_OF_SP, ids=name_of)
def test_ten_steps_with_the_sequence_cut_in_every_way_are_those_of_the_mesh_of_one(case):
    check(*case)


@pytest.mark.full
@pytest.mark.combination
@pytest.mark.parametrize("case", EVERY_OF_PP, ids=name_of)
def test_ten_steps_on_every_pipeline_are_those_of_the_mesh_of_one(case):
    check(*case)


@pytest.mark.full
@pytest.mark.combination
@pytest.mark.parametrize("case", EVERY_OF_ZERO, ids=name_of)
def test_ten_steps_divided_among_replicas_are_those_of_the_mesh_of_one(case):
    check(*case)


@pytest.mark.full
@pytest.mark.parametrize("length", [1, 2, 7, 48])
@pytest.mark.parametrize("style", ["llama", "gpt2"])
def test_any_length_of_sequence(style, length):
    check(Case(style, length=length), Way(dp=2, tp=3, micro_batch=1))


@pytest.mark.full
@pytest.mark.parametrize("pieces", [1, 2, 7, 12])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_length_of_sequence_that_sp_divides(layout, pieces):
    """From a token a piece to the longest sequence that the model takes."""
    length = pieces * sequence_divisor(layout, 2, 1)
    check(Case("gpt2", length=length), Way(sp=2, tp=3, layout=layout, micro_batch=1))


def test_what_is_compared_is_a_run_that_learns():
    """Losses fall, clipping bites, and the mean over rows is not the mean over tokens."""
    for style in ("llama", "gpt2"):
        run = dense(Case(style))
        assert abs(run.losses[0] - math.log(1001)) < 1
        assert run.losses[-1] < run.losses[0] - 1
        assert sum(norm > OPTIMIZER.clip for norm in run.norms) >= STEPS // 2
    counts = (Case().data().targets != -100).sum(1).tolist()
    assert counts[0] == 1 and counts[-1] == 11 and len(set(counts)) == 4


def test_a_difference_is_seen():
    """The measure itself: a z-loss of a billionth is out of bounds."""
    expected = dense(Case())
    for found in run_ranks(lambda: distance(Case(z_loss=1e-9), Way(dp=2), expected), 2):
        assert found.loss > LOSS and found.gradient > GRADIENT


def test_a_window_and_separate_documents_change_what_is_trained():
    """Else that they agree on two meshes would say nothing."""
    for length in {what.length for what, way in HANDFUL if way.sp > 1 and (what.window or what.documents)}:
        losses = [
            tuple(dense(Case(length=length, window=window, documents=documents)).losses)
            for window, documents in itertools.product((0, length // 3 + 1), (False, True))
        ]
        assert len(set(losses)) == 4
