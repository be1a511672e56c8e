"""What the host can still give, read off made-up `/proc` and `/sys`, and off a real limit."""

import subprocess
import sys
import textwrap

import pytest

from gradaccum.planner.meter import CpuMeter
from gradaccum.planner.room import free_on_host

GIB = 1024**3


def less_margin(room):
    return room - room // 16 - 64 * 1024**2


def system(root, files):
    for path, text in files.items():
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


PLAIN = {"proc/meminfo": f"MemTotal: 99 kB\nMemAvailable: {8 * GIB // 1024} kB\n"}
V2 = {
    **PLAIN,
    "proc/self/cgroup": "0::/jobs/mine\n",
    "sys/fs/cgroup/jobs/memory.max": f"{3 * GIB}\n",
    "sys/fs/cgroup/jobs/memory.current": f"{2 * GIB}\n",
    "sys/fs/cgroup/jobs/memory.stat": f"anon 5\ninactive_file {GIB // 2}\n",
    "sys/fs/cgroup/jobs/mine/memory.max": "max\n",
    "sys/fs/cgroup/jobs/mine/memory.current": f"{2 * GIB}\n",
}
V1 = {
    **PLAIN,
    "proc/self/cgroup": "4:cpu,memory:/mine\n3:cpuset:/other\n",
    "sys/fs/cgroup/memory/mine/memory.limit_in_bytes": f"{5 * GIB}\n",
    "sys/fs/cgroup/memory/mine/memory.usage_in_bytes": f"{GIB}\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2**63 - 4096}\n",
    "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{7 * GIB}\n",
}
INSIDE = {
    # In a container the group's own path leads nowhere, and the root is the group.
    **PLAIN,
    "proc/self/cgroup": "0::/../../far/away\n",
    "sys/fs/cgroup/memory.max": f"{4 * GIB}\n",
    "sys/fs/cgroup/memory.current": f"{GIB}\n",
}


@pytest.mark.parametrize(
    ("files", "room"),
    [(PLAIN, 8 * GIB), (V2, GIB + GIB // 2), (V1, 4 * GIB), (INSIDE, 3 * GIB)],
    ids=["available", "cgroup v2", "cgroup v1", "inside a container"],
)
def test_the_tightest_counts(tmp_path, files, room):
    assert free_on_host(system(tmp_path, files)) == less_margin(room)


def test_no_room_is_zero(tmp_path):
    assert free_on_host(system(tmp_path, {"proc/meminfo": "MemAvailable: 0 kB\n"})) == 0


def test_a_system_that_says_nothing(tmp_path, monkeypatch):
    with pytest.raises(OSError, match="does not tell"):
        free_on_host(tmp_path)
    monkeypatch.setattr("gradaccum.planner.meter.free_on_host", lambda: free_on_host(tmp_path))
    with pytest.raises(ValueError, match='memory="8GiB"') as caught:
        CpuMeter().free()
    assert caught.value.slug == "memory-unknown"


@pytest.mark.skipif(sys.platform != "linux", reason="limits of the address space")
@pytest.mark.parametrize("name", ["RLIMIT_AS", "RLIMIT_DATA"])
def test_a_real_limit_of_the_process(name):
    code = textwrap.dedent(
        f"""
        import resource
        from gradaccum.planner.room import free_on_host
        before = free_on_host()
        field = "VmSize" if "{name}" == "RLIMIT_AS" else "VmData"
        lines = open("/proc/self/status").read().splitlines()
        used = next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))
        resource.setrlimit(resource.{name}, (used + 2**29, -1))
        after = free_on_host()
        assert after < 2**29 <= before, (before, after)
        # What it says can be had, and twice the limit cannot.
        kept = bytearray(after)
        try:
            bytearray(2**30)
        except MemoryError:
            pass
        else:
            raise SystemExit("the limit does not hold")
        assert free_on_host() < after
        """
    )
    subprocess.run([sys.executable, "-c", code], check=True)
