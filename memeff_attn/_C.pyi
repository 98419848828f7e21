"""The compiled module (csrc/binding.cpp). Call it from the op's device implementations only."""

from collections.abc import Callable
from typing import Any, TypedDict

from torch import Tensor

# `pass` is a keyword: "fwd" (where left out) or "bwd".
_Pass = TypedDict("_Pass", {"pass": str}, total=False)

class Request(_Pass, total=False):
    sm: int  # compute capability as a number: 80, 90
    smem_optin: int  # bytes of shared memory a block may ask for; 0 or left out: that of the sm
    sm_count: int  # 0 or left out: that of the sm's usual chip
    dtype: str  # "f16", "bf16", "f32"
    math: str  # "ieee", "tf32"
    B: int
    M: int
    N: int
    H: int
    heads_per_key: int  # heads that share a key head and may become rows of one tile; 1: none
    K: int
    Kv: int
    alignment: int  # elements: the largest power of two dividing addresses, strides, K and Kv
    has_bias: bool
    dropout: bool
    causal: bool  # later queries see more keys, all earlier ones
    paged: bool  # keys are read through a block table
    partial: bool  # results in fp32 are wanted: of packed heads, or for an out of another dtype
    bias_alignment: int  # as alignment, of a bias of the query's dtype; 0: another bias
    lse: bool  # forward: the log-sum-exp is wanted
    bias_grad: bool  # backward: the bias' gradient is wanted
    deterministic: bool  # backward: only rows that sum in a fixed order
    # a forced row; "family:" and a name: the choice among its rows; "" or None: among all
    variant: str | None
    any_build: bool  # answer for a build that has every row, as a host-only build always does

class DeviceInfo(TypedDict):
    sm: int
    smem_optin: int
    sm_count: int
    name: str

# (address, dtype, shape, strides in elements); dtype: 0 float16, 1 bfloat16, 2 float32, 3 bool,
# 4 int64, 5 int32
Scalars = tuple[int, int, list[int] | tuple[int, ...], list[int] | tuple[int, ...]]

# (window_left, window_right, query_starts, key_starts, key_lengths, block_tables, page_size,
# bias_per_sequence), as the operators take them; None: causal says it all, there are no sequences.
MaskTensors = tuple[int, int, Tensor | None, Tensor | None, Tensor | None, Tensor | None, int, bool]
MaskScalars = tuple[
    int, int, Scalars | None, Scalars | None, Scalars | None, Scalars | None, int, bool
]

source_hash: str
is_cuda_build: bool

# out: of the inputs' dtype or any other of theirs; backward takes the former only.
# lse: fp32 [B, H, M], [B, 1, M] or [B, G, H, M], or with a dimension of 2 before these: part 0 is
# the log-sum-exp, part 1 what rounding took from it. forward writes, and backward reads, what is
# there.
# None: launched. Otherwise (code, message): 1 ValueError, 2 NotImplementedError, 3 RuntimeError.
# Raises TypeError where a tensor's type has no DLPack C exchange API: the calls named
# _scalars take those.
def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor | None,
    seed: Tensor | None,  # int64 [2]: {seed, offset}; None exactly where p is 0
    scale: float,
    p: float,
    causal: int,  # the anchor: 0 none, 1 top-left, 2 bottom-right
    tf32: bool,
    variant: str,
    mask: MaskTensors | None,
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
    seed: Scalars | None,
    allocate: Callable[[int], Scalars],  # as of backward_scalars; called where it takes a workspace
    scale: float,
    p: float,
    causal: int,
    tf32: bool,
    variant: str,
    mask: MaskScalars | None,
    stream: int,
    device: int,  # CUDA device index of all the tensors
    /,
) -> tuple[int, str] | None: ...

# delta: rowsum(grad_out * out), fp32 [B, H, M] as lse without parts, contiguous; None: computed.
# Gradients left out are not computed; those given are contiguous, with shape and dtype of their
# input. Without any of them nothing runs. Where nothing stands against the launch,
# allocate(elements) is called once for the workspace: fp32, of one dimension with at least so many
# elements, aligned to 16 bytes. What it raises is raised.
def backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    seed: Tensor | None,
    delta: Tensor | None,
    grad_query: Tensor | None,
    grad_key: Tensor | None,
    grad_value: Tensor | None,
    grad_bias: Tensor | None,
    allocate: Callable[[int], Tensor],
    deterministic: bool,  # only rows that sum in a fixed order
    scale: float,
    p: float,
    causal: int,
    tf32: bool,
    variant: str,
    mask: MaskTensors | None,
    stream: int,
    /,
) -> tuple[int, str] | None: ...
def backward_scalars(
    grad_out: Scalars,
    query: Scalars,
    key: Scalars,
    value: Scalars,
    bias: Scalars | None,
    out: Scalars,
    lse: Scalars,
    seed: Scalars | None,
    delta: Scalars | None,
    grad_query: Scalars | None,
    grad_key: Scalars | None,
    grad_value: Scalars | None,
    grad_bias: Scalars | None,
    allocate: Callable[[int], Scalars],  # the caller keeps the tensor until the call returns
    deterministic: bool,
    scale: float,
    p: float,
    causal: int,
    tf32: bool,
    variant: str,
    mask: MaskScalars | None,
    stream: int,
    device: int,
    /,
) -> tuple[int, str] | None: ...

class BackwardPlan(TypedDict):
    row: str
    query: int  # splits of each output's loop
    key_value: int
    bias: int
    workspace: int  # fp32 elements

# What backward would do for a request with "pass": "bwd" and every gradient wanted; bias: sizes
# [B, H, M, N] of the bias whose gradient is wanted, zeros: none. Raises ValueError without a row.
def forward_plan(request: dict[str, Any]) -> tuple[str, int]: ...  # row, parts of the keys
def backward_plan(
    request: Request, heads_per_kv: int, bias: tuple[int, int, int, int], /
) -> BackwardPlan: ...
def select(request: Request, /) -> str: ...
def explain(request: Request, /) -> str: ...

# Whether code for a compute capability (specific: "sm_90a"; ptx: "compute_90") runs on another.
def code_runs(code: int, specific: bool, ptx: bool, sm: int, /) -> bool: ...
def variants() -> list[dict[str, Any]]: ...
def built_archs() -> list[str]: ...
def cuda_version() -> str: ...
def device_info(device: int, /) -> DeviceInfo: ...
