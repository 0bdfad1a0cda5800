"""Fused kernels on one GPU: each kernel also plays the peers, as it waits for its own results and sends."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest
import torch

from distgemm.gemm import GemmConfig, GemmTensors
from distgemm.gemm.flags import MemOp
from distgemm.gemm.fused.gemms import COUNTERS, PACING_COUNTERS, RESERVED, Addend, FusedGemms, FusedSend
from distgemm.gemm.fused.kernel import bind_fused

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
    """Each test draws the same numbers, whichever test ran before."""
    torch.manual_seed(0)


def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Small integers, mostly 0, so that their sums are exact."""
    values = torch.randint(-1, 2, shape, device="cuda") * (torch.rand(shape, device="cuda") < 0.25)
    return values.to(dtype)


def new_counters() -> torch.Tensor:
    return torch.zeros(COUNTERS, dtype=torch.int32, device="cuda")


def are_reset(counters: torch.Tensor) -> bool:
    """Whether all counters are 0 again, except those of link pacing."""
    return not (counters[:-RESERVED].any() or counters[PACING_COUNTERS - RESERVED :].any())


def launched(launch: Callable[[], None], operand: torch.Tensor, flags: torch.Tensor, *outputs: torch.Tensor) -> None:
    """Launch once, with a new operand, flags that are 0, and outputs full of NaN."""
    operand.copy_(drawn(*operand.shape))
    for tensor in outputs:
        tensor.fill_(float("nan"))
    flags.zero_()
    launch()
    torch.cuda.synchronize()


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(("m", "n", "k"), [(512, 640, 256), (392, 328, 64), (2048, 2048, 512)])
@pytest.mark.parametrize("tile_interleave", [(), (2, 2), (1, 1, 2)], ids=str)
@pytest.mark.parametrize("link_rate", [0.0, 300.0])
def test_partial_sums_are_stored_and_added(
    config: str, m: int, n: int, k: int, tile_interleave: tuple[int, ...], link_rate: float
) -> None:
    """Two results go to other memory, from which two later GEMMs add them in the other order; five times."""
    a, b, d = drawn(4, m, k), drawn(n, k), torch.empty(2, m, n, device="cuda").bfloat16()
    passed = torch.empty_like(d)
    flags, counters = torch.zeros(2, dtype=torch.int32, device="cuda"), new_counters()
    at = [flags.data_ptr() + 4 * number for number in range(2)]
    products = [GemmTensors(a[i], b, passed[i], padded=True) for i in range(2)]
    products += [GemmTensors(a[2 + i], b, d[i], partial=passed[1 - i]) for i in range(2)]
    launch = bind_fused(
        FusedGemms(
            products,
            *("a", [0, 0, at[1], at[0]], [*at, 0, 0], [True, True, False, False], counters),
            tile_interleave=tile_interleave,
            link_rate=link_rate,
        ),
        GemmConfig.parse(config),
    )
    for _ in range(5):
        launched(launch, a, flags, d, passed)
        wanted = [(a[2 + i].double() + a[1 - i].double()) @ b.double().T for i in range(2)]
        assert torch.equal(d.double(), torch.stack(wanted))
        assert flags.tolist() == [1, 1] and are_reset(counters)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(("m", "n", "k"), [(256, 320, 256), (392, 328, 64), (256, 2048, 512)])
@pytest.mark.parametrize("tile_interleave", [(), (2, 1, 1, 1, 1)], ids=str)
def test_gemms_that_differ_in_both_operands(
    config: str, m: int, n: int, k: int, tile_interleave: tuple[int, ...]
) -> None:
    """Each part of B gives its columns of a remote result, which a GEMM with another part of A adds; five times."""
    a, b, d = drawn(2, m, k), drawn(3 * n, k), torch.empty(m, 3 * n, device="cuda").bfloat16()
    passed, bias, c = torch.empty(3, m, n, device="cuda").bfloat16(), drawn(3 * n), drawn(m, 3 * n)
    flags, counters = torch.zeros(3, dtype=torch.int32, device="cuda"), new_counters()
    at = [flags.data_ptr() + 4 * number for number in range(3)]
    of = [slice(part * n, (part + 1) * n) for part in (2, 0, 1)]
    products = [GemmTensors(a[0], b[part], passed[i], padded=True) for i, part in enumerate(of)]
    products += [
        GemmTensors(a[1], b[part], d[:, part], c=c[:, part], bias=bias[part], partial=passed[i], beta=1.0)
        for i, part in enumerate(of)
    ]
    gemms = FusedGemms(
        *(products, "a", [0] * 3 + at, at + [0] * 3, [True] * 3 + [False] * 3, counters),
        tile_interleave=tile_interleave,
    )
    launch = bind_fused(gemms, GemmConfig.parse(config))
    for _ in range(5):
        launched(launch, a, flags, d, passed)
        wanted = a.double().sum(0) @ b.double().T + bias.double() + c.double()
        assert torch.equal(d.double(), wanted)
        assert flags.tolist() == [1] * 3 and are_reset(counters)


SENDING_CONFIGS = ("64x128x64_1x1_pingpong", "128x128x64_2x1_pingpong", "128x256x64_2x1_cooperative")


@pytest.mark.parametrize(
    ("config", "terms", "sends_results"),
    [
        *((config, False, False) for config in CONFIGS),
        (CONFIGS[1], True, False),
        (CONFIGS[3], True, False),
        *((config, config == CONFIGS[1], True) for config in SENDING_CONFIGS),
    ],
)
@pytest.mark.parametrize(("m", "n", "k"), [(512, 640, 256), (392, 328, 64), (8, 8, 64)])
@pytest.mark.parametrize("sums", [2, 3, 7])
def test_a_gemm_adds_several_sums(
    config: str, m: int, n: int, k: int, sums: int, terms: bool, sends_results: bool
) -> None:
    add_several_sums(config, m, n, k, sums, terms, sends_results)


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
    """GEMMs of fp8 have a scale for each operand."""
    add_several_sums(config, 392, 328, 64, 3, True, False, getattr(torch, dtype), getattr(torch, other))


def add_several_sums(
    config: str,
    m: int,
    n: int,
    k: int,
    sums: int,
    terms: bool,
    sends_results: bool,
    dtype: torch.dtype = torch.bfloat16,
    other: torch.dtype = torch.bfloat16,
) -> None:
    """Results go to several other allocations. One GEMM adds ``sums`` of them, C, a bias and a factor; another GEMM
    adds one less. The two may be sent on. Five times."""
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
    # In allocations at uneven distances.
    passed = [torch.empty(m * n + 64 * i, device="cuda").to(other)[: m * n].view(m, n) for i in range(count)]
    slots = torch.empty_like(d)
    flags, counters = torch.zeros(count + 4, dtype=torch.int32, device="cuda"), new_counters()
    at = [flags.data_ptr() + 4 * number for number in range(count + 4)]
    products = [GemmTensors(a[i], b, passed[i], padded=True, **how) for i in range(count)]
    added = [random.Random(7).sample(range(number, count, 2), sums - number) for number in range(2)]
    for number, (first, *_) in enumerate(added):
        with_c = {"c": c[number], "beta": -1.0, "bias": bias} if terms else {}
        products.append(GemmTensors(a[count + number], b, d[number], partial=passed[first], **with_c, **how))
    addends = [[]] * count + [[Addend(passed[i], at[i]) for i in rest] for _, *rest in added]
    wait_flags = [0] * count + [at[first] for first, *_ in added]
    done_flags = [*at[:count], *(at[count : count + 2] if sends_results else (0, 0))]
    sends = [FusedSend(d[i], slots[i], at[count + 2 + i], wait_flag=at[count + i]) for i in range(2 * sends_results)]
    remote = [True] * count + [False] * 2
    gemms = FusedGemms(products, "a", wait_flags, done_flags, remote, counters, sends, addends=addends)
    launch = bind_fused(gemms, GemmConfig.parse(config))
    for _ in range(5):
        launched(launch, a, flags, d, slots, *passed)
        for number in range(2):
            whole = a[[*added[number], count + number]].double().sum(0)
            wanted = factor * (whole @ b.double().T)
            if terms:
                wanted += bias.double() - c[number].double()
            assert torch.equal(d[number].double(), wanted)
        assert flags[:count].tolist() == [1] * count and are_reset(counters)
        assert flags[count:].tolist() == [int(sends_results)] * 4 and (not sends_results or torch.equal(slots, d))


@pytest.mark.parametrize("config", SENDING_CONFIGS)
@pytest.mark.parametrize(("m", "n", "k"), [(512, 640, 256), (392, 328, 64), (2048, 2048, 512), (8, 8, 64)])
@pytest.mark.parametrize("tile_interleave", [(), (1, 2, 1)], ids=str)
@pytest.mark.parametrize("link_rate", [0.0, 300.0])
def test_finished_results_are_sent(
    config: str, m: int, n: int, k: int, tile_interleave: tuple[int, ...], link_rate: float
) -> None:
    """Partial sums are stored and added, results are sent to slots, and from there to their place; five times."""
    a, b, d = drawn(4, m, k), drawn(n, k), torch.empty(2, m, n, device="cuda").bfloat16()
    passed, slots = torch.empty_like(d), torch.empty_like(d)
    arrived = torch.empty(2, m, n + 8, device="cuda").bfloat16()
    flags, counters = torch.zeros(6, dtype=torch.int32, device="cuda"), new_counters()
    at = [flags.data_ptr() + 4 * number for number in range(6)]
    products = [
        GemmTensors(a[0], b, passed[0], padded=True),
        GemmTensors(a[1], b, passed[1], padded=True),
        GemmTensors(a[2], b, d[0], partial=passed[0]),
        GemmTensors(a[3], b, d[1], partial=passed[1]),
    ]
    sends = [FusedSend(d[i], slots[i], at[4 + i], wait_flag=at[2 + i]) for i in range(2)]
    sends += [FusedSend(slots[i], arrived[i, :, :n], 0, wait_flag=at[4 + i], remote=False) for i in range(2)]
    gemms = FusedGemms(
        *(products, "a", [0, 0, *at[:2]], at[:4], [True, True, False, False], counters, sends),
        tile_interleave=tile_interleave,
        link_rate=link_rate,
    )
    launch = bind_fused(gemms, GemmConfig.parse(config))
    for _ in range(5):
        launched(launch, a, flags, d, passed, slots, arrived)
        wanted = torch.stack([(a[i].double() + a[2 + i].double()) @ b.double().T for i in range(2)])
        assert torch.equal(d.double(), wanted) and torch.equal(slots, d) and torch.equal(arrived[..., :n], d)
        assert bool(arrived[..., n:].isnan().all())
        assert flags.tolist() == [1] * 6 and are_reset(counters)


def test_a_send_that_waits_does_not_delay_others() -> None:
    """Sends that are ready leave, and their flags are set, while a send between them waits. There are more pieces than
    thread blocks, but fewer pieces that wait."""
    config, m, n = GemmConfig.parse(SENDING_CONFIGS[0]), 256, 1024
    a, b, d = drawn(2, m, m), drawn(n, m), torch.empty(m, n, device="cuda").bfloat16()
    passed, slots = torch.empty_like(d), torch.empty(2, m, n, device="cuda").bfloat16()
    large = drawn(8 * m, n)
    went = torch.empty_like(large)
    flags, counters = torch.zeros(6, dtype=torch.int32, device="cuda"), new_counters()
    arrived, done, last, first, second, third = (flags.data_ptr() + 4 * number for number in range(6))
    products = [GemmTensors(a[0], b, passed, padded=True), GemmTensors(a[1], b, d, partial=passed)]
    sends = [
        FusedSend(large, went, first),
        FusedSend(d, slots[0], second, wait_flag=last),
        FusedSend(d, slots[1], third, wait_flag=done),
    ]
    launch = bind_fused(
        FusedGemms(products, "a", [0, arrived], [arrived, done], [True, False], counters, sends), config
    )
    seen_flags, side = torch.empty(6, dtype=torch.int32, pin_memory=True), torch.cuda.Stream()
    one = torch.ones(1, dtype=torch.int32, device="cuda")
    for _ in range(3):
        flags.zero_()
        slots.fill_(float("nan"))
        went.fill_(float("nan"))
        torch.cuda.synchronize()
        launch()
        time.sleep(0.02)
        with torch.cuda.stream(side):
            seen_flags.copy_(flags, non_blocking=True)
            side.synchronize()
            assert seen_flags.tolist() == [1, 1, 0, 1, 0, 1]
            flags[2:3].copy_(one)
        torch.cuda.synchronize()
        assert flags.tolist() == [1] * 6 and are_reset(counters)
        assert torch.equal(went, large) and torch.equal(slots[0], d) and torch.equal(slots[1], d)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(
    ("m", "n", "k", "slice_k"),
    [(256, 384, 1536, 512), (392, 328, 1160, 640), (1000, 256, 512, 0), (2048, 1024, 4096, 1024)],
)
@pytest.mark.parametrize("tile_interleave", [(), (1, 2)], ids=str)
def test_shards_are_sent_and_multiplied_in_slices(
    config: str, m: int, n: int, k: int, slice_k: int, tile_interleave: tuple[int, ...]
) -> None:
    """The first GEMM's matrix is there. The kernel sends two others, and waits for them; their GEMMs run one by one, or
    with interleaved tiles. Five times."""
    slices = -(-k // (slice_k or k))
    here, sources, slots = drawn(m, k), drawn(2, m, k + 8)[..., :k], torch.empty(2, m, k, device="cuda").bfloat16()
    b, d = drawn(n, k), torch.empty(3 * m, n, device="cuda").bfloat16()
    flags, counters = torch.zeros(2 * slices, dtype=torch.int32, device="cuda"), new_counters()
    at = [flags.data_ptr() + 4 * slices * number for number in range(2)]
    products = [GemmTensors(x, b, d[i * m : (i + 1) * m]) for i, x in enumerate((here, *slots))]
    sends = [FusedSend(sources[i], slots[i], at[i]) for i in range(2)]
    launch = bind_fused(
        FusedGemms(
            products,
            "a",
            [0, *at],
            [0] * 3,
            [False] * 3,
            counters,
            sends,
            slice_k,
            tile_interleave=tile_interleave,
            link_rate=300.0,
        ),
        GemmConfig.parse(config),
    )
    for _ in range(5):
        launched(launch, sources, flags, d, slots)
        assert torch.equal(slots, sources)
        assert torch.equal(d.double(), torch.cat([here, *sources]).double() @ b.double().T)
        assert bool((flags == 1).all()) and are_reset(counters)


@pytest.mark.parametrize("n", [256, 16384])
def test_slices_leave_in_the_order_in_which_gemms_need_them(n: int) -> None:
    """The test reads the flags while 4 MiB leave in 4 ms. The slices of both sends alternate if both GEMMs fit into one
    wave; else one send follows the other."""
    m, k, slices = 512, 2048, 4
    here, sources, slots = drawn(m, k), drawn(2, m, k), torch.empty(2, m, k, device="cuda").bfloat16()
    b, d = drawn(n, k), torch.empty(3 * m, n, device="cuda").bfloat16()
    flags, counters = torch.zeros(2 * slices, dtype=torch.int32, device="cuda"), new_counters()
    seen_flags, side = torch.empty(2 * slices, dtype=torch.int32, pin_memory=True), torch.cuda.Stream()
    at = [flags.data_ptr() + 4 * slices * number for number in range(2)]
    products = [GemmTensors(x, b, d[i * m : (i + 1) * m]) for i, x in enumerate((here, *slots))]
    sends = [FusedSend(sources[i], slots[i], at[i]) for i in range(2)]
    launch = bind_fused(
        FusedGemms(products, "a", [0, *at], [0] * 3, [False] * 3, counters, sends, k // slices, link_rate=1.0),
        GemmConfig.parse("128x128x64_2x1_pingpong"),
    )
    launched(launch, sources, flags, d, slots)
    flags.zero_()
    torch.cuda.synchronize()
    launch()
    states = []
    with torch.cuda.stream(side):
        while not states or not all(states[-1]):
            seen_flags.copy_(flags, non_blocking=True)
            side.synchronize()
            if seen_flags.tolist() not in states:
                states.append(seen_flags.tolist())
    in_order = [*range(2 * slices)]
    if n == 256:
        in_order = [number * slices + one for one in range(slices) for number in range(2)]
    assert len(states) > slices
    assert all(
        sorted((state[at] for at in in_order), reverse=True) == [state[at] for at in in_order] for state in states
    )
    torch.cuda.synchronize()
    assert torch.equal(d.double(), torch.cat([here, *sources]).double() @ b.double().T) and are_reset(counters)


def test_shards_of_fp8_are_sent() -> None:
    m, n, k, eight = 200, 144, 2048, torch.float8_e4m3fn
    source, slot, b = drawn(m, k, dtype=eight), torch.zeros(m, k, device="cuda").to(eight), drawn(n, k, dtype=eight)
    here, d = drawn(m, k, dtype=eight), torch.empty(2 * m, n, device="cuda").bfloat16()
    flags, counters = torch.zeros(2, dtype=torch.int32, device="cuda"), new_counters()
    products = [GemmTensors(x, b, d[i * m : (i + 1) * m]) for i, x in enumerate((here, slot))]
    sends = [FusedSend(source, slot, flags.data_ptr())]
    bind_fused(FusedGemms(products, "a", [0, flags.data_ptr()], [0, 0], [False, False], counters, sends, 1024))()
    torch.cuda.synchronize()
    assert torch.equal(d.double(), torch.cat([here.double(), source.double()]) @ b.double().T)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("kind", ["gather", "reduce"])
def test_remote_stores_are_paced(config: str, kind: str) -> None:
    """2 MiB at 1 GB/s take two milliseconds, and much less without a limit; three times each."""
    size = 1024
    here, b = drawn(2, size, size), drawn(size, size)
    remote, d = torch.empty(size, size, device="cuda").bfloat16(), torch.empty(2 * size, size, device="cuda").bfloat16()
    flags = torch.zeros(1, dtype=torch.int32, device="cuda")
    arrived = flags.data_ptr()
    for link_rate, least, most in ((1.0, 2.0, 4.0), (0.0, 0.0, 0.5)):
        counters = new_counters()
        if kind == "gather":
            products = [GemmTensors(x, b, d[i * size : (i + 1) * size]) for i, x in enumerate((here[0], remote))]
            sends = [FusedSend(here[1], remote, arrived)]
            gemms = FusedGemms(
                products, "a", [0, arrived], [0, 0], [False, False], counters, sends, link_rate=link_rate
            )
        else:
            products = [GemmTensors(here[0], b, remote, padded=True), GemmTensors(here[1], b, d[:size], partial=remote)]
            gemms = FusedGemms(products, "a", [0, arrived], [arrived, 0], [True, False], counters, link_rate=link_rate)
        launch = bind_fused(gemms, GemmConfig.parse(config))
        launch()
        for _ in range(3):
            flags.zero_()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            begin.record()
            launch()
            end.record()
            torch.cuda.synchronize()
            assert least < begin.elapsed_time(end) < most
            assert are_reset(counters)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("kind", ["gather", "reduce"])
def test_nothing_remote_is_written_before_the_entry(config: str, kind: str) -> None:
    """The kernel multiplies, but sends and stores nothing remote until a flag is set; three times."""
    m, n, k = 1024, 512, 256
    here, b = drawn(2, m, k), drawn(n, k)
    remote = torch.empty((m, k) if kind == "gather" else (m, n), device="cuda").bfloat16()
    d = torch.empty(2 * m, n, device="cuda").bfloat16()
    flags, counters = torch.zeros(6, dtype=torch.int32, device="cuda"), new_counters()
    may_start, started, may_leave, left, last, arrived = (flags.data_ptr() + 4 * number for number in range(6))
    entry = [[MemOp(True, may_start, 1)], [MemOp(False, may_start, 0)], [MemOp(False, started, 7)]]
    exit_ = [[MemOp(True, may_leave, 1)], [MemOp(False, left, 8)], [MemOp(False, last, 9)]]
    if kind == "gather":
        products = [GemmTensors(x, b, d[i * m : (i + 1) * m]) for i, x in enumerate((here[0], remote))]
        gemms = FusedGemms(
            *(products, "a", [0, arrived], [0, 0], [False, False], counters, [FusedSend(here[1], remote, arrived)]),
            entry=entry,
            exit=exit_,
        )
    else:
        products = [GemmTensors(here[0], b, remote, padded=True), GemmTensors(here[1], b, d[:m], partial=remote)]
        gemms = FusedGemms(products, "a", [0, arrived], [arrived, 0], [True, False], counters, entry=entry, exit=exit_)
    launch, side = bind_fused(gemms, GemmConfig.parse(config)), torch.cuda.Stream()
    seen = torch.empty(remote.shape, dtype=remote.dtype, pin_memory=True)
    seen_flags = torch.empty(6, dtype=torch.int32, pin_memory=True)
    one = torch.ones(1, dtype=torch.int32, device="cuda")

    def read_flags() -> list[int]:
        time.sleep(0.02)
        seen.copy_(remote, non_blocking=True)
        seen_flags.copy_(flags, non_blocking=True)
        side.synchronize()
        return seen_flags.tolist()

    for _ in range(3):
        flags.zero_()
        remote.fill_(float("nan"))
        d.fill_(float("nan"))
        torch.cuda.synchronize()
        launch()
        with torch.cuda.stream(side):
            assert read_flags() == [0] * 6 and bool(seen.isnan().all())
            flags[:1].copy_(one)
            assert read_flags() == [0, 7, 0, 0, 0, 1] and not bool(seen.isnan().any())
            flags[2:3].copy_(one)
        torch.cuda.synchronize()
        assert flags.tolist() == [0, 7, 1, 8, 9, 1] and are_reset(counters)
        if kind == "gather":
            assert torch.equal(d.double(), here.double().view(-1, k) @ b.double().T)
        else:
            assert torch.equal(d[:m].double(), here.double().sum(0) @ b.double().T)
