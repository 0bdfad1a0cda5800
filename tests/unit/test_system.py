"""Cores, switches in the environment, and files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from distgemm.system import cores, cores_of_rank, read_regular, switch, write_atomically

# --- cores ----------------------------------------------------------------------------------------------


@pytest.fixture
def eight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


V1 = "4:memory:/other\n3:cpu,cpuacct:/pod/job\n"
QUOTAS: dict[str, tuple[dict[str, str], int]] = {
    "no cgroups": ({}, 8),
    "v2, no limit": ({"proc/self/cgroup": "0::/job\n", "sys/fs/cgroup/job/cpu.max": "max 100000\n"}, 8),
    "v2": ({"proc/self/cgroup": "0::/job\n", "sys/fs/cgroup/job/cpu.max": "300000 100000\n"}, 3),
    "v2, part of a core": ({"proc/self/cgroup": "0::/job\n", "sys/fs/cgroup/job/cpu.max": "150000 100000\n"}, 2),
    "v2, little": ({"proc/self/cgroup": "0::/job\n", "sys/fs/cgroup/job/cpu.max": "1000 100000\n"}, 1),
    "v2, more than there is": ({"proc/self/cgroup": "0::/job\n", "sys/fs/cgroup/job/cpu.max": "6400000 100000\n"}, 8),
    "v2, the group around it": (
        {
            "proc/self/cgroup": "0::/pod/job\n",
            "sys/fs/cgroup/pod/job/cpu.max": "max 100000\n",
            "sys/fs/cgroup/pod/cpu.max": "400000 100000\n",
        },
        4,
    ),
    "v2, in a container": ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "200000 100000\n"}, 2),
    "v1": (
        {
            "proc/self/cgroup": V1,
            "sys/fs/cgroup/cpu/pod/job/cpu.cfs_quota_us": "500000\n",
            "sys/fs/cgroup/cpu/pod/job/cpu.cfs_period_us": "100000\n",
        },
        5,
    ),
    "v1, no limit": (
        {
            "proc/self/cgroup": V1,
            "sys/fs/cgroup/cpu/pod/job/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/pod/job/cpu.cfs_period_us": "100000\n",
        },
        8,
    ),
    "v1, in a container": (
        {
            "proc/self/cgroup": V1,
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "200000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
        2,
    ),
}


@pytest.mark.usefixtures("eight")
@pytest.mark.parametrize("name", QUOTAS)
def test_cores_of_a_cgroup(name: str, tmp_path: Path) -> None:
    files, expected = QUOTAS[name]
    assert cores(machine(tmp_path, files)) == expected


def test_cores_of_this_process_follow_its_affinity() -> None:
    one = str(min(os.sched_getaffinity(0)))
    program = f"import os; os.sched_setaffinity(0, {{{one}}}); from distgemm.system import cores; print(cores())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"


@pytest.mark.parametrize(
    ("ranks", "local", "share"), [(2, None, 12), (8, "", 3), (16, "8", 3), (2, "8", 12), (8, "0", 3), (64, "48", 1)]
)
def test_ranks_of_a_machine_share_its_cores(
    ranks: int, local: str | None, share: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distgemm.system.cores", lambda: 24)
    if local is None:
        monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    else:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    assert cores_of_rank(ranks) == share


def test_nothing_else_counts_cores() -> None:
    """os.cpu_count() counts the cores of the machine, of which this process may use only some."""
    package = Path(__file__).parents[2] / "distgemm"
    users = [path.name for path in package.rglob("*.py") if "cpu_count" in path.read_text()]
    assert users == []


# --- switches -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [(text, True) for text in ("1", "true", "TRUE", "Yes", "on", " 1 ")]
    + [(text, False) for text in ("0", "false", "False", "no", "OFF")],
)
@pytest.mark.parametrize("default", [True, False])
def test_a_switch(monkeypatch: pytest.MonkeyPatch, text: str, value: bool, default: bool) -> None:
    monkeypatch.setenv("DISTGEMM_TUNE", text)
    assert switch("DISTGEMM_TUNE", default) is value


@pytest.mark.parametrize("default", [True, False])
@pytest.mark.parametrize("text", [None, "", "  "])
def test_a_switch_that_is_not_set(monkeypatch: pytest.MonkeyPatch, text: str | None, default: bool) -> None:
    monkeypatch.delenv("DISTGEMM_TUNE", raising=False)
    if text is not None:
        monkeypatch.setenv("DISTGEMM_TUNE", text)
    assert switch("DISTGEMM_TUNE", default) is default


@pytest.mark.parametrize("text", ["2", "-1", "none", "never", "01", "t", "f", "truee", "1.0"])
def test_a_switch_that_is_neither(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("DISTGEMM_TUNE", text)
    with pytest.raises(ValueError, match=f"^DISTGEMM_TUNE is 1, true, yes or on, or else 0, .* got '{text}'$"):
        switch("DISTGEMM_TUNE", True)


# --- files ----------------------------------------------------------------------------------------------


def test_a_fifo_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", tmp_path, Path("/dev/null")):
        with pytest.raises(OSError, match="it is no regular file"):
            read_regular(path)
    (tmp_path / "file").write_bytes(b"\0text")
    (tmp_path / "link").symlink_to("file")
    assert read_regular(tmp_path / "link") == b"\0text"


def test_a_link_is_replaced_and_not_written_through(tmp_path: Path) -> None:
    victim, link = tmp_path / "victim", tmp_path / "link"
    victim.write_text("precious")
    link.symlink_to(victim)
    write_atomically(link, "new")
    assert (victim.read_text(), link.read_text(), link.is_symlink()) == ("precious", "new", False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "victim"]


def test_what_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "folder" / "within").mkdir(parents=True)
    with pytest.raises(OSError, match="folder"):
        write_atomically(tmp_path / "folder", "new")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
