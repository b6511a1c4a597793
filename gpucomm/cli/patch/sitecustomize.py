"""Python runs this when it starts, where `gpucomm run --patch` put this folder into PYTHONPATH.

Once torch is imported, by whomever, gpucomm.install() is called before anybody else has seen it. A process that never
imports torch pays nothing.
"""

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

_HERE = Path(__file__).parent


class _AfterTorch(MetaPathFinder):
    """Lets the other finders find torch, and adds the call to what they found."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "torch":
            return None
        found = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, found), None)
        if spec is not None and spec.loader is not None:  # perhaps somebody only asks whether there is one
            self._add_to(spec.loader)
        return spec

    def _add_to(self, loader: Loader) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            sys.meta_path.remove(self)
            _install()

        loader.exec_module = exec_module  # type: ignore[method-assign]


def _install() -> None:
    if find_spec("gpucomm") is None:  # a source tree that was in the launcher's path
        sys.path.append(str(_HERE.parents[2]))
    import gpucomm

    gpucomm.install()


def _run_the_next() -> None:
    """A sitecustomize that this one hides."""
    sys.path[:] = [entry for entry in sys.path if not entry or Path(entry).resolve() != _HERE.resolve()]
    ours = sys.modules.pop("sitecustomize")
    try:
        import sitecustomize  # type: ignore[import-not-found]  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise
        sys.modules["sitecustomize"] = ours


sys.meta_path.insert(0, _AfterTorch())
_run_the_next()
