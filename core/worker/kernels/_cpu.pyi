"""What `cpu.c` has: see `foresay.core.worker.cpu_kernels`, which calls it with addresses."""

VERSION: int

def likeliest(
    x: int, columns: int, log_probs: int, num_rows: int, num_columns: int, width: int,
    x_stride: int, threads: int, /,
) -> None: ...  # fmt: skip
def rms_norm(
    x: int, weight: int, y: int, num_rows: int, width: int, x_stride: int, threads: int,
    eps: float, /,
) -> None: ...  # fmt: skip
def silu_mul(x: int, y: int, num_rows: int, width: int, x_stride: int, threads: int, /) -> None: ...
def rotate(
    x: int, cos: int, sin: int, num_rows: int, num_heads: int, head_dim: int, x_stride: int,
    threads: int, /,
) -> None: ...  # fmt: skip
def attend(
    query: int, pool: int, out: int, slots: int, rows: int, tiles: int, num_tiles: int,
    query_stride: int, slot_stride: int, num_heads: int, num_kv_heads: int, head_dim: int,
    value_dim: int, window: int, threads: int, scale: float, /,
) -> None: ...  # fmt: skip
def product(
    x: int, weight: int, y: int, bias: int, residual: int, scales: int, exponent: int,
    num_rows: int, in_features: int, out_features: int, x_stride: int, threads: int, /,
) -> None: ...  # fmt: skip
def layer(
    layer: int, x: int, y: int, scratch: int, cos: int, sin: int, slot_mapping: int, pool: int,
    slots: int, rows: int, tiles: int, num_tiles: int, slot_stride: int, num_rows: int,
    threads: int, eps: float, /,
) -> None: ...  # fmt: skip
def has_products() -> bool: ...
def supported() -> list[str]: ...
def used() -> str: ...
def use(name: str, /) -> None: ...
