// Tensors as the binding hands them over, and the checks that turn them into ForwardParams. Plain C++17: no Python.
#pragma once

#include <cstdint>
#include <string>

#include "dispatch.h"

namespace memeff {

// DLPack's C ABI, as far as it is used here (dmlc/dlpack, dlpack.h, version 1.x; names kept for whoever compares).
namespace dlpack {
struct Version {
  uint32_t major, minor;
};
struct Tensor {  // DLTensor
  void* data;
  int32_t device_type;  // 1: CPU, 2: CUDA
  int32_t device_id;
  int32_t ndim;
  uint8_t code;  // 0: signed integer, 2: IEEE float, 4: bfloat, 6: bool
  uint8_t bits;
  uint16_t lanes;
  int64_t* shape;
  int64_t* strides;      // elements
  uint64_t byte_offset;  // from data
};
struct ExchangeApi {  // DLPackExchangeAPI
  Version version;
  ExchangeApi* previous;
  int (*managed_tensor_allocator)(Tensor*, void**, void*, void (*)(void*, const char*, const char*));
  int (*managed_tensor_from_py_object)(void*, void**);
  int (*managed_tensor_to_py_object)(void*, void**);
  int (*tensor_from_py_object)(void*, Tensor*);  // borrowed: valid until control returns; may be null
  int (*current_work_stream)(int32_t, int32_t, void**);
};
}  // namespace dlpack

constexpr int kMaxRank = 5;
constexpr int64_t kLongest = (int64_t(1) << 31) - 1024;  // M, N: the end of the tile after the last is an int32 too
constexpr int32_t kCudaDevice = 2;                       // DLPack's kDLCUDA
constexpr int32_t kUnknownDType = -1;                    // a dtype no kernel knows
constexpr int32_t kInt64 = 4;                            // no DType: seeds only
constexpr int32_t kInt32 = 5;                            // no DType: starts, lengths and pages only

struct TensorDesc {
  void* data = nullptr;
  int32_t dtype = kUnknownDType;  // a DType, kInt64, kInt32 or kUnknownDType
  int32_t device_type = kCudaDevice;
  int32_t device = 0;
  int32_t rank = 0;  // beyond kMaxRank: shape and strides are not filled
  int64_t shape[kMaxRank] = {};
  int64_t strides[kMaxRank] = {};  // elements

  bool has_value() const { return rank > 0; }  // an optional tensor left out has rank 0
};

TensorDesc from_dlpack(const dlpack::Tensor& tensor);

// Who sees whom, beside `causal`: mask_desc.h checks it. The tensors are int32, contiguous, and may be left out.
struct MaskCall {
  int64_t window_left = -1;  // keys, -1: no limit; neither is read where causal is 0
  int64_t window_right = 0;
  TensorDesc query_starts;  // [count + 1]; left out: no sequences
  TensorDesc key_starts;    // [count + 1]; left out exactly where there are pages
  TensorDesc key_lengths;   // [count]; needed with pages
  TensorDesc block_tables;  // [count, pages], any stride from one sequence's table to the next
  int64_t page_size = 0;    // keys; 0 exactly where there are no pages
  bool bias_per_sequence = false;
};

struct ForwardCall {
  TensorDesc query, key, value, bias, out, lse, seed;  // bias, lse and seed may be left out
  float scale = 1.f;
  double p = 0;        // probability to drop a weight; not 0 exactly where there is a seed
  int32_t causal = 0;  // an Anchor; the windows of mask limit both sides
  bool tf32 = false;
  std::string variant;
  MaskCall mask;
};

// Checks shapes and dtypes (kInvalid with a short message) and fills params and what the request knows of
// the tensors (all but sm, smem_optin and sm_count).
//   3-D: query [B, M, K];  4-D: query [B, M, H, K], key and value [B, N, Hkv, K|Kv], Hkv divides H;
//   5-D: query [B, M, G, H, K], key and value [B, N, G, H, K|Kv].  out: query's shape with Kv, any of the dtypes.
//   bias: [B|1, (G|1, H|1 | H|1,) M|1, N|1]; lse [(2,) B, 1, M] | [(2,) B, H, M] | [(2,) B, G, H, M],
//   last stride 1; part 1 is what rounding took from part 0.
//   With sequences B is 1; with bias_per_sequence the bias is [count|1, heads as above, longest M|1, longest N|1], of
//   which the host cannot check M and N. The request then counts a batch entry for each sequence, of mean length.
//   seed: int64 [2], {seed, offset}.
Status make_forward(const ForwardCall& args, ForwardParams* params, Request* request);

// The same, but the request's alignment is that of query, key and value alone, and out's dtype is not looked at.
Status make_operands(const ForwardCall& args, ForwardParams* params, Request* request);

}  // namespace memeff
