"""xFormers 0.0.35's attention interface as facts: names by module, signatures, what operators say
they take. tests/test_xformers_surface.py compares memeff_attn.xformers with it."""

from __future__ import annotations

BIASES = """
AttentionBias LowerTriangularMask LowerTriangularMaskWithTensorBias
LowerTriangularFromBottomRightMask LowerTriangularFromBottomRightLocalAttentionMask
LocalAttentionFromBottomRightMask BlockDiagonalMask BlockDiagonalCausalMask
BlockDiagonalCausalFromBottomRightMask BlockDiagonalCausalLocalAttentionMask
BlockDiagonalCausalLocalAttentionFromBottomRightMask BlockDiagonalPaddedKeysMask
BlockDiagonalCausalWithOffsetPaddedKeysMask BlockDiagonalLocalAttentionPaddedKeysMask
BlockDiagonalCausalLocalAttentionPaddedKeysMask BlockDiagonalGappyKeysMask
BlockDiagonalCausalWithOffsetGappyKeysMask PagedBlockDiagonalPaddedKeysMask
PagedBlockDiagonalCausalWithOffsetPaddedKeysMask PagedBlockDiagonalGappyKeysMask
PagedBlockDiagonalCausalWithOffsetGappyKeysMask _SeqLenInfo _PaddedSeqLenInfo _GappySeqInfo
VARLEN_BIASES _materialize_causal_mask _get_default_bias_device
"""

NAMES = {
    "": "__version__ _has_cpp_library version ops",
    "version": "__version__",
    "ops": """
        AttentionBias AttentionMask AttentionOp AttentionOpBase LowerTriangularMask fmha
        memory_efficient_attention memory_efficient_attention_forward
        memory_efficient_attention_forward_requires_grad memory_efficient_attention_backward
        MemoryEfficientAttentionCutlassOp MemoryEfficientAttentionCutlassFwdFlashBwOp
        MemoryEfficientAttentionFlashAttentionOp MemoryEfficientAttentionCkOp
        MemoryEfficientAttentionSplitKCkOp unbind get_stack_strides stack_or_none masked_matmul
        index_select_cat scaled_index_add SwiGLU swiglu SwiGLUOp SwiGLUEagerOp SwiGLUOpDispatch
        """,
    "ops.common": "BaseOperator get_operator get_xformers_operator register_operator",
    "ops.unbind": "unbind get_stack_strides stack_or_none",
    "ops.indexing": "index_select_cat scaled_index_add",
    "ops.swiglu_op": "SwiGLU swiglu",
    "ops.fmha": """
        ALL_FW_OPS ALL_BW_OPS AttentionBias AttentionFwOpBase AttentionBwOpBase AttentionOp
        AttentionOpBase BlockDiagonalMask LowerTriangularMask Context Gradients Inputs VARLEN_BIASES
        MemoryEfficientAttentionCutlassBlackwellOp MemoryEfficientAttentionCutlassOp
        MemoryEfficientAttentionCutlassFwdFlashBwOp MemoryEfficientAttentionFlashAttentionOp
        MemoryEfficientAttentionCkOp MemoryEfficientAttentionSplitKCkOp
        memory_efficient_attention memory_efficient_attention_forward
        memory_efficient_attention_forward_requires_grad memory_efficient_attention_backward
        memory_efficient_attention_partial merge_attentions bmk2bmhk
        attn_bias ck ck_splitk common cutlass cutlass_blackwell dispatch flash flash3 triton_splitk
        merge_training torch_attention_compat
        _fMHA _memory_efficient_attention _memory_efficient_attention_forward
        _memory_efficient_attention_forward_requires_grad _memory_efficient_attention_backward
        _dispatch_fw _dispatch_bw _ensure_op_supports_or_raise _get_use_fa3 _set_use_fa3
        _serialize_op _unserialize_op _OPS_LOOKUP _deserialize_bias _detect_lse_packed_or_raise
        """,
    "ops.fmha.attn_bias": BIASES,
    "ops.fmha.common": """
        Inputs Context Gradients AttentionOp AttentionOpBase AttentionFwOpBase AttentionBwOpBase
        ScaledTensor pack_fp8_tensorwise_per_head bmk2bmhk check_lastdim_alignment_stride1
        _attn_bias_apply _is_bias_type_supported_in_BMK
        """,
    "ops.fmha.dispatch": """
        _dispatch_fw _dispatch_bw _dispatch_fw_priority_list _ensure_op_supports_or_raise
        _set_use_fa3 _get_use_fa3 fa3_available _run_priority_list
        """,
    "ops.fmha.merge_training": """
        Partial memory_efficient_attention_partial_autograd merge_attentions_autograd
        """,
    "ops.fmha.torch_attention_compat": "is_pt_cutlass_compatible ensure_pt_flash_ok",
    "ops.fmha.cutlass": "FwOp BwOp USE_TORCH_CUTLASS _CustomMaskType",
    "ops.fmha.cutlass_blackwell": "FwOp BwOp",
    "ops.fmha.flash": "FwOp BwOp FLASH_VERSION",
    "ops.fmha.flash3": "FwOp BwOp FwOp_KVSplit",
    "ops.fmha.ck": "FwOp BwOp",
    "ops.fmha.ck_splitk": "FwOp FwOp_S1 FwOp_S2 FwOp_S4 FwOp_S8 FwOp_S16 FwOp_S32 FwOp_S64",
    "ops.fmha.triton_splitk": """
        FwOp FwOp_S1 FwOp_S2 FwOp_S4 FwOp_S8 FwOp_S16 FwOp_S32 FwOp_S64 FwOp_S128 FwOp_Map InputsFp8
        """,
}

_CALL = "query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None"
SIGNATURES = {
    "ops.fmha:memory_efficient_attention": f"{_CALL}, output_dtype=None",
    "ops.fmha:memory_efficient_attention_forward": f"{_CALL}, output_dtype=None",
    "ops.fmha:memory_efficient_attention_forward_requires_grad": f"{_CALL}, output_dtype=None",
    "ops.fmha:memory_efficient_attention_backward": f"grad, output, lse, {_CALL}",
    "ops.fmha:memory_efficient_attention_partial": f"{_CALL}, output_dtype=None",
    "ops.fmha:merge_attentions": "attn_split, lse_split, write_lse=True, output_dtype=None",
    "ops.fmha:bmk2bmhk": "tensor, num_heads",
    "ops.fmha:_memory_efficient_attention": "inp, op=None",
    "ops.fmha:_memory_efficient_attention_forward": "inp, op",
    "ops.fmha:_memory_efficient_attention_forward_requires_grad": "inp, op",
    "ops.fmha:_memory_efficient_attention_backward": "ctx, inp, grad, op, *, _skip_op_checks=False",
    "ops.fmha:_detect_lse_packed_or_raise": "lse, inp",
    "ops.fmha.dispatch:_dispatch_fw": "inp, needs_gradient",
    "ops.fmha.dispatch:_dispatch_bw": "inp, varlen_lse_packed",
    "ops.fmha.dispatch:_dispatch_fw_priority_list": "inp, needs_gradient",
    "ops.fmha.dispatch:_ensure_op_supports_or_raise": "exc_type, name, op, inp",
    "ops.fmha.dispatch:_set_use_fa3": "use_flash_attention3",
    "ops.fmha.dispatch:_get_use_fa3": "",
    "ops.fmha.dispatch:fa3_available": "",
    "ops.fmha.merge_training:memory_efficient_attention_partial_autograd": (
        f"{_CALL}, output_dtype=None"
    ),
    "ops.fmha.merge_training:merge_attentions_autograd": "*partials",
    "ops.fmha.common:pack_fp8_tensorwise_per_head": "x, scale, original_dtype",
    "ops.fmha.common:check_lastdim_alignment_stride1": "reasons, name, x, alignment",
    "ops.fmha.common:Inputs": (
        "query, key, value, attn_bias=None, p=0.0, scale=None, output_dtype=None, is_partial=False"
    ),
    "ops.fmha.common:Context": "lse, out, op_bw=None, rng_state=None, qkv_share_storage=False",
    "ops.fmha.common:Gradients": "dq, dk, dv, db=None",
    "ops.fmha.triton_splitk:InputsFp8": (
        "query, key, value, attn_bias=None, p=0.0, scale=None, output_dtype=None, "
        "is_partial=False, k_fp8_scale_shift=None, v_fp8_scale_shift=None"
    ),
    "ops.unbind:unbind": "x, dim",
    "ops.unbind:get_stack_strides": "tensors, dim",
    "ops.unbind:stack_or_none": "tensors, dim",
    "ops:masked_matmul": "a, b, mask=None",
    "ops.indexing:scaled_index_add": "input, index, source, scaling=None, alpha=1.0",
    "ops.indexing:index_select_cat": "sources, indices",
    "ops:swiglu": "x, w1, b1, w2, b2, w3, b3, *, op=None",
    "ops:SwiGLU": (
        "in_features, hidden_features, out_features=None, bias=True, *, _pack_weights=True"
    ),
}

FP32, HALF, BF16 = "torch.float32", "torch.float16", "torch.bfloat16"
TOLERANCES = {
    "Fw": ({FP32: 3e-4, HALF: 4e-3, BF16: 2e-2}, {FP32: 2e-5, HALF: 4e-4, BF16: 5e-3}),
    "Bw": ({FP32: 9e-4, HALF: 0.2, BF16: 0.9}, {FP32: 1e-4, HALF: 2e-2, BF16: 0.1}),
    "ck": ({FP32: 3e-4, HALF: 6e-3, BF16: 2.8e-2}, {FP32: 2e-5, HALF: 3e-3, BF16: 2e-2}),
}

# Operator -> (least K, most K, dtypes, then yes or no: dropout, scale, Kv != K, BMGHK, partial,
# output dtype, packed lse). Where memeff_attn does more than xFormers' operator, it stands here
# with +: gradients of 5-D inputs.
_16 = f"{HALF} {BF16}"
_ALL = f"{HALF} {BF16} {FP32}"
OPERATORS = {
    "cutlass.FwOp": (0, 65536, _ALL, "yyyynnn"),
    "cutlass.BwOp": (0, 65536, _ALL, "yyy+ynn"),
    "flash.FwOp": (0, 256, _16, "yynyyny"),
    "flash.BwOp": (0, 256, _16, "yynnyny"),
    "flash3.FwOp": (32, 256, _16, "nyyyyny"),
    "flash3.BwOp": (64, 256, _16, "nyynyny"),
    "cutlass_blackwell.FwOp": (64, 128, _16, "nnnynny"),
    "cutlass_blackwell.BwOp": (64, 128, _16, "nnnnnny"),
    "triton_splitk.FwOp": (0, 512, _16, "nynyyyy"),
    "ck.FwOp": (0, 512, _16, "yyyyyny"),
    "ck.BwOp": (0, 256, _16, "yyynyny"),
    "ck_splitk.FwOp": (0, 256, _ALL, "nynynny"),
}

# Operator -> the masks in SUPPORTED_ATTN_BIAS_TYPES beside NoneType.
_CAUSAL = "LowerTriangularMask LowerTriangularFromBottomRightMask"
_BLOCKS = (
    "BlockDiagonalMask BlockDiagonalCausalMask BlockDiagonalCausalFromBottomRightMask "
    "BlockDiagonalCausalLocalAttentionMask"
)
_LOCAL = "BlockDiagonalCausalLocalAttentionFromBottomRightMask"
_LTL = "LowerTriangularFromBottomRightLocalAttentionMask"
_FLASH = f"{_CAUSAL} {_LTL} {_BLOCKS} {_LOCAL} LocalAttentionFromBottomRightMask"
_PADDED = "BlockDiagonalPaddedKeysMask BlockDiagonalCausalWithOffsetPaddedKeysMask"
_GAPPY = "BlockDiagonalGappyKeysMask BlockDiagonalCausalWithOffsetGappyKeysMask"
_BAND = "BlockDiagonalLocalAttentionPaddedKeysMask"
_WINDOW = "BlockDiagonalCausalLocalAttentionPaddedKeysMask"
_PAGED = "PagedBlockDiagonalPaddedKeysMask PagedBlockDiagonalCausalWithOffsetPaddedKeysMask"
_PAGED_GAPPY = "PagedBlockDiagonalGappyKeysMask PagedBlockDiagonalCausalWithOffsetGappyKeysMask"
_CACHE = f"{_PADDED} {_GAPPY} {_BAND} {_WINDOW}"
MASKS = {
    "cutlass.FwOp": (
        f"Tensor {_CAUSAL} {_LTL} LowerTriangularMaskWithTensorBias {_BLOCKS} {_LOCAL} "
        "BlockDiagonalCausalWithOffsetPaddedKeysMask"
    ),
    "cutlass.BwOp": f"Tensor {_CAUSAL} {_BLOCKS}",
    "flash.FwOp": f"{_FLASH} {_PADDED} {_GAPPY} {_WINDOW} {_PAGED}",
    "flash.BwOp": _FLASH,
    "flash3.FwOp": f"{_FLASH} {_CACHE} {_PAGED} {_PAGED_GAPPY}",
    "flash3.BwOp": _FLASH,
    "flash3.FwOp_KVSplit": f"{_CACHE} {_PAGED} {_PAGED_GAPPY}",
    "cutlass_blackwell.FwOp": f"{_FLASH} {_CACHE}",
    "cutlass_blackwell.BwOp": _FLASH,
    "triton_splitk.FwOp": f"Tensor {_CACHE} {_PAGED} {_PAGED_GAPPY}",
    "ck_splitk.FwOp": "BlockDiagonalCausalWithOffsetPaddedKeysMask",
}
