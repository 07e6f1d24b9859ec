"""Epilogues of `gated` for QuACK's products: ``acc`` is the product, ``c`` and ``u`` are read element by element.

The package keeps compiled kernels on disk under the names of these functions where stepgraph is an installed package:
a function that computes something else needs another name.
Source: the package's ``quack/epilogue/frontend.py`` and ``quack/activation.py``, read at 0.6.5.
"""

from quack.activation import dgeglu, dswiglu, geglu, swiglu  # pyrefly: ignore[missing-import]
from quack.epilogue.frontend import gemm_epilogue  # pyrefly: ignore[missing-import]


@gemm_epilogue(outputs=("a",))
def silu_product(acc: object, c: object) -> dict[str, object]:
    return {"D": acc, "a": swiglu(c, acc)}


@gemm_epilogue(outputs=("a",))
def gelu_tanh_product(acc: object, c: object) -> dict[str, object]:
    return {"D": acc, "a": geglu(c, acc)}


@gemm_epilogue(outputs=("du",))
def silu_product_backward(acc: object, c: object, u: object) -> dict[str, object]:
    dg, du, _ = dswiglu(c, u, acc)
    return {"D": dg, "du": du}


@gemm_epilogue(outputs=("du",))
def gelu_tanh_product_backward(acc: object, c: object, u: object) -> dict[str, object]:
    dg, du, _ = dgeglu(c, u, acc)
    return {"D": dg, "du": du}


#: By the activation: forward and backward.
EPILOGUES = {
    "silu": (silu_product, silu_product_backward),
    "gelu_tanh": (gelu_tanh_product, gelu_tanh_product_backward),
}
