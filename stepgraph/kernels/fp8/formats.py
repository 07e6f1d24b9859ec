"""The two fp8 formats, shared by the casts of every device."""

import torch

#: The largest numbers.
MOST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
#: Largest magnitudes below it count as it, so that scales and what undoes them are normal fp32 numbers.
SMALLEST = 2.0**-100
#: A GPU's product reads groups that begin at multiples of 16 bytes, so each part of a transposed copy has as many.
MULTIPLE = 16


def padded_rows(R: int, experts: int) -> int:
    """Places of a transposed copy of the R rows of ``experts``, each expert's part padded to `MULTIPLE`."""
    return -(-R // MULTIPLE) * MULTIPLE + MULTIPLE * experts
