"""Make transformers' video processors importable with a CPU-only torch.

The torchvision wheel of the package index is linked against CUDA. Beside a CPU build of torch its
compiled operators cannot load, its import then fails while registering fake kernels for operators
that do not exist, and that failure takes ``import transformers.models...processing`` with it. The
video processors need only torchvision's Python transforms (resize, normalise), which run on plain
torch. Declaring the missing operator schemas first is enough for the import to succeed.

An import hook watches for the import of torchvision, so that it is not imported unless another
module does.
"""

import importlib.abc
import sys
from functools import partial
from importlib.machinery import PathFinder

_POOLING = ("roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool", "deform_conv2d")
_OPERATORS = ("nms", "qnms", *_POOLING, *(f"_{name}_backward" for name in _POOLING))


def ensure_torchvision_imports() -> None:
    """Make a later import of torchvision succeed.

    It does even if torchvision's own library cannot provide its operators.

    Changes nothing where torchvision is absent, already imported, or built for this torch.
    """
    is_watched = any(isinstance(finder, _TorchvisionFinder) for finder in sys.meta_path)
    if "torchvision" not in sys.modules and not is_watched:
        sys.meta_path.insert(0, _TorchvisionFinder())


class _TorchvisionFinder(importlib.abc.MetaPathFinder):
    """Import hook for torchvision, which retries a failed import.

    It finds torchvision on the path as Python does.
    """

    def __init__(self):
        # A torch.library.Library withdraws its definitions when it is collected, so it must stay
        # referenced.
        self._library = None

    def find_spec(self, fullname, path=None, target=None):
        if fullname != "torchvision":
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            # There is a loader for each search; all else that one can be asked stays as it is.
            # Of this loader alone, not of its class.
            execute = partial(self._execute, spec.loader.exec_module)
            spec.loader.exec_module = execute  # type: ignore[method-assign]
        return spec

    def _execute(self, execute, module) -> None:
        try:
            execute(module)
        except (RuntimeError, ImportError, OSError):
            if self._library is not None:
                raise
            # What a failed import leaves behind would hide the next attempt's errors.
            for name in [name for name in sys.modules if name.startswith("torchvision.")]:
                del sys.modules[name]
            self._library = _declared_operators()
            execute(module)
        if (
            self in sys.meta_path
        ):  # its work is done; the loader goes on holding it, and so the library
            sys.meta_path.remove(self)


def _declared_operators():
    """Declare the operators' missing schemas.

    They last as long as the returned library is referenced.
    """
    import torch  # which torchvision has imported by now

    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in _OPERATORS:
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}(Tensor x) -> Tensor")
    return library
