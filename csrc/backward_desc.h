// Tensors of a backward call -> BackwardParams. Plain C++17: no Python.
#pragma once

#include "tensor_desc.h"

namespace memeff {

struct BackwardCall {
  TensorDesc grad_out, query, key, value, bias, out, lse, seed;  // bias and seed may be left out
  TensorDesc delta;  // rowsum(grad_out * out), fp32, contiguous, of lse's plain shape; left out: computed
  TensorDesc grad_query, grad_key, grad_value, grad_bias;  // each may be left out: not wanted
  float scale = 1.f;
  double p = 0;
  int32_t causal = 0;  // an Anchor
  bool tf32 = false;
  std::string variant;
  MaskCall mask;
  bool deterministic = false;

  bool wants_any() const {
    return grad_query.has_value() || grad_key.has_value() || grad_value.has_value() || grad_bias.has_value();
  }
};

// As make_forward, but out, which no row reads (only delta.cu, which sees for itself), does not count for the
// alignment. The gradients have the shape and dtype of their inputs and are contiguous; grad_out has out's shape and
// any strides with last stride 1. Every gradient of params is the tensor itself with splits = 1, delta what is given:
// what backward_plan.h then changes. With sequences: no pages (kUnsupported), and a bias whose gradient is wanted is
// broadcast over no dimension; its gradient is zero before the launch.
Status make_backward(const BackwardCall& args, BackwardParams* params, Request* request);

}  // namespace memeff
