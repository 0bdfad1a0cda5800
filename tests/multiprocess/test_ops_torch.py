"""The torch functions over gloo, against the whole product."""

from __future__ import annotations

import pytest

from distgemm.runtime.launch import launch
from tests.forked import results
from tests.multiprocess import gather_worker
from tests.multiprocess import ops_torch_worker as worker

GATHER, PAIRWISE = "all_gather_1d_tiling_cd_rotating_a", "reduce_scatter_1d_pairwise_a"


@pytest.mark.sample(1)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_results_and_gradients_are_those_of_the_whole_product(ranks: int) -> None:
    assert launch(worker.equal_to_the_whole, ranks, worker.cases(ranks), timeout=90) == [[]] * ranks


@pytest.mark.sample(1)
@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_the_gathered_input_is_returned(ranks: int) -> None:
    assert results(ranks, worker.gathered) == [[]] * ranks


@pytest.mark.sample(1)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_gather_hands_out_chunks(ranks: int) -> None:
    assert results(ranks, gather_worker.chunks) == [[]] * ranks


@pytest.mark.sample(1)
@pytest.mark.parametrize("ranks", [2, 3])
def test_chunks_travel_while_the_caller_is_busy(ranks: int) -> None:
    assert results(ranks, gather_worker.travels_meanwhile) == [[]] * ranks


@pytest.mark.parametrize("ranks", [2])
def test_chunks_are_of_their_block(ranks: int) -> None:
    assert results(ranks, gather_worker.behind_the_block) == [[]] * ranks


@pytest.mark.parametrize("ranks", [2])
def test_without_tokens_results_are_empty_and_gradients_zero(ranks: int) -> None:
    assert results(ranks, gather_worker.without_tokens) == [[]] * ranks


@pytest.mark.parametrize("ranks", [2, 3])
def test_one_rank_without_tokens_is_an_error_on_all_ranks(ranks: int) -> None:
    assert results(ranks, gather_worker.one_without_tokens) == [[]] * ranks


def test_a_frozen_weight_keeps_no_input() -> None:
    assert results(2, worker.kept_for_gradients) == [[], []]


@pytest.mark.parametrize("ranks", [2])
def test_torch_counts_flops(ranks: int) -> None:
    assert results(ranks, gather_worker.flops) == [[]] * ranks


@pytest.mark.sample(1)
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_block_of_a_gather_ends_on_all_ranks(ranks: int) -> None:
    assert results(ranks, gather_worker.ends) == [[]] * ranks


@pytest.mark.sample(1)
@pytest.mark.parametrize("ranks", [2, 3])
def test_gradcheck(ranks: int) -> None:
    assert results(ranks, worker.gradients) == [[]] * ranks


def test_second_derivatives_are_right_or_raise() -> None:
    assert results(1, worker.twice) == [[]]


def test_second_derivatives_behind_all_reduces_are_right_or_raise() -> None:
    assert results(2, worker.twice_behind_all_reduces) == [[], []]


def test_forward_mode_derivatives_are_refused() -> None:
    for found in results(2, worker.forward_mode):
        assert found.pop("without a tangent") == "24.0"
        for name, message in found.items():
            assert "no forward-mode derivatives" in message, name


def test_batched_gradients_and_traces_are_right() -> None:
    assert results(2, worker.batched_and_traced) == [[], []]


def test_sizes_may_be_those_of_numpy() -> None:
    found = results(2, worker.numbers_of_numpy)
    assert found == [[(4, 2), (4, columns), (4, 4), (2, 5), (2, 2)] for columns in (1, 3)]


def test_torch_compile_needs_no_graph_break() -> None:
    assert results(2, worker.compiled) == [[], []]


def test_opcheck() -> None:
    assert results(2, worker.checked_by_torch) == [None, None]


@pytest.mark.parametrize(
    ("what", "wanted"),
    [
        ("gather", [("all_gather_matmul", GATHER), ("matmul_reduce_scatter", PAIRWISE), ("gather", GATHER)]),
        ("gather, kept", [("all_gather_matmul", GATHER), ("matmul_reduce_scatter", PAIRWISE)]),
        ("gather, b frozen", [("all_gather_matmul", GATHER), ("matmul_reduce_scatter", PAIRWISE)]),
        ("scatter", [("matmul_reduce_scatter", PAIRWISE), ("all_gather_matmul", GATHER)]),
        ("reduce", [("matmul_all_reduce", "all_reduce_1d_one_shot_a")]),
    ],
)
def test_only_the_plan_runs(what: str, wanted: list[tuple[str, str]]) -> None:
    """Forward and backward send what the plans' links carry, and nothing else moves."""
    for found in results(3, worker.what_ran):
        ran, sent, links, last = found[what]
        assert ran == wanted
        assert sent == links and len(links) == 2
        overlap = "not overlapped, because one GEMM on each rank" if what == "reduce" else "overlapped"
        assert wanted[0][1] in last and f"collective runtime over gloo, GEMMs by torch; {overlap}" in last
    ((_, sent, _, last),) = (found[what] for found in results(1, worker.what_ran))
    assert sent == {} and last.endswith("not overlapped, because one rank: nothing moves")


def test_executables_are_made_once_and_a_bounded_number_is_kept() -> None:
    for found in results(2, worker.executables):
        assert found == {"made": [1, 1, 2, 2, 3, 3, 4], "kept": 2, "another group": 5}


def test_an_executable_from_inference_mode_serves_training() -> None:
    assert results(2, worker.after_inference) == [[], []]


@pytest.mark.sample(0)  # nine seconds
def test_autocast_casts_as_for_a_linear() -> None:
    assert results(2, worker.autocast) == [[], []]


def test_executables_refuse_tensors_that_would_lose_their_gradient() -> None:
    for found in results(2, worker.no_gradients):
        for name in ("collective", "unfused"):
            assert "B's shard on rank" in found[name]
            assert "executables know no gradients: call them under torch.no_grad()" in found[name]
            assert {found[f"{name}, {mode}"] for mode in ("no_grad", "detached")} == {"24.0"}


@pytest.mark.sample(0)
def test_both_groups_of_a_mesh_run_at_once() -> None:
    assert results(4, worker.replicas) == [[]] * 4


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("dtype", "b.to(torch.float32) would do"),
        ("dtype of several", "b[1].to(torch.float32) would do"),
        ("no such dtype", "a is one of float64, float32, bfloat16, float16, got torch.int32; a.to(...)"),
        ("device", "b is a tensor with values, and not one on the device meta"),
        ("features", "a is (tokens, in_features) and b (out_features, in_features)"),
        ("turned", "b.t() would do"),
        ("bias", "bias is (4,) as b's rows, got (3,)"),
        ("number of biases", "bias is a sequence of 2, as there are 2 b, with None for one without a bias"),
        ("one bias for several", "bias is a sequence of 2, as there are 2 b, with None for one without a bias"),
        ("vector", "got shape (3,); x.unsqueeze(0) is one token"),
        ("none", "a sequence of at least one"),
        ("uneven rows", "3 rows are not the same number for each of 2 ranks; m_per_rank=(2, 1) would do"),
        ("rows", "m_per_rank has 2 integers, one for each rank, with the sum 4, got [1, 1]"),
        ("rows of this rank", "m_per_rank has an integer for each of 2 ranks, its rows, and 4 for rank "),
        ("number of rows", "got [4]"),
        ("out_features", "out_features=100 is split as [50, 50] over 2 ranks, so b has 50 on rank "),
        ("in_features", "in_features=100 is split as [50, 50] over 2 ranks"),
        ("chunks twice", "schedule='ag+gemm chunks=2' and chunks=2 both set the number of chunks: give one of them"),
        ("of GPUs", "provider, config, gemm_streams, execution, wait_by, merge_copies are options for GPUs"),
        ("chunks of nothing", "the unfused program has no chunks, got 2"),
        ("options of nothing", "the unfused program has a collective and no final_add"),
        ("no name", "a configuration is a schedule's name and options"),
        ("no option", "chunk"),
        ("schedule", "is no schedule for ag+gemm; schedule='auto', or one of all_gather_1d_bidirectional_full_a"),
        ("no schedule", "all_gather_1d_ring_a"),
        ("mesh", "group=mesh['tp']"),
        ("group", "dist.group.WORLD has all ranks"),
        ("destroyed group", ": it was destroyed, or never made. Pass one that exists, or a dimension of"),
        ("group's name", "this process has no process group of the name 'tp': it was destroyed, or never made"),
        ("list", "all_gather_matmul: a_shard is a torch.Tensor, as torch.as_tensor makes it, got [["),
        (
            "array",
            "matmul_reduce_scatter: b is a torch.Tensor, as torch.as_tensor makes it, got a ndarray",
        ),
        (
            "array in a list",
            "all_gather_matmul: b[1] is a torch.Tensor, as torch.as_tensor makes it, got a ndarray",
        ),
        ("bias as a list", "matmul_all_reduce: bias is a torch.Tensor, as torch.as_tensor makes it, got ["),
        ("chunks", "all_gather_matmul: chunks is an integer >= 1, got 2.0"),
        ("no chunks", "matmul_all_reduce: chunks is an integer >= 1, got 0"),
        ("executable", "the mesh has 2 dimensions, and the ranks of one take part: group=mesh['tp']"),
        ("executable's group", "group is a ProcessGroup, a DeviceMesh of one dimension or a group's name; got 3"),
        ("no batch", "a_shard may have no tokens, but dimensions between are at least 1, got (4, 0, 3)"),
        ("no columns", "n and k over all ranks are at least 1, got m 8, n 8, k 0"),
        ("empty rank", "leaves rank 1 without a row of b"),
        ("empty rank's bias", "add the bias to the result instead"),
    ],
)
def test_wrong_calls_are_refused(what: str, message: str) -> None:
    for found in results(2, worker.misuse):
        assert found[what].startswith("ValueError: ")
        assert message in found[what]


def test_a_group_without_this_rank_is_refused_on_this_rank() -> None:
    first, second = results(2, worker.misuse)
    assert first["outside"] == ""
    assert "group is a ProcessGroup that this rank is in; rank 1 is not in the group" in second["outside"]
    assert first["after"] == second["after"] == "8"
