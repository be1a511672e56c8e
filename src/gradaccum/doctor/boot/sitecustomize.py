"""Runs in the script's own interpreter before the script: waits for torch, then sets the hooks.

Python runs a module of this name at its start. This one is found first because `gradaccum doctor`
puts its folder into PYTHONPATH; it takes all traces of that away, runs the `sitecustomize` that
would have been found without it, and ends as one that was never there. It imports nothing that
Python has not loaded itself, so the script meets the modules that it would meet without it.
"""

import os
import sys


def _leave_no_trace():
    here = os.path.dirname(os.path.abspath(__file__))
    saved = {}
    for name in ("GRADACCUM_DOCTOR", "GRADACCUM_DOCTOR_PATH"):
        if name in os.environ:
            saved[name] = os.environ.pop(name)
    before = saved.get("GRADACCUM_DOCTOR_PATH")
    mine = os.environ.get("PYTHONPATH")
    if before is None:
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = before
    sys.path[:] = [p for p in sys.path if os.path.abspath(p) != here or p in ("", ".")]
    sys.path_importer_cache.pop(here, None)
    if "GRADACCUM_DOCTOR" in saved:
        # Children inherit what C sees; the script reads what Python sees.
        os.putenv("GRADACCUM_DOCTOR", saved["GRADACCUM_DOCTOR"])
        os.putenv("PYTHONPATH", mine or here)
        if before is not None:
            os.putenv("GRADACCUM_DOCTOR_PATH", before)
    return saved.get("GRADACCUM_DOCTOR"), here


def _original_customization():
    sys.modules.pop("sitecustomize", None)
    try:
        return __import__("sitecustomize")  # the one that would have been found without us
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
        return None


class _Handing:
    """Stands as `__call__`: hands out the real call, and is off the stack while it runs."""

    def __get__(self, owner, kind=None):
        # From here on nothing but the running call holds `owner`.
        del owner._loader.exec_module
        return owner._loader.exec_module


class _OnceDone:
    """A call that says when it is over: no frame of ours is in the traceback if it fails."""

    __call__ = _Handing()

    def __init__(self, loader, then):
        self._loader = loader
        self._then = then

    def __del__(self):
        self._then()


class _Finder:
    """Finds torch as it would be found without us, and hears when it is loaded."""

    def __init__(self, then):
        self._then = then

    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        finders = sys.meta_path
        if self in finders:
            finders.remove(self)
        spec = None
        for finder in list(finders):
            spec = finder.find_spec(name, path, target) if hasattr(finder, "find_spec") else None
            if spec is not None:
                break
        loader = getattr(spec, "loader", None)
        if loader is None or not hasattr(loader, "exec_module"):
            return spec
        loader.exec_module = _OnceDone(loader, self._loaded)
        return spec

    def _loaded(self):
        torch = sys.modules.get("torch")
        if hasattr(torch, "optim") and hasattr(torch, "compile"):
            self._then(torch)


def _start(target):
    def then(torch):
        try:
            from gradaccum.doctor.arrive import arrive  # noqa: PLC0415 - once torch is there

            arrive(torch, target)
        except Exception as error:  # noqa: BLE001 - the script must run all the same
            sys.stderr.write(f"gradaccum doctor: no hooks: {type(error).__name__}: {error}\n")

    sys.meta_path.insert(0, _Finder(then))


_target, _here = _leave_no_trace()
_found = _original_customization()
if _target:
    _start(_target)
if _found is None:
    # What site.py swallows for a `sitecustomize` that does not exist.
    raise ImportError("no sitecustomize", name="sitecustomize")
sys.modules["sitecustomize"] = _found
