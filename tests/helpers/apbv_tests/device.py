"""What kernels are tested on: a GPU if there is one, or else the CPU, where Triton's are
interpreted."""

import torch

from apbv.kernels.backends import is_interpreted

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# The interpreter computes products in bfloat16 wrongly.
TRITON_DTYPES = [torch.float32, torch.float16] + ([] if is_interpreted() else [torch.bfloat16])
