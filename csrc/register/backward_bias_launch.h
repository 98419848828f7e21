// Host side of the rows with a bias: one row, one kernel, and a second one where the bias' gradient is a sum.
#pragma once

#include "chained/backward_launch.h"
#include "register/backward_launch.h"

namespace memeff {
namespace registers {

// Sums over what the bias is broadcast to: the chained family's kernel of the same K.
template <typename Traits>
struct BiasGradientOf {
  static constexpr int kK = Traits::kMaxK;
  using Policy = std::conditional_t<Traits::kDropout, chained::FullBias, chained::TensorBias>;
  using Warp = std::conditional_t<kK == 32, chained::Warp<16, 64, 32>,
                                  std::conditional_t<kK == 64, chained::Warp<32, 32, 32>, chained::Warp<32, 32, 64>>>;
  static_assert(kK == 32 || kK == 64 || kK == 128, "tiles of the chained rows");
  static constexpr bool kSmall = kK <= 64;
  using Kernel = chained::BackwardTraits<chained::Sm80<typename Traits::Element>, chained::Tile<64, 64, kK>, Warp, Qk,
                                         8, Policy, kSmall ? 3 : 1, kSmall ? 2 : 1, chained::Gradient::kBias>;
  static_assert(Kernel::kSmemBytes <= Traits::kSmemBytes, "the row states what both kernels need");
};

// Elements of dBias that one store may write.
inline int bias_store_of(GradBiasView const& bias) {
  const bool eight = bias.stride_n == 1 && bias.stride_m % 8 == 0 && reinterpret_cast<uintptr_t>(bias.data) % 16 == 0;
  return eight ? 8 : 1;
}

template <typename Traits, std::enable_if_t<Traits::kBias, int> = 0>
Status launch_backward(BackwardParams const& p, cudaStream_t stream, const char* name) {
  const std::string where = name;
  const bool direct = chained::is_sum_free(p.grad_bias);
  Status status;
  if (direct || p.grad_query.data != nullptr || p.grad_key.data != nullptr || p.grad_value.data != nullptr) {
    status = launch_sums<Traits>(p, direct ? bias_store_of(p.grad_bias) : 0, stream, where);
  }
  if (status.ok() && p.grad_bias.data != nullptr && !direct) {
    chained::BackwardArgs args{};
    args.p = p;
    args.exponent = log2_factor(p.forward.scale);
    status = chained::launch_bias<typename BiasGradientOf<Traits>::Kernel>(p, args, stream, where + " (dBias)");
  }
  return status;
}

}  // namespace registers
}  // namespace memeff
