"""Whether the process of a rank has ended."""

from __future__ import annotations

import signal
import subprocess
import sys

from distgemm.runtime.cuda.processes import ProcessId, has_ended, this_process

WAITING = "import sys; sys.path[:0] = {path!r}; from distgemm.runtime.cuda.processes import this_process as t; " + (
    "print(t().pack().hex(), flush=True); input()"
)


def test_a_process_has_ended_once_it_is_killed() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WAITING.format(path=sys.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        process = ProcessId.unpack(bytes.fromhex(other.stdout.readline()))
        assert process.number == other.pid and process.host == this_process().host
        assert not has_ended(process)
        other.send_signal(signal.SIGSTOP)  # it is late
        assert not has_ended(process)
        other.kill()
        while other.poll() is None and not has_ended(process):
            pass
        assert has_ended(process)
    assert has_ended(process)  # nobody waits for it any more


def test_a_process_that_took_the_number_of_another_is_not_that_one() -> None:
    here = this_process()
    assert not has_ended(here)
    assert has_ended(here._replace(start=here.start - 1))
    assert not has_ended(here._replace(host=bytes(16), number=2**22))  # of another host: nothing is known
    assert ProcessId.unpack(here.pack()) == here
