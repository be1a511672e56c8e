"""How much memory the host can still give this process, by whoever sets the tightest limit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

try:
    import resource
except ImportError:  # a system without such limits
    resource = None

__all__ = ["free_on_host"]

_MARGIN = 64 * 1024**2
_SHARE = 16


def free_on_host(root: Path = Path("/")) -> int:
    """Bytes that the process can still take; 0 where a limit is reached already.

    The least of what is left under `RLIMIT_AS`, `RLIMIT_DATA`, the control groups (v1 and v2) that
    the process is in, and the memory that the kernel calls available; less a 16th and 64 MiB (an
    8th at most) for what torch's counter does not see: work space, threads, an allocator's holes.

    Args:
        root: where `proc` and `sys` are.

    Raises:
        OSError: if the system tells none of these.
    """
    rooms = [*_limits(root), *_groups(root), *_available(root)]
    if not rooms:
        raise OSError("the system does not tell how much memory is free")
    room = min(rooms)
    return max(0, room - room // _SHARE - min(_MARGIN, room // 8))


def _limits(root: Path) -> Iterator[int]:
    if resource is None:
        return
    status = _fields(root / "proc/self/status")
    for limit, used in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
        soft, _ = resource.getrlimit(limit)
        if soft != resource.RLIM_INFINITY and used in status:
            yield soft - status[used]


def _groups(root: Path) -> Iterator[int]:
    """What is left in each control group around the process; the tightest may be any of them."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        parts = [part for part in path.split("/") if part not in ("", "..")]
        if not controllers:
            base, names = root / "sys/fs/cgroup", ("memory.max", "memory.current")
            cache = "inactive_file"
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
            names = "memory.limit_in_bytes", "memory.usage_in_bytes"
            cache = "total_inactive_file"
        else:
            continue
        # In a container its own group is often mounted as the root, so that the path leads nowhere.
        for depth in range(len(parts) + 1):
            folder = base.joinpath(*parts[:depth])
            limit, used = (_number(folder / name) for name in names)
            if limit is not None and used is not None:
                # Pages of files are given back before anybody is refused memory.
                yield limit - used + _fields(folder / "memory.stat").get(cache, 0)


def _available(root: Path) -> Iterator[int]:
    found = _fields(root / "proc/meminfo").get("MemAvailable")
    if found is not None:
        yield found


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _fields(path: Path) -> dict[str, int]:
    """Lines such as `VmSize: 120 kB` or `inactive_file 4096`, in bytes."""
    found = {}
    for line in _text(path).splitlines():
        words = line.replace(":", " ").split()
        if len(words) >= 2 and words[1].isdigit():
            found[words[0]] = int(words[1]) * (1024 if words[2:] == ["kB"] else 1)
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
