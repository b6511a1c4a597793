"""Python runs this when it starts, where `gpucomm run --patch` put this folder into PYTHONPATH.

Once torch is imported, by whomever, gpucomm.install() is called before anybody else has seen it. Every Python process
of the run comes through here, so this imports next to nothing; one that never imports torch pays no more.
"""

import os
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

_HERE = os.path.dirname(os.path.abspath(__file__))


class _AfterTorch:
    """A finder that lets the others find torch, and adds the call to what they found."""

    def find_spec(self, name: str, path: object = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        found = (finder.find_spec(name, None, target) for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, found), None)
        if spec is not None:  # perhaps somebody only asks whether there is one
            self._add_to(spec.loader)
        return spec

    def _add_to(self, loader: object) -> None:
        execute = loader.exec_module  # type: ignore[attr-defined]

        def exec_module(module: ModuleType) -> None:
            execute(module)
            sys.meta_path.remove(self)
            _install()

        loader.exec_module = exec_module  # type: ignore[attr-defined]


def _install() -> None:
    from importlib.util import find_spec

    if find_spec("gpucomm") is None:  # a source tree that was in the launcher's path
        sys.path.append(os.path.normpath(os.path.join(_HERE, "../../..")))
    import gpucomm

    gpucomm.install()


def _run_the_next() -> None:
    """A sitecustomize that this one hides."""
    sys.path[:] = [entry for entry in sys.path if not entry or os.path.abspath(entry) != _HERE]
    ours = sys.modules.pop("sitecustomize")
    try:
        import sitecustomize  # type: ignore[import-not-found]  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise
        sys.modules["sitecustomize"] = ours


sys.meta_path.insert(0, _AfterTorch())
_run_the_next()
