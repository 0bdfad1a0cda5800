"""Per-tile kernels: ranks are streams of one process, on one GPU or on two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from distgemm.gemm.per_tile.bind import MAX_TICKETS, RankGemm
from distgemm.gemm.per_tile.epochs import EPOCHS, TICKET_BITS, buffer_of
from distgemm.gemm.per_tile.kernel import GATHERING, PIECE_BYTES, KernelTraits
from distgemm.gemm.per_tile.local import LocalRanks

pytestmark = pytest.mark.gpu(1)

PATTERNS = ("ag+gemm", "gemm+rs", "gemm+ar", "gemm+a2a", "a2a+gemm")
KINDS = [
    ((128, 128), (1, 1), True),
    ((128, 128), (2, 1), True),
    ((128, 256), (1, 2), False),
    ((128, 128), (2, 1), False),
    ((256, 128), (2, 1), False),
    ((128, 192), (2, 1), False),
    ((128, 128), (1, 2), True),
]
OF_GATHERS = [
    ((128, 160), (2, 1), False),
    ((128, 224), (2, 1), False),
    ((256, 144), (1, 2), False),
    ((256, 160), (1, 2), False),
    ((256, 192), (1, 2), False),
    ((256, 192), (2, 1), False),
]
"""Tiles that no reduction has with sums in bfloat16."""
GATHERS = KINDS + OF_GATHERS
KINDS_OF = {
    "ag+gemm": GATHERS,
    "a2a+gemm": GATHERS,
    "gemm+rs": KINDS,
    "gemm+ar": KINDS,
    "gemm+a2a": [kind for kind in GATHERS if kind[0][1] % 64 == 0],
}
SPLIT = [((64, 64), (1, 1), True, 4), ((64, 64), (1, 2), True, 4), ((64, 64), (2, 2), True, 4)]
"""Kinds of "ag+gemm" whose thread blocks split k, and how many do."""
SPLIT_SUMS = [((64, 64), (1, 1), True, 2), ((64, 64), (1, 2), True, 2), ((64, 64), (2, 1), True, 2)]
"""The same of "gemm+rs" and of one-shot all-reduces."""
CASES = [(pattern, kind) for pattern, kinds in KINDS_OF.items() for kind in kinds]
Calls = list[dict[str, Any]]


def drawn(there: LocalRanks, seed: int) -> Calls:
    """The tensors of all ranks; D is NaN."""
    gemm, traits = there.gemm, there.gemm.traits
    torch.manual_seed(seed)
    found = []
    for device in there.devices:
        a, b = (torch.randn(gemm.matrices[name].shape, device=device, dtype=torch.bfloat16) for name in "ab")
        a = a if traits.a_major == "k" else a.mT.contiguous().mT
        b = b if traits.b_major == "k" else b.mT.contiguous().mT
        d = torch.full(gemm.matrices["d"].shape, float("nan"), device=device, dtype=torch.bfloat16)
        found.append({"a": a, "b": b, "d": d})
    return found


def whole_numbers(there: LocalRanks, seed: int) -> Calls:
    """As ``drawn``, with sums that are exact."""
    calls = drawn(there, seed)
    for call in calls:
        for name in "ab":
            call[name].random_(-1, 2)
    return calls


def check(there: LocalRanks, calls: Calls, exact: bool = False) -> None:
    """Compare each D with products in float64."""
    pattern = there.gemm.traits.pattern
    on_first = [{name: x.cuda(0) if isinstance(x, torch.Tensor) else x for name, x in call.items()} for call in calls]
    if pattern == "ag+gemm":
        whole = torch.cat([call["a"] for call in on_first]).double()
        products = [whole @ call["b"].double().T for call in on_first]
    elif pattern == "gemm+a2a":
        by_rows = [(call["a"].double() @ call["b"].double().T).chunk(len(calls), 1) for call in on_first]
        products = [torch.cat(columns) for columns in zip(*by_rows, strict=True)]
    elif pattern == "a2a+gemm":
        rows = torch.cat([call["a"] for call in on_first], 1).double().chunk(len(calls))
        products = [own @ call["b"].double().T for own, call in zip(rows, on_first, strict=True)]
    else:
        total = torch.stack([call["a"].double() @ call["b"].double().T for call in on_first]).sum(0)
        products = list(total.chunk(len(calls))) if pattern == "gemm+rs" else [total] * len(calls)
    for call, product in zip(on_first, products, strict=True):
        wanted = call.get("alpha", 1.0) * product
        if "bias" in call:
            wanted = wanted + call["bias"].double() + call["beta"] * call["c"].double()
        if exact:
            assert torch.equal(call["d"], wanted.bfloat16())
        torch.testing.assert_close(call["d"].double(), wanted, rtol=0.02, atol=0.02 * wanted.abs().max().item())


def replay_in_turn(there: LocalRanks, prepared: list[Any]) -> None:
    """100 replays of launches in turn, by ranks in random order, of which some are late. No host waits in between."""
    torch.cuda._sleep(1)  # CUDA loads its kernel here: later, it would wait for kernels that wait for each other
    torch.cuda.synchronize()
    for number in range(100):
        for rank in torch.randperm(len(there.streams)).tolist():
            with torch.cuda.stream(there.streams[rank]):
                if number % 7 == rank:
                    torch.cuda._sleep(200_000)
                prepared[number % len(prepared)][rank]()
    torch.cuda.synchronize()


def traits(
    pattern: Any, tile: tuple[int, int], cluster: tuple[int, int], pingpong: bool, split: int = 1, **more: Any
) -> KernelTraits:
    if split > 1:
        more["epilogue_stages"] = 1  # as executables have them
    return KernelTraits(pattern, tile, cluster, pingpong, sends=pattern in GATHERING, split=split, **more)


def distances(ranks: int) -> tuple[int, ...]:
    return tuple(range(1, ranks))


@pytest.mark.parametrize(("pattern", "kind"), CASES, ids=str)
@pytest.mark.parametrize("ranks", [2, 4])
def test_results(pattern: str, kind: tuple, ranks: int) -> None:
    gemm = RankGemm(traits(pattern, *kind), distances(ranks), 384, 512, 320)
    there = LocalRanks(gemm)
    for seed in range(3):
        calls = drawn(there, seed)
        there.run(there.launches(calls))
        check(there, calls)


@pytest.mark.parametrize(("pattern", "kind"), [case for case in CASES if not case[1][2]], ids=str)
def test_one_epilogue_stage(pattern: str, kind: tuple) -> None:
    """Each subtile waits until the one before has been stored."""
    gemm = RankGemm(traits(pattern, *kind, epilogue_stages=1), distances(2), 1160, 1544, 328)
    there = LocalRanks(gemm)
    for seed in range(3):
        calls = drawn(there, seed)
        there.run(there.launches(calls))
        check(there, calls)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("ranks", [3, 5, 8])
def test_odd_shapes(pattern: str, ranks: int) -> None:
    gemm = RankGemm(traits(pattern, *KINDS[1], epilogue_stages=3), distances(ranks), 200, 328, 136)
    there = LocalRanks(gemm)
    for seed in range(3):
        calls = drawn(there, seed)
        there.run(there.launches(calls), [100_000 * (rank * 7 % 5) for rank in range(ranks)])
        check(there, calls)


@pytest.mark.parametrize(("m", "n", "k"), [(200, 328, 648), (1160, 1544, 328), (1, 136, 200)])
@pytest.mark.parametrize(
    ("pattern", "kind"),
    [
        *(("ag+gemm", kind) for kind in SPLIT),
        *((pattern, kind) for pattern in ("gemm+rs", "gemm+ar") for kind in SPLIT_SUMS),
    ],
    ids=str,
)
@pytest.mark.parametrize("b_major", ["k", "n"])
@pytest.mark.parametrize("ranks", [2, 5, 8])
def test_blocks_that_split_k(ranks: int, b_major: str, pattern: str, kind: tuple, m: int, n: int, k: int) -> None:
    """Exact sums with late ranks, of whole tiles and others, one or many of a cluster; and equal bits of any sums."""
    kernel = traits(pattern, *kind, b_major=b_major, one_shot=pattern == "gemm+ar")
    there = LocalRanks(RankGemm(kernel, distances(ranks), m, n, k))
    for seed in range(2):
        calls = whole_numbers(there, seed)
        there.run(there.launches(calls), [100_000 * (rank * 7 % 5) for rank in range(ranks)])
        check(there, calls, exact=True)
    found = []
    for _ in range(2):
        calls = drawn(there, 0)
        there.run(there.launches(calls))
        check(there, calls)
        found.append([call["d"] for call in calls])
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))


def alternate(every: list[RankGemm], epoch: int, draw: Callable[[LocalRanks, int], Calls], exact: bool = False) -> None:
    """Replay kernels in turn on one workspace, then check the results of all."""
    there, several, prepared = LocalRanks(every[0], epoch=epoch, others=every[1:]), [], []
    for seed, gemm in enumerate(every):
        there.gemm = gemm
        several.append(draw(there, seed))
        prepared.append(there.launches(several[-1], gemm))
    torch.cuda.synchronize()
    replay_in_turn(there, prepared)
    for gemm, calls in zip(every, several, strict=True):
        there.gemm = gemm
        check(there, calls, exact=exact)


@pytest.mark.parametrize("epoch", [1, EPOCHS - 50])
@pytest.mark.parametrize(
    ("pattern", "kind", "rows"),
    [*(("ag+gemm", kind, 40) for kind in SPLIT), *(("gemm+rs", kind, 48) for kind in SPLIT_SUMS)],
    ids=str,
)
def test_many_replays_where_blocks_split_k(pattern: str, kind: tuple, rows: int, epoch: int) -> None:
    """They alternate on one workspace with kernels that do not, while ranks run ahead of each other."""
    every = [
        spanning(pattern, kind, 4, rows),
        RankGemm(traits(pattern, *kind), distances(4), 600, 1544, 264),
        RankGemm(traits("gemm+rs", *KINDS[1]), distances(4), 64, 384, 128),
    ]
    alternate(every, epoch, whole_numbers, exact=True)


@pytest.mark.parametrize(("m", "n", "k"), [(384, 512, 320), (200, 328, 136), (1, 136, 64), (72, 8, 1032)])
@pytest.mark.parametrize("kind", [*KINDS, ((64, 128), (1, 2), True), ((64, 128), (2, 1), True)], ids=str)
@pytest.mark.parametrize(
    ("ranks", "b_major", "terms"), [(2, "k", True), (3, "n", False), (3, "k", True), (8, "k", False)]
)
def test_shards_of_columns(ranks: int, b_major: str, terms: bool, kind: tuple, m: int, n: int, k: int) -> None:
    """Of an all-reduce, with late ranks. Every rank gets the same bits."""
    gemm = RankGemm(traits("gemm+ar", *kind, b_major=b_major), distances(ranks), m, n, k, by_columns=True)
    there = LocalRanks(gemm)
    for seed in range(2):
        calls = drawn(there, seed)
        if terms:  # equal on all ranks
            bias, c = (torch.randn(*shape, device="cuda").bfloat16() * 10 for shape in ((n * ranks,), (m, n * ranks)))
            for call in calls:
                device = call["d"].device
                call |= {"bias": bias.to(device), "c": c.to(device), "alpha": 0.5, "beta": -2.0}
        there.run(there.launches(calls), [100_000 * (rank * 7 % 5) for rank in range(ranks)])
        check(there, calls)
        assert all(torch.equal(call["d"].cuda(0), calls[0]["d"].cuda(0)) for call in calls)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize(("a_major", "b_major"), [("k", "n"), ("m", "k"), ("m", "n")])
@pytest.mark.parametrize("kind", [*KINDS[1:4], KINDS[5], *OF_GATHERS[:3], ((64, 128), (1, 2), True)], ids=str)
def test_majors(pattern: str, a_major: str, b_major: str, kind: tuple) -> None:
    if pattern in GATHERING and a_major == "m":
        pytest.skip("a gather sends rows")
    if kind in GATHERS and kind not in KINDS_OF[pattern]:
        pytest.skip("this pattern has no such tile")
    gemm = RankGemm(traits(pattern, *kind, a_major=a_major, b_major=b_major), distances(2), 264, 392, 200)
    there = LocalRanks(gemm)
    calls = drawn(there, 0)
    there.run(there.launches(calls))
    check(there, calls)


@pytest.mark.parametrize(("pattern", "kind"), [case for case in CASES if case[1] not in {KINDS[0], KINDS[3]}], ids=str)
def test_terms(pattern: str, kind: tuple) -> None:
    gemm = RankGemm(traits(pattern, *kind), distances(2), 200, 392, 192)
    there = LocalRanks(gemm)
    calls = drawn(there, 0)
    for number, call in enumerate(calls):
        call["alpha"] = 0.5 + number * (pattern in GATHERING)
        call["bias"] = torch.randn(gemm.n, device="cuda", dtype=torch.bfloat16) * 10
        call["c"], call["beta"] = torch.randn_like(call["d"]) * 10, 0.75
    if pattern == "gemm+ar":  # the owner of a tile adds the terms
        for call in calls:
            call["bias"], call["c"] = calls[0]["bias"], calls[0]["c"]
    there.run(there.launches(calls))
    check(there, calls)


@pytest.mark.parametrize(
    ("pattern", "kind"),
    [*((pattern, kind) for pattern in GATHERING for kind in GATHERS), *(("ag+gemm", kind) for kind in SPLIT)],
    ids=str,
)
def test_all_of_a_is_handed_out(kind: tuple, pattern: str) -> None:
    """Each row of A that is multiplied once, to a tensor whose rows are apart; what lies between them stays."""
    gemm = RankGemm(traits(pattern, *kind), distances(3), 200, 392, 328)
    there, k = LocalRanks(gemm), gemm.matrices["gathered"].shape[1]
    for seed in range(3):
        calls = drawn(there, seed)
        if pattern == "ag+gemm":
            wanted = [torch.cat([call["a"] for call in calls])] * 3
        else:
            wanted = list(torch.cat([call["a"] for call in calls], 1).chunk(3))
        wide = [torch.full((len(x), k + 8), 77.0, device=x.device, dtype=torch.bfloat16) for x in wanted]
        given = [{**call, "gathered": x[:, :k]} for call, x in zip(calls, wide, strict=True)]
        there.run(there.launches(given, gb_per_s=300.0), [100_000 * (rank * 2 % 3) for rank in range(3)])
        check(there, calls)
        for x, rows in zip(wide, wanted, strict=True):
            assert torch.equal(x[:, :k], rows) and (x[:, k:] == 77).all()


@pytest.mark.parametrize("kind", [KINDS[1], KINDS[2]], ids=str)
@pytest.mark.parametrize("lead", [None, 0])
def test_results_in_float32(kind: tuple, lead: int | None) -> None:
    """Of all ranks' rows, with terms that are added where they arrive; own tiles are last, or in between."""
    gemm = RankGemm(
        traits("gemm+a2a", *kind, out_dtype="float32", partial_dtype="float32"), distances(8), 200, 328, 136, lead=lead
    )
    there = LocalRanks(gemm)
    for seed in range(3):
        calls = [{**call, "d": call["d"].float()} for call in drawn(there, seed)]
        for call in calls[seed:]:
            call["bias"], call["c"], call["beta"] = call["d"].new_ones(328), torch.randn_like(call["d"]), 0.75
        there.run(there.launches(calls, gb_per_s=300.0), [100_000 * (rank * 5 % 8) for rank in range(8)])
        check(there, calls)


SPANNING = [
    ((128, 128), (1, 2), False),
    ((128, 128), (2, 1), True),
    ((64, 128), (1, 2), True),
    ((64, 64), (1, 2), True),
    ((128, 256), (2, 1), False),
    ((256, 128), (2, 1), False),
]
"""Kinds of tiles that have the rows of several ranks."""


def spanning(pattern: str, kind: tuple, ranks: int, rows: int, n: int = 328, k: int = 648, **more: Any) -> RankGemm:
    return RankGemm(traits(pattern, *kind, **more), distances(ranks)[::-1], rows * ranks, n, k, spans=True)


SPANNED_ROWS = [("ag+gemm", rows) for rows in (1, 33, 63, 128, 250)] + [("gemm+rs", rows) for rows in (16, 48, 64, 128)]


@pytest.mark.parametrize(
    ("pattern", "rows", "kind"),
    [
        (*case, kind)
        for case in SPANNED_ROWS
        for kind in (*SPANNING, *(SPLIT if case[0] == "ag+gemm" else SPLIT_SUMS))
        if case[1] < kind[0][0] * kind[1][0]
    ],
    ids=str,
)
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_tiles_that_span_shards(pattern: str, rows: int, ranks: int, kind: tuple) -> None:
    """With terms, and late ranks. Tiles end within a shard, and behind the last one."""
    gemm = spanning(pattern, kind, ranks, rows)
    there = LocalRanks(gemm)
    for seed in range(3):
        calls = drawn(there, seed)
        for call in calls if seed else ():
            call["bias"] = torch.randn(gemm.n, device="cuda", dtype=torch.bfloat16) * 10
            call["c"], call["alpha"], call["beta"] = torch.randn_like(call["d"]) * 10, 0.5, 0.75
        there.run(there.launches(calls, gb_per_s=300.0), [100_000 * (rank * 5 % ranks) for rank in range(ranks)])
        check(there, calls)


@pytest.mark.parametrize("kind", SPANNING[:3], ids=str)
@pytest.mark.parametrize(("a_major", "b_major"), [("k", "n"), ("m", "k")])
@pytest.mark.parametrize("pattern", ["ag+gemm", "gemm+rs"])
def test_majors_of_spanned_shards(pattern: str, a_major: str, b_major: str, kind: tuple) -> None:
    if pattern == "ag+gemm" and a_major == "m":
        pytest.skip("a gather sends rows")
    there = LocalRanks(spanning(pattern, kind, 4, 48, 392, 200, a_major=a_major, b_major=b_major))
    calls = drawn(there, 0)
    there.run(there.launches(calls))
    check(there, calls)


@pytest.mark.parametrize(
    ("kind", "rows"),
    [*((kind, rows) for kind in (*SPANNING[:5], *SPLIT) for rows in (20, 63)), (SPANNING[4], 128), (SPLIT[2], 100)],
    ids=str,
)
def test_all_of_spanned_shards_is_handed_out(kind: tuple, rows: int) -> None:
    gemm = spanning("ag+gemm", kind, 3, rows)
    there = LocalRanks(gemm)
    for seed in range(3):
        calls = drawn(there, seed)
        wanted = torch.cat([call["a"] for call in calls])
        wide = [torch.full((len(wanted), gemm.k + 8), 77.0, device="cuda", dtype=torch.bfloat16) for _ in calls]
        given = [{**call, "gathered": x[:, : gemm.k]} for call, x in zip(calls, wide, strict=True)]
        there.run(there.launches(given), [100_000 * (rank * 2 % 3) for rank in range(3)])
        check(there, calls)
        assert all(torch.equal(x[:, : gemm.k], wanted) and (x[:, gemm.k :] == 77).all() for x in wide)


@pytest.mark.parametrize("kind", [*SPANNING[:3], *SPLIT_SUMS], ids=str)
def test_spanned_sums_in_float32(kind: tuple) -> None:
    there = LocalRanks(spanning("gemm+rs", kind, 4, 48, partial_dtype="float32"))
    for seed in range(3):
        calls = drawn(there, seed)
        there.run(there.launches(calls))
        check(there, calls)


@pytest.mark.parametrize("epoch", [1, 2**40, EPOCHS - 50])
def test_many_replays_of_spanned_shards_and_others(epoch: int) -> None:
    """They alternate on one workspace, while ranks run ahead of each other."""
    every = [
        spanning("ag+gemm", SPANNING[0], 4, 40),
        spanning("gemm+rs", SPANNING[0], 4, 32),
        spanning("gemm+rs", SPANNING[2], 4, 48),
        RankGemm(traits("gemm+rs", *KINDS[1]), distances(4), 64, 384, 128),
        RankGemm(traits("ag+gemm", *KINDS[1]), distances(4), 200, 384, 128),
    ]
    alternate(every, epoch, drawn)


@pytest.mark.gpu(2)
@pytest.mark.parametrize(
    ("pattern", "rows", "kind"),
    [
        *((pattern, rows, SPANNING[0]) for pattern, rows in (("ag+gemm", 40), ("gemm+rs", 48))),
        *(("ag+gemm", 40, kind) for kind in SPLIT[1:]),
        *(("gemm+rs", 48, kind) for kind in SPLIT_SUMS),
    ],
    ids=str,
)
def test_spanned_shards_on_two_gpus(pattern: str, rows: int, kind: tuple) -> None:
    there = LocalRanks(spanning(pattern, kind, 2, rows, 512), gpus=2)
    for seed in range(10):
        calls = drawn(there, seed)
        there.run(there.launches(calls, gb_per_s=300.0), [100_000 * (seed % 3), 100_000 * (seed % 2)])
        check(there, calls)


ONE_SHOT = [
    ((64, 64), (1, 2), True),
    ((64, 128), (1, 2), True),
    ((128, 128), (2, 1), True),
    ((128, 256), (1, 2), False),
    ((128, 160), (2, 1), False),
    ((256, 128), (2, 1), False),
    *SPLIT_SUMS,
]


def have_the_same_bits(calls: Calls) -> bool:
    return all(torch.equal(call["d"].cuda(0), calls[0]["d"]) for call in calls)


@pytest.mark.parametrize("kind", ONE_SHOT, ids=str)
@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("m", [1, 40, 200])
def test_one_shot_all_reduces(kind: tuple, ranks: int, m: int) -> None:
    """Of any number of rows; all ranks have the same bits."""
    gemm = RankGemm(traits("gemm+ar", *kind, one_shot=True), distances(ranks), m, 520, 328)
    there = LocalRanks(gemm)
    for seed in range(3):
        calls = drawn(there, seed)
        there.run(there.launches(calls, gb_per_s=300.0), [100_000 * (rank * 5 % ranks) for rank in range(ranks)])
        check(there, calls)
        assert have_the_same_bits(calls)


@pytest.mark.parametrize("kind", [ONE_SHOT[0], *ONE_SHOT[3:5], *SPLIT_SUMS[1:]], ids=str)
@pytest.mark.parametrize("partial_dtype", ["bfloat16", "float32"])
def test_terms_of_one_shot_all_reduces(kind: tuple, partial_dtype: str) -> None:
    gemm = RankGemm(traits("gemm+ar", *kind, one_shot=True, partial_dtype=partial_dtype), distances(4), 40, 392, 192)
    there = LocalRanks(gemm)
    calls = drawn(there, 0)
    bias, c = torch.randn(gemm.n, device="cuda").bfloat16() * 10, torch.randn_like(calls[0]["d"]) * 10
    for call in calls:
        call |= {"alpha": 0.5, "bias": bias, "c": c, "beta": 0.75}
    there.run(there.launches(calls))
    check(there, calls)
    assert have_the_same_bits(calls)


@pytest.mark.parametrize("kind", [ONE_SHOT[0], *SPLIT_SUMS], ids=str)
@pytest.mark.parametrize("epoch", [1, EPOCHS - 50])
def test_many_replays_of_one_shot_and_other_all_reduces(epoch: int, kind: tuple) -> None:
    """They alternate on one workspace, while ranks run ahead of each other."""
    one = RankGemm(traits("gemm+ar", *kind, one_shot=True), distances(4), 40, 384, 128)
    two = RankGemm(traits("gemm+ar", *KINDS[1]), distances(4), 64, 384, 128)
    there = LocalRanks(one, epoch=epoch, others=[two])
    wholes = [drawn(there, seed) for seed in range(2)]
    there.gemm = two
    wholes.append(drawn(there, 2))
    torch.cuda.synchronize()
    replay_in_turn(there, [there.launches(calls, gemm) for calls, gemm in zip(wholes, (one, one, two), strict=True)])
    for calls in wholes:
        check(there, calls)
        assert have_the_same_bits(calls)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("kind", [*ONE_SHOT[:2], *SPLIT_SUMS], ids=str)
def test_one_shot_all_reduces_on_two_gpus(kind: tuple) -> None:
    gemm = RankGemm(traits("gemm+ar", *kind, one_shot=True), distances(2), 40, 512, 320)
    there = LocalRanks(gemm, gpus=2)
    for seed in range(10):
        calls = drawn(there, seed)
        there.run(there.launches(calls), [100_000 * (seed % 3), 100_000 * (seed % 2)])
        check(there, calls)
        assert have_the_same_bits(calls)


@pytest.mark.parametrize("pattern", ["ag+gemm", "a2a+gemm"])
@pytest.mark.parametrize("order", [(1, 2, 3), (2, 3, 1)], ids=str)
def test_pieces_of_several_slices(pattern: str, order: tuple[int, ...]) -> None:
    """The last piece of a column has fewer rows, and the last slice fewer bytes."""
    gemm = RankGemm(traits(pattern, *KINDS[1]), order, 200, 328, 648)
    there = LocalRanks(gemm)
    for seed in range(3):
        calls = drawn(there, seed)
        there.run(there.launches(calls, gb_per_s=300.0))
        check(there, calls)


@pytest.mark.parametrize("pattern", ["gemm+rs", "gemm+ar"])
@pytest.mark.parametrize("kind", [KINDS[1], KINDS[2], KINDS[5], *OF_GATHERS[:2]], ids=str)
@pytest.mark.parametrize("lead", [None, 0])
def test_sums_in_float32(pattern: str, kind: tuple, lead: int | None) -> None:
    gemm = RankGemm(traits(pattern, *kind, partial_dtype="float32"), distances(8), 200, 328, 136, lead=lead)
    there = LocalRanks(gemm)
    for seed in range(3):
        calls = drawn(there, seed)
        there.run(there.launches(calls, gb_per_s=300.0), [100_000 * (rank * 5 % 8) for rank in range(8)])
        check(there, calls)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("epoch", [1, 2**32 - 3, 2**40, EPOCHS - 50])
def test_many_replays(pattern: str, epoch: int) -> None:
    """Ranks run ahead of each other; inputs change between replays; no host waits."""
    gemm = RankGemm(traits(pattern, *KINDS[1]), distances(4), 256, 384, 128)
    there = LocalRanks(gemm, epoch=epoch)
    several = [drawn(there, seed) for seed in range(3)]
    torch.cuda.synchronize()
    replay_in_turn(there, [there.launches(calls) for calls in several])
    for calls in several:
        check(there, calls)


def slices_of(shard: torch.Tensor) -> torch.Tensor:
    """A shard of A as it lies in slots: slice by slice, with zeros behind the last column."""
    wide = PIECE_BYTES // shard.element_size()
    padded = torch.nn.functional.pad(shard, (0, -shard.shape[1] % wide))
    return padded.unflatten(1, (-1, wide)).transpose(0, 1).flatten()


@pytest.mark.parametrize(("pattern", "kind"), [*CASES, *(("gemm+rs", kind) for kind in SPLIT_SUMS)], ids=str)
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_alone(pattern: str, kind: tuple, ranks: int) -> None:
    """All flags of rank 0 are set before, so its kernel waits for none: a tool may run one kernel at a time.

    Its slots have what peers would send: their shards of A, or ones.
    """
    gemm = RankGemm(traits(pattern, *kind), distances(ranks), 200, 328, 136)
    for epoch in (7, 8):  # one for each buffer
        there = LocalRanks(gemm, epoch=epoch)
        space, memory, buffer = there.spaces[0], there.memory, buffer_of(epoch)
        memory[0][space.flags_at : space.slots_at].view(torch.int64).fill_(epoch)
        call, *peers = drawn(there, 0)
        one, size = torch.ones((), device="cuda", dtype=torch.bfloat16), gemm.slot_bytes
        first = space.slots_at + buffer * space.slots_of_buffer
        m, sends = gemm.m, gemm.traits.sends
        sent = torch.cat([slices_of(peer["a"][:m]) for peer in peers]) if sends else one  # rank 0's rows, or all
        memory[0][first : first + size].view(torch.bfloat16).copy_(sent)
        a, b = call["a"].double(), call["b"].double()
        if pattern == "ag+gemm":
            wanted = torch.cat([a, *(peer["a"].double() for peer in peers)]) @ b.T
        elif pattern == "a2a+gemm":
            wanted = torch.cat([a[:m], *(peer["a"][:m].double() for peer in peers)], 1) @ b.T
        elif pattern == "gemm+a2a":
            wanted = torch.cat([a @ b[: gemm.n].T, torch.ones_like(call["d"][m:], dtype=torch.float64)])
        else:
            wanted = a[:m] @ b.T + (ranks - 1)
            if pattern == "gemm+ar":
                wanted = torch.cat([wanted, torch.ones_like(wanted).repeat(ranks - 1, 1)])
        torch.cuda.synchronize()
        there.launches([call, *peers])[0]()
        torch.cuda.synchronize()
        torch.testing.assert_close(call["d"].double(), wanted, rtol=0.02, atol=0.02 * wanted.abs().max().item())
        for rank in range(1, ranks):  # which is so far behind rank 0
            begin, distance = space.flags_at + buffer * space.flags * 8, ranks - rank
            flags = memory[rank][begin : begin + space.flags * 8].view(torch.int64)
            assert (flags == epoch).sum() == gemm.flags // (ranks - 1)
            assert (flags.unique() - epoch).count_nonzero() <= 1
            if sends:
                wanted = slices_of(call["a"] if pattern == "ag+gemm" else call["a"][rank * m : (rank + 1) * m])
                begin = space.slots_at + buffer * space.slots_of_buffer + (distance - 1) * wanted.nbytes
                assert torch.equal(memory[rank][begin : begin + wanted.nbytes].view(torch.bfloat16), wanted)


@pytest.mark.parametrize("kind", [ONE_SHOT[0], *SPLIT_SUMS], ids=str)
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_alone_with_packets(kind: tuple, ranks: int) -> None:
    """The packets of all peers have come before, and hold ones. Quarters that are left over hold the epoch."""
    gemm = RankGemm(traits("gemm+ar", *kind, one_shot=True), distances(ranks), 72, 328, 136)
    across = gemm.order.columns * kind[1][1]  # tiles
    of_thread = gemm.row_packet_bytes // 64  # packets: a thread has 32 bytes of a row
    for epoch in (7, 8):  # one for each buffer
        there = LocalRanks(gemm, epoch=epoch)
        space, begin = there.spaces[0], there.spaces[0].packets_at + buffer_of(epoch) * gemm.packet_bytes
        packets = [x[begin : begin + space.packet_bytes].view(torch.int32).view(-1, 4) for x in there.memory]
        ones = torch.ones(6, device="cuda", dtype=torch.bfloat16).view(torch.int32)
        packets[0][:] = torch.cat([ones, torch.full_like(ones[:1], epoch)])
        packets[0].view(-1, of_thread, 32, 4)[:, -1, :, 8 % 3 :] = epoch
        call, *peers = drawn(there, 0)
        wanted = call["a"].double() @ call["b"].double().T + (ranks - 1)
        torch.cuda.synchronize()
        there.launches([call, *peers])[0]()
        torch.cuda.synchronize()
        torch.testing.assert_close(call["d"].double(), wanted, rtol=0.02, atol=0.02 * wanted.abs().max().item())
        for found in packets[1:]:
            assert (found[:, 3] == epoch).sum() == 72 * across * gemm.row_packet_bytes // 16


def test_almost_as_many_tiles_as_tickets() -> None:
    """The clock's tickets do not reach the bits above them. Each D has 4.3 GB."""
    gemm = RankGemm(traits("ag+gemm", (64, 128), (1, 1), True), distances(2), 340 * 64, 384 * 128, 64)
    assert gemm.order.clusters == MAX_TICKETS - 1024
    there = LocalRanks(gemm)
    chance = torch.Generator("cuda").manual_seed(0)
    a, b = (torch.randint(-1, 2, (x, 64), device="cuda", generator=chance).bfloat16() for x in (2 * gemm.m, gemm.n))
    d = [torch.empty(2 * gemm.m, gemm.n, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    launches = there.launches([{"a": x, "b": b, "d": y} for x, y in zip(a.chunk(2), d, strict=True)])
    for _ in range(3):
        for one in d:
            one.fill_(float("nan"))
        there.run(launches)
    wanted = a @ b.T
    assert all(torch.equal(one, wanted) for one in d)
    assert [control.clock >> TICKET_BITS for control in there.controls()] == [4, 4]


@pytest.mark.gpu(2)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_two_gpus(pattern: str) -> None:
    gemm = RankGemm(traits(pattern, *KINDS[1]), distances(2), 384, 512, 320)
    there = LocalRanks(gemm, gpus=2)
    for seed in range(10):
        calls = drawn(there, seed)
        there.run(there.launches(calls), [100_000 * (seed % 3), 100_000 * (seed % 2)])
        check(there, calls)
