// Host side of the rows with a bias: one row, one kernel, and a second one where the bias' gradient is a sum.
#pragma once

#include "chained/backward_launch.h"
#include "register/backward_launch.h"
#include "register/bias_gradient.h"

namespace memeff {
namespace registers {

// Sums over what the bias is broadcast to: over batch entries and heads by a kernel of this family up to K = 64; else,
// over queries or keys too and with dropout, by the chained family's of the same K.
template <typename Traits>
struct BiasGradientOf {
  static constexpr int kK = Traits::kMaxK;
  using Policy = std::conditional_t<Traits::kDropout, chained::FullBias, chained::TensorBias>;
  static_assert(kK == 32 || kK == 64 || kK == 128 || kK == 256, "tiles of the chained rows");
  using Warp = std::conditional_t<kK == 32, chained::Warp<16, 64, 32>,
                                  chained::Warp<32, 32,
                                                kK == 64    ? 32
                                                : kK == 128 ? 64
                                                            : 128>>;
  using Qk = std::conditional_t<kK <= 128, chained::ResidentQk<kK>, chained::StreamedQk<3>>;
  static constexpr bool kSmall = kK <= 64;
  using Kernel = chained::BackwardTraits<chained::Sm80<typename Traits::Element>, chained::Tile<64, 64, kK>, Warp, Qk,
                                         8, Policy, kSmall ? 3 : 1, kSmall ? 2 : 1, chained::Gradient::kBias>;
  using OfHeads = BiasGradientTraits<typename Traits::Element, kSmall ? kK : 64, 1, 32, 3>;
  static_assert(Kernel::kSmemBytes <= Traits::kSmemBytes && OfHeads::kSmemBytes <= Traits::kSmemBytes,
                "the row states what all its kernels need");

  static Status launch(BackwardParams const& p, cudaStream_t stream, std::string const& where) {
    if constexpr (kSmall) {
      if (!p.grad_bias.sum_m && !p.grad_bias.sum_n && p.forward.dropout.seed == nullptr) {
        return launch_bias_gradient<OfHeads>(p, stream, where);
      }
    }
    chained::BackwardArgs args{};
    args.p = p;
    args.exponent = log2_factor(p.forward.scale);
    return chained::launch_bias<Kernel>(p, args, stream, where);
  }
};

// Elements of dBias that one store may write. A size of 1 has the stride 0.
inline int bias_store_of(GradBiasView const& bias, int keys) {
  const int64_t rows = bias.stride_b | bias.stride_g | bias.stride_h | bias.stride_m | keys;
  return bias.stride_n == 1 && rows % 8 == 0 && reinterpret_cast<uintptr_t>(bias.data) % 16 == 0 ? 8 : 1;
}

template <typename Traits, std::enable_if_t<Traits::kBias, int> = 0>
Status launch_backward(BackwardParams const& p, cudaStream_t stream, const char* name) {
  const std::string where = name;
  const bool direct = chained::is_sum_free(p.grad_bias);
  Status status;
  if (direct || p.grad_query.data != nullptr || p.grad_key.data != nullptr || p.grad_value.data != nullptr) {
    status = launch_sums<Traits>(p, direct ? bias_store_of(p.grad_bias, p.forward.keys) : 0, stream, where);
  }
  if (status.ok() && p.grad_bias.data != nullptr && !direct) {
    status = BiasGradientOf<Traits>::launch(p, stream, where + " (dBias)");
  }
  return status;
}

}  // namespace registers
}  // namespace memeff
