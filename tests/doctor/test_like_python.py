"""Under the doctor a script is what it is under `python`, where it imports no torch."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from doctor_harness import DOCTOR, Out, both, run

SEEN = """\
import sys, os
print(__name__, __file__, __doc__, __package__, __builtins__)
print(__spec__ and (__spec__.name, __spec__.origin, __spec__.parent))
print(sys.argv, sys.orig_argv, sys.path, sys.flags, sys.warnoptions)
print(sys.executable, sys.excepthook is sys.__excepthook__, sys.displayhook is sys.__displayhook__)
print(sorted(sys.modules))
print([getattr(f, '__name__', type(f)) for f in sys.meta_path[-3:]], sorted(globals()))
print(sorted(os.environ.items()))
print(sys.gettrace(), sys.getprofile(), sys.getrecursionlimit(), len(sys._current_frames()))
"""


def same(plain: Out, under: Out) -> None:
    assert under.stdout == plain.stdout
    assert under.stderr == plain.stderr
    assert under.code == plain.code


def test_what_a_script_sees_of_its_interpreter(tmp_path: Path) -> None:
    (tmp_path / "seen.py").write_text(SEEN)
    plain, under = both(["seen.py", "--json", "-m", "x y", "é"], tmp_path)
    assert plain.stdout
    assert b"--json" in plain.stdout
    same(plain, under)


def test_that_comparison_can_fail(tmp_path: Path) -> None:
    (tmp_path / "pid.py").write_text("import os\nprint(os.getppid())\n")
    plain, under = both(["pid.py"], tmp_path)
    assert plain.stdout != under.stdout


def test_a_module_a_package_and_a_folder(tmp_path: Path) -> None:
    package = tmp_path / "pack"
    package.mkdir()
    (package / "__init__.py").write_text("print('init', __name__)\n")
    (package / "__main__.py").write_text(SEEN)
    (package / "inner.py").write_text(SEEN)
    for arguments in (["-m", "pack", "a"], ["-m", "pack.inner", "-q"], ["pack", "b"]):
        same(*both(arguments, tmp_path))
    same(*both(["-mpack.inner"], tmp_path))


@pytest.mark.parametrize("code", ["import sys; print(__name__, sys.argv)", "raise KeyError(1)"])
def test_standard_input(code: str, tmp_path: Path) -> None:
    same(*both(["-", "x"], tmp_path, stdin=code.encode()))


def test_a_script_that_reads_standard_input(tmp_path: Path) -> None:
    (tmp_path / "reads.py").write_text("import sys\nprint(input('> '), sys.stdin.buffer.read())\n")
    plain, under = both(["reads.py"], tmp_path, stdin=b"one\n\x00\xff two\n")
    assert b"one" in plain.stdout
    same(plain, under)


@pytest.mark.parametrize(
    "code",
    [
        "def f(:\n  pass\n",
        "def f():\n    try:\n        1 / 0\n    except ZeroDivisionError as e:\n"
        "        raise ValueError('é', 2) from e\nf()\n",
        "class E(Exception):\n    def __str__(self):\n        raise RuntimeError\nraise E\n",
        "import sys\nsys.excepthook = lambda *a: print('mine', a[0])\n1 / 0\n",
        "def f(): f()\nf()\n",
        "import warnings\nwarnings.warn('w', stacklevel=1)\nimport json\njson.loads('x')\n",
        "raise KeyboardInterrupt\n",
        "import threading\nt = threading.Thread(target=lambda: 1 / 0)\nt.start(); t.join()\n",
        "raise ExceptionGroup('g', [ValueError(1)])\n" if sys.version_info >= (3, 11) else "1/0\n",
        "\x00\n",
    ],
)
def test_tracebacks(code: str, tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(code)
    plain, under = both(["bad.py"], tmp_path)
    same(plain, under)


@pytest.mark.parametrize(
    "payload", ["", "0", "3", "256", "'message'", "None", "[1, 2]", "True", "-1", "2.5", "(1, 2)"]
)
def test_exit_with_any_payload(payload: str, tmp_path: Path) -> None:
    (tmp_path / "leave.py").write_text(
        "import atexit, sys\n"
        "atexit.register(print, 'first registered')\natexit.register(print, 'second')\n"
        f"print('unflushed', end='')\nsys.exit({payload})\n"
    )
    same(*both(["leave.py"], tmp_path))


def test_leaving_by_the_back_door(tmp_path: Path) -> None:
    (tmp_path / "gone.py").write_text("import os\nprint('lost')\nos._exit(9)\n")
    plain, under = both(["gone.py"], tmp_path)
    assert plain.code == 9
    same(plain, under)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGKILL", "SIGINT", "SIGABRT", "SIGUSR1"])
def test_death_by_signal(name: str, tmp_path: Path) -> None:
    (tmp_path / "die.py").write_text(
        f"import os, signal\nprint('so far', flush=True)\nos.kill(os.getpid(), signal.{name})\n"
        "import time; time.sleep(30)\n"
    )
    plain, under = both(["die.py"], tmp_path)
    assert plain.code == -getattr(signal, name)
    same(plain, under)


@pytest.mark.parametrize(
    "arguments", [["missing.py"], ["empty"], ["-m", "no.such.module"], ["-m", "json"]]
)
def test_what_python_refuses(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    plain, under = both(arguments, tmp_path)
    assert plain.code
    same(plain, under)


WAITS = """\
import signal, sys, time
def heard(number, frame):
    print('heard', signal.Signals(number).name, flush=True)
    if number == signal.SIGTERM:
        sys.exit(5)
for name in ('SIGTERM', 'SIGUSR1', 'SIGINT', 'SIGHUP'):
    signal.signal(getattr(signal, name), heard)
print('ready', flush=True)
for _ in range(600):
    time.sleep(0.1)
"""


def test_signals_sent_to_the_doctor_reach_the_script_once(tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text(WAITS)
    with subprocess.Popen(
        [*DOCTOR, "-q", "waits.py"], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        for name in ("SIGUSR1", "SIGINT", "SIGHUP", "SIGTERM"):
            process.send_signal(getattr(signal, name))
            assert process.stdout.readline() == f"heard {name}\n"
        assert process.stdout.read() == ""
        assert process.wait(60) == 5


def test_ctrl_c_is_heard_once(tmp_path: Path) -> None:
    """A terminal sends it to the whole group; the doctor must not pass it on again."""
    (tmp_path / "count.py").write_text(
        "import signal, time\nheard = []\n"
        "signal.signal(signal.SIGINT, lambda *_: heard.append(1))\n"
        "print('ready', flush=True)\nend = time.time() + 60\n"
        "while time.time() < end and not heard:\n    time.sleep(0.05)\n"
        "time.sleep(1.5)\nprint(len(heard))\n"
    )
    if not hasattr(signal, "sigtimedwait"):
        pytest.skip("this system does not say who sent a signal")
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        os.execv(sys.executable, [*DOCTOR, "-q", "count.py"])
    said = b""
    while b"ready" not in said:
        said += os.read(terminal, 1000)
    os.write(terminal, b"\x03")
    end = time.time() + 60
    while time.time() < end:
        try:
            said += os.read(terminal, 1000)
        except OSError:  # noqa: PERF203 - how a terminal says that nobody is at its other end
            break
    assert os.waitpid(pid, 0)[1] == 0
    assert said.split()[-1].removeprefix(b"^C") == b"1"  # the terminal echoes the key


def test_the_interpreters_own_options_are_kept(tmp_path: Path) -> None:
    (tmp_path / "seen.py").write_text(SEEN)
    options = ["-W", "error::UserWarning", "-X", "utf8", "-O", "-u"]
    plain = run([sys.executable, *options, "seen.py"], tmp_path)
    under = run([sys.executable, *options, "-m", "gradaccum", "doctor", "-q", "seen.py"], tmp_path)
    same(plain, under)


def test_a_sitecustomize_of_the_users_own_still_runs(tmp_path: Path) -> None:
    (tmp_path / "custom").mkdir()
    (tmp_path / "custom" / "sitecustomize.py").write_text("print('customised')\nMARK = 1\n")
    (tmp_path / "seen.py").write_text("import sitecustomize\nprint(sitecustomize.MARK)\n" + SEEN)
    path = str(tmp_path / "custom")
    plain = run([sys.executable, "seen.py"], tmp_path, PYTHONPATH=path)
    under = run([*DOCTOR, "-q", "seen.py"], tmp_path, PYTHONPATH=path)
    # `-m gradaccum` runs the customisation too, in the doctor's own process
    assert plain.stdout.startswith(b"customised\n1\n")
    assert under.stdout == b"customised\n" + plain.stdout
