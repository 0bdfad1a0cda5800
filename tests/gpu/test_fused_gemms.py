"""Kernels for several products on one GPU: what they wait for, pass on and send is their own."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest
import torch

from distgemm.gemm import GemmConfig, GemmTensors
from distgemm.gemm.flags import MemOp
from distgemm.gemm.fused.gemms import COUNTERS, RESERVED, TURNS, Further, FusedGemms, FusedSend, bind_fused

pytestmark = pytest.mark.gpu(1)

CONFIGS = (
    "64x128x64_1x1_pingpong",
    "128x128x64_2x1_pingpong",
    "128x128x64_1x2_pingpong",
    "128x256x64_2x1_cooperative",
    "256x144x64_1x2_cooperative",
)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Each test draws the same, whichever ran before."""
    torch.manual_seed(0)


def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Small integers, so sparse that sums of them are exact."""
    values = torch.randint(-1, 2, shape, device="cuda") * (torch.rand(shape, device="cuda") < 0.25)
    return values.to(dtype)


def counters() -> torch.Tensor:
    return torch.zeros(COUNTERS, dtype=torch.int32, device="cuda")


def spent(counts: torch.Tensor) -> bool:
    """Whether counters are left as they were found, all but when the link is free."""
    return not (counts[:-RESERVED].any() or counts[TURNS - RESERVED :].any())


def launched(launch: Callable[[], None], operand: torch.Tensor, words: torch.Tensor, *empty: torch.Tensor) -> None:
    """Once, on a new operand, with words as before the first launch and nothing in what is to be written."""
    operand.copy_(drawn(*operand.shape))
    for tensor in empty:
        tensor.fill_(float("nan"))
    words.zero_()
    launch()
    torch.cuda.synchronize()


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(("m", "n", "k"), [(512, 640, 256), (392, 328, 64), (2048, 2048, 512)])
@pytest.mark.parametrize("tile_interleave", [(), (2, 2), (1, 1, 2)], ids=str)
@pytest.mark.parametrize("rate", [0.0, 300.0])
def test_sums_are_passed_on(config: str, m: int, n: int, k: int, tile_interleave: tuple[int, ...], rate: float) -> None:
    """Two results go into another memory, from where two later products take them in the other order; five times."""
    a, b, d = drawn(4, m, k), drawn(n, k), torch.empty(2, m, n, device="cuda").bfloat16()
    passed = torch.empty_like(d)
    words, counts = torch.zeros(2, dtype=torch.int32, device="cuda"), counters()
    at = [words.data_ptr() + 4 * number for number in range(2)]
    products = [GemmTensors(a[i], b, passed[i], padded=True) for i in range(2)]
    products += [GemmTensors(a[2 + i], b, d[i], partial=passed[1 - i]) for i in range(2)]
    launch = bind_fused(
        FusedGemms(
            products,
            *("a", [0, 0, at[1], at[0]], [*at, 0, 0], [True, True, False, False], counts),
            tile_interleave=tile_interleave,
            rate=rate,
        ),
        GemmConfig.parse(config),
    )
    for _ in range(5):
        launched(launch, a, words, d, passed)
        wanted = [(a[2 + i].double() + a[1 - i].double()) @ b.double().T for i in range(2)]
        assert torch.equal(d.double(), torch.stack(wanted))
        assert words.tolist() == [1, 1] and spent(counts)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(("m", "n", "k"), [(256, 320, 256), (392, 328, 64), (256, 2048, 512)])
@pytest.mark.parametrize("tile_interleave", [(), (2, 1, 1, 1, 1)], ids=str)
def test_products_of_parts_of_both_operands(
    config: str, m: int, n: int, k: int, tile_interleave: tuple[int, ...]
) -> None:
    """Each part of B makes its columns of a result that goes away, and is added to by another part of A; five times."""
    a, b, d = drawn(2, m, k), drawn(3 * n, k), torch.empty(m, 3 * n, device="cuda").bfloat16()
    passed, bias, c = torch.empty(3, m, n, device="cuda").bfloat16(), drawn(3 * n), drawn(m, 3 * n)
    words, counts = torch.zeros(3, dtype=torch.int32, device="cuda"), counters()
    at = [words.data_ptr() + 4 * number for number in range(3)]
    of = [slice(part * n, (part + 1) * n) for part in (2, 0, 1)]
    products = [GemmTensors(a[0], b[part], passed[i], padded=True) for i, part in enumerate(of)]
    products += [
        GemmTensors(a[1], b[part], d[:, part], c=c[:, part], bias=bias[part], partial=passed[i], beta=1.0)
        for i, part in enumerate(of)
    ]
    gemms = FusedGemms(
        *(products, "a", [0] * 3 + at, at + [0] * 3, [True] * 3 + [False] * 3, counts),
        tile_interleave=tile_interleave,
    )
    launch = bind_fused(gemms, GemmConfig.parse(config))
    for _ in range(5):
        launched(launch, a, words, d, passed)
        wanted = a.double().sum(0) @ b.double().T + bias.double() + c.double()
        assert torch.equal(d.double(), wanted)
        assert words.tolist() == [1] * 3 and spent(counts)


DELIVERING = ("64x128x64_1x1_pingpong", "128x128x64_2x1_pingpong", "128x256x64_2x1_cooperative")


@pytest.mark.parametrize(
    ("config", "terms", "delivers"),
    [
        *((config, False, False) for config in CONFIGS),
        (CONFIGS[1], True, False),
        (CONFIGS[3], True, False),
        *((config, config == CONFIGS[1], True) for config in DELIVERING),
    ],
)
@pytest.mark.parametrize(("m", "n", "k"), [(512, 640, 256), (392, 328, 64), (8, 8, 64)])
@pytest.mark.parametrize("sums", [2, 3, 7])
def test_a_product_adds_several_sums(
    config: str, m: int, n: int, k: int, sums: int, terms: bool, delivers: bool
) -> None:
    add_several_sums(config, m, n, k, sums, terms, delivers)


@pytest.mark.parametrize(
    ("dtype", "other", "config"),
    [
        ("float16", "float16", CONFIGS[1]),
        ("float32", "float32", "128x128x32_2x1_pingpong"),
        ("float8_e4m3fn", "bfloat16", "128x128x128_2x1_pingpong"),
        ("bfloat16", "float32", CONFIGS[1]),
    ],
)
def test_several_sums_of_any_type_are_added(dtype: str, other: str, config: str) -> None:
    """Products of fp8 have a scale for each operand."""
    add_several_sums(config, 392, 328, 64, 3, True, False, getattr(torch, dtype), getattr(torch, other))


def add_several_sums(
    config: str,
    m: int,
    n: int,
    k: int,
    sums: int,
    terms: bool,
    delivers: bool,
    dtype: torch.dtype = torch.bfloat16,
    other: torch.dtype = torch.bfloat16,
) -> None:
    """Results go into other memories, from where one product takes so many of them, besides C, a bias and a factor, and
    another product one less; the two are computed one by one, and may be sent on; five times."""
    count = 2 * sums - 1
    a, b, d = (
        drawn(count + 2, m, k, dtype=dtype),
        drawn(n, k, dtype=dtype),
        torch.empty(2, m, n, device="cuda").to(other),
    )
    c, bias = (drawn(2, m, n, dtype=other), drawn(n, dtype=other)) if terms else (None, None)
    how = {"alpha": 2.0 if terms else 1.0, "dtype": "tfloat32" if dtype == torch.float32 else None}
    if dtype == torch.float8_e4m3fn:
        how |= {"scale_a": torch.tensor(0.5, device="cuda"), "scale_b": torch.tensor(4.0, device="cuda")}
    factor = how["alpha"] * float(how.get("scale_a", 1.0)) * float(how.get("scale_b", 1.0))
    # In memories at uneven distances.
    passed = [torch.empty(m * n + 64 * i, device="cuda").to(other)[: m * n].view(m, n) for i in range(count)]
    slots = torch.empty_like(d)
    words, counts = torch.zeros(count + 4, dtype=torch.int32, device="cuda"), counters()
    at = [words.data_ptr() + 4 * number for number in range(count + 4)]
    products = [GemmTensors(a[i], b, passed[i], padded=True, **how) for i in range(count)]
    added = [random.Random(7).sample(range(number, count, 2), sums - number) for number in range(2)]
    for number, (first, *_) in enumerate(added):
        with_c = {"c": c[number], "beta": -1.0, "bias": bias} if terms else {}
        products.append(GemmTensors(a[count + number], b, d[number], partial=passed[first], **with_c, **how))
    further = [[]] * count + [[Further(passed[i], at[i]) for i in rest] for _, *rest in added]
    waits = [0] * count + [at[first] for first, *_ in added]
    done_flags = [*at[:count], *(at[count : count + 2] if delivers else (0, 0))]
    sends = [FusedSend(d[i], slots[i], at[count + 2 + i], waits=at[count + i]) for i in range(2)] if delivers else []
    away = [True] * count + [False] * 2
    gemms = FusedGemms(products, "a", waits, done_flags, away, counts, sends, further=further)
    launch = bind_fused(gemms, GemmConfig.parse(config))
    for _ in range(5):
        launched(launch, a, words, d, slots, *passed)
        for number in range(2):
            whole = a[[*added[number], count + number]].double().sum(0)
            wanted = factor * (whole @ b.double().T)
            if terms:
                wanted += bias.double() - c[number].double()
            assert torch.equal(d[number].double(), wanted)
        assert words[:count].tolist() == [1] * count and spent(counts)
        assert words[count:].tolist() == [int(delivers)] * 4 and (not delivers or torch.equal(slots, d))


@pytest.mark.parametrize("config", DELIVERING)
@pytest.mark.parametrize(("m", "n", "k"), [(512, 640, 256), (392, 328, 64), (2048, 2048, 512), (8, 8, 64)])
@pytest.mark.parametrize("tile_interleave", [(), (1, 2, 1)], ids=str)
@pytest.mark.parametrize("rate", [0.0, 300.0])
def test_what_is_finished_is_delivered(
    config: str, m: int, n: int, k: int, tile_interleave: tuple[int, ...], rate: float
) -> None:
    """Sums are passed on, finished ones sent into a third memory, and from there to a fourth; five times."""
    a, b, d = drawn(4, m, k), drawn(n, k), torch.empty(2, m, n, device="cuda").bfloat16()
    passed, slots, came = torch.empty_like(d), torch.empty_like(d), torch.empty(2, m, n + 8, device="cuda").bfloat16()
    words, counts = torch.zeros(6, dtype=torch.int32, device="cuda"), counters()
    at = [words.data_ptr() + 4 * number for number in range(6)]
    products = [
        GemmTensors(a[0], b, passed[0], padded=True),
        GemmTensors(a[1], b, passed[1], padded=True),
        GemmTensors(a[2], b, d[0], partial=passed[0]),
        GemmTensors(a[3], b, d[1], partial=passed[1]),
    ]
    sends = [FusedSend(d[i], slots[i], at[4 + i], waits=at[2 + i]) for i in range(2)]
    sends += [FusedSend(slots[i], came[i, :, :n], 0, waits=at[4 + i], away=False) for i in range(2)]
    gemms = FusedGemms(
        *(products, "a", [0, 0, *at[:2]], at[:4], [True, True, False, False], counts, sends),
        tile_interleave=tile_interleave,
        rate=rate,
    )
    launch = bind_fused(gemms, GemmConfig.parse(config))
    for _ in range(5):
        launched(launch, a, words, d, passed, slots, came)
        wanted = torch.stack([(a[i].double() + a[2 + i].double()) @ b.double().T for i in range(2)])
        assert torch.equal(d.double(), wanted) and torch.equal(slots, d) and torch.equal(came[..., :n], d)
        assert bool(came[..., n:].isnan().all())
        assert words.tolist() == [1] * 6 and spent(counts)


def test_what_waits_holds_nothing_else_up() -> None:
    """What is ready is sent and told of while another send waits, behind it and before: there are more pieces than
    thread blocks, but fewer of those that wait."""
    config, m, n = GemmConfig.parse(DELIVERING[0]), 256, 1024
    a, b, d = drawn(2, m, m), drawn(n, m), torch.empty(m, n, device="cuda").bfloat16()
    passed, slots = torch.empty_like(d), torch.empty(2, m, n, device="cuda").bfloat16()
    large = drawn(8 * m, n)
    went = torch.empty_like(large)
    words, counts = torch.zeros(6, dtype=torch.int32, device="cuda"), counters()
    come, done, last, first, second, third = (words.data_ptr() + 4 * number for number in range(6))
    products = [GemmTensors(a[0], b, passed, padded=True), GemmTensors(a[1], b, d, partial=passed)]
    sends = [
        FusedSend(large, went, first),
        FusedSend(d, slots[0], second, waits=last),
        FusedSend(d, slots[1], third, waits=done),
    ]
    launch = bind_fused(FusedGemms(products, "a", [0, come], [come, done], [True, False], counts, sends), config)
    said, side = torch.empty(6, dtype=torch.int32, pin_memory=True), torch.cuda.Stream()
    one = torch.ones(1, dtype=torch.int32, device="cuda")
    for _ in range(3):
        words.zero_()
        slots.fill_(float("nan"))
        went.fill_(float("nan"))
        torch.cuda.synchronize()
        launch()
        time.sleep(0.02)
        with torch.cuda.stream(side):
            said.copy_(words, non_blocking=True)
            side.synchronize()
            assert said.tolist() == [1, 1, 0, 1, 0, 1]
            words[2:3].copy_(one)
        torch.cuda.synchronize()
        assert words.tolist() == [1] * 6 and spent(counts)
        assert torch.equal(went, large) and torch.equal(slots[0], d) and torch.equal(slots[1], d)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(
    ("m", "n", "k", "along"),
    [(256, 384, 1536, 512), (392, 328, 1160, 640), (1000, 256, 512, 0), (2048, 1024, 4096, 1024)],
)
@pytest.mark.parametrize("tile_interleave", [(), (1, 2)], ids=str)
def test_what_is_sent_is_multiplied_slice_by_slice(
    config: str, m: int, n: int, k: int, along: int, tile_interleave: tuple[int, ...]
) -> None:
    """The first product's matrix is there, two others are sent by the kernel that waits for them, and multiplied one by
    one, or in turn; five times."""
    slices = -(-k // (along or k))
    here, sources, slots = drawn(m, k), drawn(2, m, k + 8)[..., :k], torch.empty(2, m, k, device="cuda").bfloat16()
    b, d = drawn(n, k), torch.empty(3 * m, n, device="cuda").bfloat16()
    words, counts = torch.zeros(2 * slices, dtype=torch.int32, device="cuda"), counters()
    at = [words.data_ptr() + 4 * slices * number for number in range(2)]
    products = [GemmTensors(x, b, d[i * m : (i + 1) * m]) for i, x in enumerate((here, *slots))]
    sends = [FusedSend(sources[i], slots[i], at[i]) for i in range(2)]
    launch = bind_fused(
        FusedGemms(
            products,
            "a",
            [0, *at],
            [0] * 3,
            [False] * 3,
            counts,
            sends,
            along,
            tile_interleave=tile_interleave,
            rate=300.0,
        ),
        GemmConfig.parse(config),
    )
    for _ in range(5):
        launched(launch, sources, words, d, slots)
        assert torch.equal(slots, sources)
        assert torch.equal(d.double(), torch.cat([here, *sources]).double() @ b.double().T)
        assert bool((words == 1).all()) and spent(counts)


@pytest.mark.parametrize("n", [256, 16384])
def test_slices_leave_in_the_order_in_which_products_take_them(n: int) -> None:
    """By their words, looked at while 4 MiB leave in 4 ms: in turn where both products fit into one wave; else one
    send after the other."""
    m, k, slices = 512, 2048, 4
    here, sources, slots = drawn(m, k), drawn(2, m, k), torch.empty(2, m, k, device="cuda").bfloat16()
    b, d = drawn(n, k), torch.empty(3 * m, n, device="cuda").bfloat16()
    words, counts = torch.zeros(2 * slices, dtype=torch.int32, device="cuda"), counters()
    said, side = torch.empty(2 * slices, dtype=torch.int32, pin_memory=True), torch.cuda.Stream()
    at = [words.data_ptr() + 4 * slices * number for number in range(2)]
    products = [GemmTensors(x, b, d[i * m : (i + 1) * m]) for i, x in enumerate((here, *slots))]
    sends = [FusedSend(sources[i], slots[i], at[i]) for i in range(2)]
    launch = bind_fused(
        FusedGemms(products, "a", [0, *at], [0] * 3, [False] * 3, counts, sends, k // slices, rate=1.0),
        GemmConfig.parse("128x128x64_2x1_pingpong"),
    )
    launched(launch, sources, words, d, slots)
    words.zero_()
    torch.cuda.synchronize()
    launch()
    states = []
    with torch.cuda.stream(side):
        while not states or not all(states[-1]):
            said.copy_(words, non_blocking=True)
            side.synchronize()
            if said.tolist() not in states:
                states.append(said.tolist())
    in_order = [*range(2 * slices)]
    if n == 256:
        in_order = [number * slices + one for one in range(slices) for number in range(2)]
    assert len(states) > slices
    assert all(
        sorted((state[at] for at in in_order), reverse=True) == [state[at] for at in in_order] for state in states
    )
    torch.cuda.synchronize()
    assert torch.equal(d.double(), torch.cat([here, *sources]).double() @ b.double().T) and spent(counts)


def test_fp8_is_sent_too() -> None:
    m, n, k, eight = 200, 144, 2048, torch.float8_e4m3fn
    source, slot, b = drawn(m, k, dtype=eight), torch.zeros(m, k, device="cuda").to(eight), drawn(n, k, dtype=eight)
    here, d = drawn(m, k, dtype=eight), torch.empty(2 * m, n, device="cuda").bfloat16()
    words, counts = torch.zeros(2, dtype=torch.int32, device="cuda"), counters()
    products = [GemmTensors(x, b, d[i * m : (i + 1) * m]) for i, x in enumerate((here, slot))]
    sends = [FusedSend(source, slot, words.data_ptr())]
    bind_fused(FusedGemms(products, "a", [0, words.data_ptr()], [0, 0], [False, False], counts, sends, 1024))()
    torch.cuda.synchronize()
    assert torch.equal(d.double(), torch.cat([here.double(), source.double()]) @ b.double().T)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("kind", ["operands", "results"])
def test_what_goes_away_takes_its_turn(config: str, kind: str) -> None:
    """2 MiB at 1 GB/s take two milliseconds, and much less as fast as they can; three times each."""
    size = 1024
    here, b = drawn(2, size, size), drawn(size, size)
    away, d = torch.empty(size, size, device="cuda").bfloat16(), torch.empty(2 * size, size, device="cuda").bfloat16()
    words = torch.zeros(1, dtype=torch.int32, device="cuda")
    come = words.data_ptr()
    for rate, least, most in ((1.0, 2.0, 4.0), (0.0, 0.0, 0.5)):
        counts = counters()
        if kind == "operands":
            products = [GemmTensors(x, b, d[i * size : (i + 1) * size]) for i, x in enumerate((here[0], away))]
            sends = [FusedSend(here[1], away, come)]
            gemms = FusedGemms(products, "a", [0, come], [0, 0], [False, False], counts, sends, rate=rate)
        else:
            products = [GemmTensors(here[0], b, away, padded=True), GemmTensors(here[1], b, d[:size], partial=away)]
            gemms = FusedGemms(products, "a", [0, come], [come, 0], [True, False], counts, rate=rate)
        launch = bind_fused(gemms, GemmConfig.parse(config))
        launch()
        for _ in range(3):
            words.zero_()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            begin.record()
            launch()
            end.record()
            torch.cuda.synchronize()
            assert least < begin.elapsed_time(end) < most
            assert spent(counts)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("kind", ["operands", "results"])
def test_nothing_goes_away_before_the_entry(config: str, kind: str) -> None:
    """The kernel multiplies, but what it sends or stores elsewhere stays until a word says that it may; three times."""
    m, n, k = 1024, 512, 256
    here, b = drawn(2, m, k), drawn(n, k)
    away = torch.empty((m, k) if kind == "operands" else (m, n), device="cuda").bfloat16()
    d = torch.empty(2 * m, n, device="cuda").bfloat16()
    words, counts = torch.zeros(6, dtype=torch.int32, device="cuda"), counters()
    may, told, left, ended, last, come = (words.data_ptr() + 4 * number for number in range(6))
    entry = [[MemOp(True, may, 1)], [MemOp(False, may, 0)], [MemOp(False, told, 7)]]
    exit_ = [[MemOp(True, left, 1)], [MemOp(False, ended, 8)], [MemOp(False, last, 9)]]
    if kind == "operands":
        products = [GemmTensors(x, b, d[i * m : (i + 1) * m]) for i, x in enumerate((here[0], away))]
        gemms = FusedGemms(
            *(products, "a", [0, come], [0, 0], [False, False], counts, [FusedSend(here[1], away, come)]),
            entry=entry,
            exit=exit_,
        )
    else:
        products = [GemmTensors(here[0], b, away, padded=True), GemmTensors(here[1], b, d[:m], partial=away)]
        gemms = FusedGemms(products, "a", [0, come], [come, 0], [True, False], counts, entry=entry, exit=exit_)
    launch, side = bind_fused(gemms, GemmConfig.parse(config)), torch.cuda.Stream()
    seen = torch.empty(away.shape, dtype=away.dtype, pin_memory=True)
    said = torch.empty(6, dtype=torch.int32, pin_memory=True)
    one = torch.ones(1, dtype=torch.int32, device="cuda")

    def look() -> list[int]:
        time.sleep(0.02)
        seen.copy_(away, non_blocking=True)
        said.copy_(words, non_blocking=True)
        side.synchronize()
        return said.tolist()

    for _ in range(3):
        words.zero_()
        away.fill_(float("nan"))
        d.fill_(float("nan"))
        torch.cuda.synchronize()
        launch()
        with torch.cuda.stream(side):
            assert look() == [0] * 6 and bool(seen.isnan().all())
            words[:1].copy_(one)
            assert look() == [0, 7, 0, 0, 0, 1] and not bool(seen.isnan().any())
            words[2:3].copy_(one)
        torch.cuda.synchronize()
        assert words.tolist() == [0, 7, 1, 8, 9, 1] and spent(counts)
        if kind == "operands":
            assert torch.equal(d.double(), here.double().view(-1, k) @ b.double().T)
        else:
            assert torch.equal(d[:m].double(), here.double().sum(0) @ b.double().T)
