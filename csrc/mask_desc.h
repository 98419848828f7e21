// What a call says of who sees whom -> window and sequences of ForwardParams. Plain C++17: no Python.
#pragma once

#include "tensor_desc.h"

namespace memeff {

// Fills anchor, windows and sequences; params has its sizes already. A window that reaches every key is none (-1), so
// that kernels may skip its test. kInvalid for what the tensors' shapes tell; what they hold nobody checks.
Status make_mask(const MaskCall& mask, int32_t causal, ForwardParams* params);

// What dispatch is asked with sequences: one batch entry for each, with their mean length (at least 1; pages: the
// length of a table), so that it sees the grid as it is.
void count_sequences(const MaskCall& mask, const Sequences& sequences, Request* request);

}  // namespace memeff
