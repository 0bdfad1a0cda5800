"""Provider cutlass without a GPU: the GEMMs that it supports, its configurations, and the sources of its kernels."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product as combinations
from typing import Any

import pytest
import torch

from distgemm.gemm import GemmConfig, GemmSpec, MatrixSpec
from distgemm.gemm.cutlass import ELEMENTS, CutlassProvider, kernel_source
from distgemm.gemm.parameters import Terms
from distgemm.gemm.select import key_of
from distgemm.gemm.spec import FP8
from distgemm.gemm.sums import sum_source_of
from distgemm.gemm.tiles import FP8_TILES, MAX_COLUMN_SCALED_SUMS, MAX_FP8_SUMS, TILES, TMA_TILES
from distgemm.plan.problem import DTYPE_BYTES

HOPPER = CutlassProvider("90a")
BYTES = {"float32": 4, "tfloat32": 4, **dict.fromkeys(FP8, 1)}
RESULT = {"tfloat32": "float32", **dict.fromkeys(FP8, "bfloat16"), "float64": "bfloat16"}
MAJORS = ("rr", "rc", "cr", "cc")


def spec(
    dtype: str = "bfloat16", m: int = 256, n: int = 512, k: int = 128, majors: str = "rr", **changes: Any
) -> GemmSpec:
    """A product of dense, aligned matrices."""
    matrices = (
        MatrixSpec(dtype, m, k, row_major=majors[0] == "r"),
        MatrixSpec(dtype, n, k, row_major=majors[1] == "r"),
        MatrixSpec(RESULT.get(dtype, dtype), m, n),
    )
    return replace(GemmSpec(*matrices), **changes)


def config(text: str) -> GemmConfig:
    return GemmConfig.parse(text)


COOPERATIVE = config("128x256x64_1x2_cooperative")
DIRECT = replace(COOPERATIVE, epilogue="direct")
PLAIN = config("128x128x32_1x1_plain")
D = spec().d
ODD_A = replace(spec().a, stride=130, alignment=4)
ODD_D = replace(D, stride=514)
BLOCKS = spec("float8_e4m3fn", scale_a="1x128", scale_b="128x128")

# --- supported GEMMs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ELEMENTS)
@pytest.mark.parametrize("majors", MAJORS)
def test_aligned_gemms_use_tma(dtype: str, majors: str) -> None:
    found = HOPPER.configs(spec(dtype, majors=majors))
    if dtype in FP8 and majors != "rr":
        assert not found
        return
    kernel_schedules = {one.kernel_schedule for one in found}
    if dtype == "float32" or (dtype, majors) == ("tfloat32", "rc"):
        assert kernel_schedules == {"plain"}
        return
    assert kernel_schedules == {"cooperative", "pingpong", "plain"}
    listed = [tile.extents for tile in (FP8_TILES if dtype in FP8 else TILES) for _ in tile.clusters]
    tiles = [tile for tile in listed if dtype != "tfloat32" or tile[1] % 32 == 0]
    assert len(found) == len(tiles) + 1
    assert found[0].kernel_schedule != "plain"
    for one in found:
        wide = 64 if one.kernel_schedule == "plain" else 128
        assert one.tile[2] * DTYPE_BYTES[dtype] == wide
        assert one.epilogue == ("direct" if one.kernel_schedule == "plain" else "tma")
        assert HOPPER.supports(spec(dtype, majors=majors), one)


def test_rows_of_blocks_of_a_change_no_kernel() -> None:
    """They are a number at run time, and those of B are compiled in."""
    tile = config("128x192x128_2x1_cooperative")
    assert kernel_source(BLOCKS, tile, "90a") == kernel_source(replace(BLOCKS, scale_a="128x128"), tile, "90a")
    assert kernel_source(BLOCKS, tile, "90a") != kernel_source(spec("float8_e4m3fn"), tile, "90a")


def test_a_misaligned_gemm_with_scales_of_blocks_has_no_kernel() -> None:
    odd = replace(BLOCKS, a=replace(BLOCKS.a, stride=130))
    assert HOPPER.configs(odd) == [] and "multiples of 16 bytes for them" in HOPPER.supports(odd).reason
    assert HOPPER.configs(replace(BLOCKS, d=replace(D, alignment=2)))[0].epilogue == "direct"


def test_threads_have_room_for_both_sums_of_fp8() -> None:
    """The compiler spills the registers of larger tiles."""
    limits = [(spec("float8_e4m3fn"), MAX_FP8_SUMS), (spec("float8_e5m2"), MAX_FP8_SUMS), (BLOCKS, MAX_FP8_SUMS)]
    for product, limit in (*limits, (replace(BLOCKS, scale_b="1x128"), MAX_COLUMN_SCALED_SUMS)):
        threads = {"cooperative": 256, "pingpong": 128}
        sums = [
            one.tile[0] * one.tile[1] // threads[one.kernel_schedule]
            for one in HOPPER.configs(product)
            if one.kernel_schedule in threads
        ]
        assert max(sums) == limit


def test_the_plain_kernel_of_float32_is_shallower() -> None:
    assert list(map(str, HOPPER.configs(spec("float32")))) == ["128x128x16_1x1_plain"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "tfloat32", *FP8])
@pytest.mark.parametrize("what", ["a", "b"])
def test_misaligned_operands_use_the_plain_kernel(dtype: str, what: str) -> None:
    aligned = spec(dtype)
    for change in ({"alignment": 8}, {"stride": 130 if dtype != "tfloat32" else 129}):
        odd = replace(aligned, **{what: replace(getattr(aligned, what), **change)})
        assert {one.kernel_schedule for one in HOPPER.configs(odd)} == {"plain"}
        assert HOPPER.supports(odd)


def test_one_matrix_for_all_batches_is_read_without_tma() -> None:
    batches = GemmSpec(*(replace(x, batches=3, batch_stride=-1) for x in (spec().a, spec().b, D)))
    assert HOPPER.configs(batches)[0].kernel_schedule != "plain"
    for name in ("a", "b"):
        same = replace(batches, **{name: replace(getattr(batches, name), batch_stride=0)})
        assert {one.kernel_schedule for one in HOPPER.configs(same)} == {"plain"}
    added = replace(batches, partial=replace(batches.d, batch_stride=0))
    assert HOPPER.configs(added)[0].epilogue == "direct"


@pytest.mark.parametrize(
    "change",
    [
        {"d": ODD_D},
        {"d": replace(D, alignment=8)},
        {"c": ODD_D},
        {"partial": ODD_D},
        {"partial": replace(D, dtype="float32", alignment=4), "c": D},
    ],
)
def test_misaligned_results_are_stored_directly(change: dict[str, Any]) -> None:
    found = HOPPER.configs(spec(**change))
    assert len(found) == len(TMA_TILES) + 1
    assert {one.epilogue for one in found} == {"direct"}


def test_rows_of_d_that_end_unevenly() -> None:
    uneven = spec(n=500)
    assert {one.epilogue for one in HOPPER.configs(uneven)} == {"direct"}
    padded = spec(n=500, d=MatrixSpec("bfloat16", 256, 500, stride=512, padded=True))
    assert HOPPER.configs(padded)[0].epilogue == "tma"
    assert HOPPER.configs(replace(padded, d=replace(padded.d, padded=False)))[0].epilogue == "direct"


@pytest.mark.parametrize("arch", ["80", "86", "90", "100a", "120"])
def test_other_architectures_use_the_plain_kernel(arch: str) -> None:
    assert list(map(str, CutlassProvider(arch).configs(spec()))) == [str(PLAIN)]


# --- GEMMs without a kernel -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("product", "reason"),
    [
        (
            spec("float64"),
            "A and B are of bfloat16, float16, float32, tfloat32, float8_e4m3fn, float8_e5m2, not float64",
        ),
        (spec(d=replace(D, dtype="float64")), "D is of bfloat16, float16, float32, not float64"),
        (spec(d=replace(D, dtype="float8_e4m3fn")), "D is of bfloat16, float16, float32, not float8_e4m3fn"),
        (spec(c=replace(D, dtype="float64")), "C is of bfloat16, float16, float32, not float64"),
        (spec(partial=replace(D, dtype="float64")), "the partial sum is of bfloat16, float16, float32, not float64"),
        (spec(bias="float64"), "bias is of bfloat16, float16, float32, not float64"),
        (spec(k=0), "k is 0: there is nothing to multiply"),
        (spec(m=2**31), "extents are below 2**31, got 2147483648x512x128x1"),
        (spec("float8_e4m3fn", majors="cr"), "rows of A and B are contiguous in fp8: neither can be column-major"),
        (spec("float8_e4m3fn", majors="rc"), "rows of A and B are contiguous in fp8: neither can be column-major"),
        (
            GemmSpec(*(replace(x, batches=2, batch_stride=-1) for x in (spec().a, spec().b, D)), scale_a="row"),
            "scales of rows or blocks are for one batch",
        ),
        (
            GemmSpec(spec().a, spec().b, D, scale_a="1x128", scale_b="128x128"),
            "A and B are of float8_e4m3fn or float8_e5m2 if blocks have scales, not bfloat16",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_gemms_that_no_kernel_computes(product: GemmSpec, reason: str) -> None:
    assert HOPPER.configs(product) == []
    assert HOPPER.supports(product).reason == reason
    for one in (COOPERATIVE, PLAIN):
        assert HOPPER.supports(product, one).reason == reason
    with pytest.raises(ValueError, match=re.escape(f"provider cutlass, any configuration: {reason}")):
        HOPPER.compile(product)


@pytest.mark.parametrize(
    ("arch", "product", "one", "reason"),
    [
        ("90a", spec(), config("128x128x64_1x1_plain"), "plain kernels for bfloat16 have tiles of 128x128x32"),
        ("90a", spec("float32"), PLAIN, "plain kernels for float32 have tiles of 128x128x16"),
        ("80", spec("float8_e4m3fn"), config("128x128x64_1x1_plain"), "sm_80 does not multiply fp8"),
        ("86", spec("float8_e4m3fn"), config("128x128x64_1x1_plain"), "sm_86 does not multiply fp8"),
        ("75", spec(), PLAIN, "kernels are for sm_80 and newer, this is sm_75"),
        ("80", spec(), COOPERATIVE, "cooperative kernels are for sm_90a, this is sm_80; plain ones are not"),
        ("90", spec(), config("64x128x64_1x1_pingpong"), "pingpong kernels are for sm_90a, this is sm_90; plain ones"),
        ("90a", spec("float32"), COOPERATIVE, "tensor cores do not multiply IEEE float32: take a plain kernel, or"),
        (
            "90a",
            spec("tfloat32", majors="rc"),
            COOPERATIVE,
            "with TMA, tfloat32 wants rows of B contiguous where those",
        ),
        ("90a", spec(a=ODD_A), COOPERATIVE, "TMA wants addresses and strides of A and B in multiples of 16 bytes"),
        ("90a", spec(a=ODD_A), DIRECT, "TMA wants addresses and strides of A and B in multiples of 16 bytes"),
        ("90a", spec(d=ODD_D), COOPERATIVE, "TMA wants addresses, strides and rows of D, C and the partial sum in"),
        ("90a", spec(), config("64x256x64_1x1_cooperative"), "tiles of cooperative kernels are multiples of 128 by"),
        ("90a", spec(), config("32x256x64_1x1_pingpong"), "tiles of pingpong kernels are multiples of 64 by 8..256"),
        ("90a", spec(), config("128x100x64_1x1_cooperative"), "multiples of 128 by 8..256, got 128x100"),
        ("90a", spec(), config("128x264x64_1x1_cooperative"), "multiples of 128 by 8..256, got 128x264"),
        ("90a", spec("tfloat32"), config("256x144x32_1x2_cooperative"), "tiles of tfloat32 are multiples of 32 wide"),
        (
            "90a",
            GemmSpec(*(replace(x, batches=65536, batch_stride=-1) for x in (spec().a, spec().b, D))),
            PLAIN,
            "plain kernels compute at most 65535 batches of at most 8388480 columns, got 65536 of 512",
        ),
        ("80", spec(n=65535 * 128 + 1), PLAIN, "65535 batches of at most 8388480 columns, got 1 of 8388481"),
        ("90a", BLOCKS, config("128x128x64_1x1_plain"), "only kernels with TMA, for sm_90a, take scales of blocks;"),
        ("80", BLOCKS, config("128x128x128_1x1_cooperative"), "cooperative kernels are for sm_90a, this is sm_80"),
        (
            "90a",
            BLOCKS,
            config("128x128x64_1x1_cooperative"),
            "kernels that take scales of blocks are 128 deep, got 64",
        ),
        ("90a", spec(), config("64x64x64_1x1_pingpong_split_4"), "only per-tile kernels split k among thread blocks"),
        ("90a", spec(), config("128x128x24_1x1_cooperative"), "depths of tiles are multiples of 32 bytes, got 24"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_configurations_that_do_not_fit(arch: str, product: GemmSpec, one: GemmConfig, reason: str) -> None:
    provider = CutlassProvider(arch)
    assert reason in provider.supports(product, one).reason
    with pytest.raises(ValueError, match=re.escape(f"provider cutlass, {one}: ")):
        provider.compile(product, one)


@pytest.mark.parametrize("arch", ["80", "90a"])
def test_the_largest_grid_of_a_plain_kernel(arch: str) -> None:
    """Kernels with TMA compute more batches: their thread blocks take tile after tile."""
    provider = CutlassProvider(arch)

    def batches(count: int) -> GemmSpec:
        return GemmSpec(*(replace(x, batches=count, batch_stride=-1) for x in (spec().a, spec().b, D)))

    assert provider.supports(batches(65535), PLAIN)
    assert provider.supports(spec(n=65535 * 128), PLAIN)
    more = provider.configs(batches(65536))
    assert bool(more) is (arch == "90a") and PLAIN not in more
    assert bool(provider.supports(batches(65536))) is (arch == "90a")


def test_without_tma_there_is_another_kernel() -> None:
    for product in (spec(a=ODD_A), spec(d=ODD_D), spec("float32")):
        plain = replace(PLAIN, tile=(128, 128, 16)) if product.a.dtype == "float32" else PLAIN
        assert HOPPER.supports(product, plain)
    assert HOPPER.supports(spec(d=ODD_D), DIRECT)
    assert HOPPER.supports(spec(), DIRECT)
    assert HOPPER.supports(spec(c=ODD_D, partial=D), COOPERATIVE)
    assert CutlassProvider("89").supports(spec("float8_e4m3fn"), config("128x128x64_1x1_plain"))


@pytest.mark.parametrize("arch", ["sm_90a", "90aa", "", "9", "hopper", "9.0"])
def test_unknown_architectures(arch: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"such as 90a or 80, got {arch!r}")):
        CutlassProvider(arch)


@pytest.mark.parametrize(
    ("arch", "dtype", "reason"),
    [
        ("75", "bfloat16", "kernels are for sm_80 and newer, this is sm_75"),
        ("80", "float8_e4m3fn", "sm_80 does not multiply fp8"),
    ],
)
def test_architectures_that_compute_nothing(arch: str, dtype: str, reason: str) -> None:
    assert CutlassProvider(arch).supports(spec(dtype)).reason == reason


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_architecture_is_required() -> None:
    with pytest.raises(RuntimeError, match=r"there is no CUDA device; .* name one: CutlassProvider\('90a'\)"):
        CutlassProvider().supports(spec())


# --- the sources of kernels -----------------------------------------------------------------------------


def macros(product: GemmSpec, one: GemmConfig = COOPERATIVE, arch: str = "90a") -> dict[str, str]:
    return dict(kernel_source(product, one, arch).macros)


@pytest.mark.parametrize("one", [COOPERATIVE, PLAIN], ids=str)
def test_every_macro_is_read_by_the_kernel(one: GemmConfig) -> None:
    source = kernel_source(spec(), one, "90a")
    text = source.path.read_text()
    read = "".join(source.path.with_name(name).read_text() for name in (source.file, *source.headers))
    assert set(dict(source.macros)) <= set(re.findall(r"\bDG_[A-Z_]+\b", read))
    listed = re.search(r'#error "([^#]*?) (\\\n)?are needed"', text)
    assert listed
    assert set(re.findall(r"DG_\w+", listed.group(1))) == set(dict(source.macros))


@pytest.mark.parametrize("one", [COOPERATIVE, DIRECT, PLAIN], ids=str)
def test_extents_and_strides_share_a_kernel(one: GemmConfig) -> None:
    product = spec(m=8, n=16, k=8)
    strided = {x: replace(getattr(product, x), stride=264) for x in ("a", "b", "d")}
    batches = {x: replace(getattr(product, x), batches=3, batch_stride=512) for x in ("a", "b", "d")}
    sources = [
        kernel_source(other, one, "90a")
        for other in (product, spec(m=4096, n=4096, k=4096), replace(product, **strided), replace(product, **batches))
    ]
    assert len(set(sources)) == 1


def test_orders_of_tiles_and_shares_of_the_gpu_share_a_kernel() -> None:
    ordered = [replace(COOPERATIVE, raster=raster, swizzle=swizzle) for raster in ("m", "n") for swizzle in (1, 8)]
    ordered += [replace(COOPERATIVE, share=2)]
    assert len({kernel_source(spec(), one, "90a") for one in (COOPERATIVE, *ordered)}) == 1


def test_numbers_for_whole_tensors_share_a_kernel() -> None:
    assert macros(spec(scale_a="tensor", scale_b="tensor")) == macros(spec())


def test_terms_that_tma_does_not_load_share_a_kernel() -> None:
    row = {"scale_a": "row", "scale_b": "row"}
    without = [spec(), spec(bias="bfloat16"), spec(**row), spec(bias="bfloat16", **row)]
    assert len({tuple(macros(product).items()) for product in without}) == 1
    sources = [spec(c=D), spec(partial=D), spec(partial=D, c=D), spec(c=D, bias="bfloat16", **row)]
    assert len({tuple(macros(product).items()) for product in sources}) == 1
    f32 = replace(D, dtype="float32")
    assert macros(spec(c=f32)) == macros(spec(partial=f32, c=D))


@pytest.mark.sample(4)
@pytest.mark.parametrize("dtype", ELEMENTS)
@pytest.mark.parametrize("arch", ["90a", "80"])
def test_a_bias_of_the_type_of_d_changes_no_kernel(dtype: str, arch: str) -> None:
    """Nor does it change the selection: kernels are compiled ahead without knowing whether calls have a bias."""
    provider, compared = CutlassProvider(arch), 0
    d = spec(dtype).d
    results = [d, replace(d, dtype="float32"), replace(d, alignment=8)]
    for majors, result, partial, c in combinations(MAJORS, results, (False, True), (False, True)):
        terms = {"d": result, "partial": result if partial else None, "c": result if c else None}
        without = spec(dtype, majors=majors, **terms)
        biased = replace(without, bias=result.dtype)
        assert key_of(without) == key_of(biased)
        for streams in (1, 2):
            configs = provider.configs(without, streams)
            assert provider.configs(biased, streams) == configs
        for one in configs:
            for each in {one, replace(one, epilogue="direct")}:
                assert provider.supports(biased, each) == provider.supports(without, each)
                assert kernel_source(biased, each, arch) == kernel_source(without, each, arch)
                compared += 1
    assert compared or (dtype in FP8 and arch == "80")


def test_other_types_sources_and_tiles_are_other_kernels() -> None:
    f32 = replace(D, dtype="float32")
    products = [
        *(spec(majors=majors) for majors in MAJORS),
        spec("float16"),
        spec("tfloat32"),
        *(spec(a, b=spec(b).b) for a, b in combinations(FP8, FP8)),
        BLOCKS,
        replace(BLOCKS, scale_b="1x128"),
        spec(d=f32),
        spec(c=D),
        spec(c=f32),
        spec(partial=D, c=f32),
        spec(bias="float32"),
    ]
    configs = [
        *(config(f"{m}x{n}x64_{cm}x{cn}_{name}") for (m, n), (cm, cn), name in TMA_TILES),
        config("128x256x32_1x2_cooperative"),
        DIRECT,
    ]
    found = [kernel_source(product, COOPERATIVE, "90a") for product in products]
    found += [kernel_source(spec(), one, "90a") for one in configs if one != COOPERATIVE]
    found += [kernel_source(spec(), PLAIN, "90a"), kernel_source(spec(), PLAIN, "80")]
    assert len({(source.macros, source.arch) for source in found}) == len(found)


def test_one_source_is_c_or_the_partial_sum() -> None:
    assert macros(spec(c=D)) == macros(spec(partial=D))
    both = macros(spec(partial=replace(D, dtype="float32"), c=D))
    assert (both["DG_SOURCE"], both["DG_AUX"]) == ("float", "cutlass::bfloat16_t")
    none = macros(spec())
    assert (none["DG_SOURCE"], none["DG_AUX"], none["DG_BIAS"]) == (
        "void",
        "cutlass::bfloat16_t",
        "cutlass::bfloat16_t",
    )


@pytest.mark.parametrize("one", [DIRECT, PLAIN], ids=str)
def test_a_direct_kernel_serves_all_terms(one: GemmConfig) -> None:
    products = [spec(), spec(c=D), spec(partial=D), spec(partial=D, c=D), spec(bias="bfloat16")]
    assert len({kernel_source(product, one, "90a").macros for product in products}) == 1
    other = spec(partial=replace(D, dtype="float32"))
    assert macros(other, one)["DG_SOURCE"] == "float"


@pytest.mark.parametrize(
    ("change", "majors", "vectors"),
    [
        ({}, "rr", ("8", "8")),
        ({"k": 60}, "rr", ("4", "4")),
        ({"k": 61}, "rr", ("1", "1")),
        ({}, "cr", ("1", "8")),
        ({}, "rc", ("8", "1")),
        ({"a": replace(spec().a, alignment=4)}, "rr", ("2", "8")),
    ],
)
def test_plain_kernels_use_the_widest_loads(change: dict[str, Any], majors: str, vectors: tuple[str, str]) -> None:
    product = spec(majors=majors, **change)
    found = macros(product, PLAIN)
    assert (found["DG_VECTOR_A"], found["DG_VECTOR_B"]) == vectors
    assert "DG_VECTOR_A" not in macros(product)


def test_a_kernel_has_a_readable_name() -> None:
    name = kernel_source(spec("float8_e4m3fn"), config("128x256x128_1x2_cooperative"), "90a").name
    assert name == "128x256x128_1x2_cooperative (float8_e4m3fn, row, row -> bfloat16)"


@pytest.mark.parametrize(
    ("source", "result", "added", "vector"),
    [
        ("bfloat16", "bfloat16", "float", "8"),
        ("float32", "bfloat16", "float", "4"),
        ("float64", "float64", "double", "2"),
        ("float32", "float64", "double", "2"),
        ("float64", "float32", "double", "2"),
    ],
)
def test_sums_with_float64_are_in_float64(
    source: str, result: str, added: str, vector: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CutlassProvider, "arch", "90a")
    matrix, d = MatrixSpec(source, 8, 16), MatrixSpec(result, 8, 16)
    found = dict(sum_source_of([matrix, matrix], d).macros)
    assert (found["DG_SUM"], found["DG_VECTOR"]) == (added, vector)
    with pytest.raises(ValueError, match="sums are of float64, bfloat16, float16, float32, not float8_e4m3fn"):
        sum_source_of([replace(matrix, dtype="float8_e4m3fn")], d)


def test_terms_lie_as_in_c() -> None:
    """In struct Terms, the fields of ``aux`` stand one by one."""
    header = kernel_source(spec(), COOPERATIVE, "90a").path.with_name("terms.cuh").read_text()
    names = re.search(r"struct Terms \{(.*?)\n\n", header, re.S)
    assert names
    declared = re.findall(r"\b(\w+)\s*[,;]", re.sub(r"//.*", "", names.group(1)))
    at = declared.index("aux")
    assert declared.pop(at + 1) == "aux_stride" and declared.pop(at + 1) == "aux_batch_stride"
    assert [field[0] for field in Terms._fields_] == declared
