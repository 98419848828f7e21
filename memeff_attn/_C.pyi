"""The compiled module (csrc/binding.cpp). Call it from the op's device implementations only."""

from typing import Any, TypedDict

from torch import Tensor

class Request(TypedDict, total=False):
    sm: int  # compute capability as a number: 80, 90
    smem_optin: int  # bytes of shared memory a block may ask for; 0 or left out: that of the sm
    sm_count: int  # 0 or left out: that of the sm's usual chip
    dtype: str  # "f16", "bf16", "f32"
    math: str  # "ieee", "tf32"
    B: int
    M: int
    N: int
    H: int
    K: int
    Kv: int
    alignment: int  # elements: the largest power of two dividing addresses, strides, K and Kv
    has_bias: bool
    variant: str | None  # forced row; "" or None: automatic
    any_build: bool  # answer for a build that has every row, as a host-only build always does

class DeviceInfo(TypedDict):
    sm: int
    smem_optin: int
    sm_count: int
    name: str

# (address, dtype, shape, strides in elements); dtype: 0 float16, 1 bfloat16, 2 float32, 3 bool
Scalars = tuple[int, int, list[int] | tuple[int, ...], list[int] | tuple[int, ...]]

source_hash: str
is_cuda_build: bool

# None: launched. Otherwise (code, message): 1 ValueError, 2 NotImplementedError, 3 RuntimeError.
# Raises TypeError where a tensor's type has no DLPack C exchange API: forward_scalars takes those.
def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor | None,
    scale: float,
    causal: int,  # 0 none, 1 top-left, 2 bottom-right
    tf32: bool,
    variant: str,
    stream: int,  # a raw cudaStream_t
    /,
) -> tuple[int, str] | None: ...
def forward_scalars(
    query: Scalars,
    key: Scalars,
    value: Scalars,
    bias: Scalars | None,
    out: Scalars,
    lse: Scalars | None,
    scale: float,
    causal: int,
    tf32: bool,
    variant: str,
    stream: int,
    device: int,  # CUDA device index of all the tensors
    /,
) -> tuple[int, str] | None: ...
def select(request: Request, /) -> str: ...
def explain(request: Request, /) -> str: ...
def variants() -> list[dict[str, Any]]: ...
def built_archs() -> list[str]: ...
def cuda_version() -> str: ...
def device_info(device: int, /) -> DeviceInfo: ...
