"""Make transformers' video processors importable beside a CPU-only torch.

The torchvision wheel of the package index is linked against CUDA. Beside a CPU build of torch its
compiled operators cannot load, its import then fails while registering fake kernels for operators
that do not exist, and that failure takes ``import transformers.models...processing`` with it. The
video processors need only torchvision's Python transforms (resize, normalise), which run on plain
torch. Declaring the missing operator schemas first is enough for the import to succeed.
"""

import importlib.util

import torch

_OPERATORS = (
    "nms",
    "qnms",
    "roi_align",
    "_roi_align_backward",
    "roi_pool",
    "_roi_pool_backward",
    "ps_roi_align",
    "_ps_roi_align_backward",
    "ps_roi_pool",
    "_ps_roi_pool_backward",
    "deform_conv2d",
    "_deform_conv2d_backward",
)

# A torch.library.Library withdraws its definitions when it is collected, so it must stay referenced.
_library: torch.library.Library | None = None


def ensure_torchvision_imports() -> None:
    """Declare torchvision's operator schemas where its own library cannot provide them.

    Does nothing where torchvision is absent, already imported, or built for this torch.
    """
    global _library
    if _library is not None or importlib.util.find_spec("torchvision") is None:
        return
    try:
        import torchvision  # noqa: F401

        return
    except (RuntimeError, ImportError, OSError):
        pass
    _forget_partial_import()
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in _OPERATORS:
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}(Tensor x) -> Tensor")
    _library = library


def _forget_partial_import() -> None:
    """A failed import leaves submodules behind which would hide the second attempt's errors."""
    import sys

    for name in [n for n in sys.modules if n == "torchvision" or n.startswith("torchvision.")]:
        del sys.modules[name]
