"""PageWrite in NumPy: the definition that the ONNX function body and the GPU kernel are held against.

Shape letters: `T` packed tokens, `K` KV heads, `H` head dim, `P` pages of the pool, `G` positions of a page.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from dspark_trt_plugins.page_write.form import PageWriteForm
from numpy.typing import NDArray

Array = NDArray[Any]


def page_write(form: PageWriteForm, *, keys: Array, values: Array, slots: NDArray[np.int64], pages: Array) -> Array:
    """The pool [P, 2, K, G, H] after the writes; `pages` is left as it is.

    Args:
        keys, values: [T, K * H].
        slots: [T], page * G + position in the page. Tokens that share a slot leave the numbers of one of them.
        pages: [P, 2, K, G, H].
    """
    written = pages.copy()
    page, position = np.divmod(slots, form.page_positions)
    for which, packed in enumerate((keys, values)):
        written[page, which, :, position] = packed.reshape(len(slots), form.num_kv_heads, form.head_dim)
    return written
