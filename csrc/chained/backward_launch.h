// Host side of the chained family's backward kernels: one row of the variant list, several kernels.
#pragma once

#include <atomic>
#include <string>

#include "chained/backward.h"
#include "chained/backward_bias.h"
#include "chained/backward_short.h"
#include "chained/launch.h"
#include "chained/split_backward.h"
#include "status.h"

namespace memeff {
namespace chained {

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kBlocksPerSm)
    backward_kernel(__grid_constant__ const BackwardArgs args) {
  extern __shared__ __align__(128) unsigned char memory[];
  auto& smem = *reinterpret_cast<typename Traits::SharedStorage*>(memory);
  if constexpr (Traits::kWhat == Gradient::kBias) {
    BackwardBiasBlock<Traits>(args, smem).run();
  } else if constexpr (Traits::kWhat == Gradient::kAll) {
    BackwardShortBlock<Traits>(args, smem).run();
  } else if constexpr (Traits::kInParts) {
    SplitBackwardBlock<Traits>(args, smem).run();
  } else {
    BackwardBlock<Traits>(args, smem).run();
  }
}

// kBuffers: of the resident kernels. kQueryBlocks, kKeyBlocks: blocks an SM that the registers must allow.
template <typename Arch, typename Tile, typename Warp, typename Qk, int kAlignment, typename Bias, int kQueryBlocks,
          int kKeyBlocks, int kBuffers>
struct BackwardRow {
  template <Gradient kWhat, int kBlocks>
  using Kernel = BackwardTraits<Arch, Tile, Warp, Qk, kAlignment, Bias, kBlocks, kBuffers, kWhat>;
  using Query = Kernel<Gradient::kQuery, kQueryBlocks>;
  // dK and dV in one kernel where both fit beside S and dP in the registers.
  static constexpr bool kFused = Qk::kResident || Warp::kM * (Warp::kQkN + Warp::kPvN) / 16 <= 160;
  using KeyValue = Kernel<kFused ? Gradient::kKeyValue : Gradient::kKey, kKeyBlocks>;
  using Value = Kernel<Gradient::kValue, kQueryBlocks>;
  // Nothing stays from one item to the next, so two buffers of everything where they leave three blocks an SM.
  static constexpr bool kSmall = Qk::kResident && Qk::kMaxK <= 64 && sizeof(typename Arch::Element) == 2;
  using BiasGradient =
      BackwardTraits<Arch, Tile, Warp, Qk, kAlignment, Bias, kSmall ? 3 : 1, kSmall ? 2 : 1, Gradient::kBias>;
  // Whole short sequences in one kernel, up to kTiles tiles of either side.
  template <int kTiles>
  using Short = BackwardTraits<Arch, Tile, Warp, Qk, kAlignment, Bias, Qk::kMaxK <= 32 && kTiles == 1 ? 3 : 2, kTiles,
                               Gradient::kAll>;
  static constexpr bool kShort = kSmall && !Bias::kBias && !Bias::kDropout;

  static constexpr bool kFull = Bias::kBias;
  static constexpr int max(int a, int b) { return a > b ? a : b; }
  static constexpr int smem_bytes() {
    int bytes = max(Query::kSmemBytes, KeyValue::kSmemBytes);
    if constexpr (!kFused) bytes = max(bytes, Value::kSmemBytes);
    if constexpr (kFull) bytes = max(bytes, BiasGradient::kSmemBytes);
    if constexpr (kShort) bytes = max(bytes, Short<2>::kSmemBytes);
    return bytes;
  }
  static constexpr int kSmemBytes = smem_bytes();
  static constexpr int kTileM = Query::kTileM, kTileN = Query::kTileN, kValueTile = Query::kValueTile;
  static constexpr int kThreads = Query::kThreads;
};

// Launches on `stream` of the current device. Never synchronises, never allocates.
template <typename Traits>
Status launch_gradient(BackwardParams const& p, int64_t blocks, BackwardArgs& args, cudaStream_t stream,
                       std::string const& where) {
  if (blocks > INT32_MAX) {
    return {Code::kUnsupported, where +
                                    ": the gradient has more tiles than a "
                                    "grid may have blocks (2^31 - 1)"};
  }
  args.blocks = uint32_t(blocks);
  args.bias_copy = bias_copy_of<Traits>(p.forward);
  if (args.owner_tiles > 0) args.by_tiles = {int(args.owner_tiles)};
  if (args.owner_heads > 0) args.by_heads = {int(args.owner_heads)};
  args.by_group = {p.forward.heads_per_group};
  auto* kernel = &backward_kernel<Traits>;
  if (Status s = allow_shared_memory<Traits>(kernel, where); !s.ok()) return s;
  kernel<<<args.blocks, Traits::kThreads, Traits::kSmemBytes, stream>>>(args);
  return launched(where, args.blocks, Traits::kThreads, Traits::kSmemBytes);
}

// dQ, or dK and dV: `width` output columns.
template <typename Traits>
Status launch_side(BackwardParams const& p, BackwardArgs args, int64_t width, int splits, cudaStream_t stream,
                   std::string const& where) {
  ForwardParams const& f = p.forward;
  constexpr bool kKeys = Traits::kOwnerKeys;
  args.owner_heads = uint32_t(kKeys ? f.heads / p.heads_per_kv : f.heads);
  const int32_t rows = kKeys ? f.keys : f.queries;
  args.owner_tiles = uint32_t(tiles_over(rows, Traits::kTileM, f.sequences));
  args.loop_tiles = uint32_t(ceil_div(kKeys ? f.queries : f.keys, Traits::kTileN));
  args.slabs = uint32_t(Traits::kResident ? 1 : ceil_div(width, Traits::kValueTile));
  args.splits = uint32_t(splits);
  const int64_t blocks = f.batch * args.owner_heads * args.owner_tiles * args.slabs * splits;
  return launch_gradient<Traits>(p, blocks, args, stream, where);
}

template <typename Traits>
Status launch_bias(BackwardParams const& p, BackwardArgs args, cudaStream_t stream, std::string const& where) {
  ForwardParams const& f = p.forward;
  GradBiasView const& bias = p.grad_bias;
  args.owner_tiles = uint32_t(ceil_div(f.queries, Traits::kTileM));
  args.loop_tiles = uint32_t(ceil_div(f.keys, Traits::kTileN));
  args.splits = uint32_t(bias.splits);
  const int64_t blocks = (bias.sum_b ? 1 : f.batch) * (bias.sum_g ? 1 : f.heads / f.heads_per_group) *
                         (bias.sum_h ? 1 : f.heads_per_group) * (bias.sum_m ? 1 : args.owner_tiles) *
                         (bias.sum_n ? 1 : args.loop_tiles) * bias.splits;
  return launch_gradient<Traits>(p, blocks, args, stream, where);
}

// Is every element of dBias one element of one head's dS?
inline bool is_sum_free(GradBiasView const& bias) {
  return bias.data != nullptr && bias.splits == 1 &&
         !(bias.sum_b || bias.sum_g || bias.sum_h || bias.sum_m || bias.sum_n);
}

template <typename Traits>
Status launch_short(BackwardParams const& p, BackwardArgs args, cudaStream_t stream, std::string const& where) {
  args.owner_heads = uint32_t(p.forward.heads);
  return launch_gradient<Traits>(p, p.forward.batch * p.forward.heads, args, stream, where);
}

// May one kernel write all three gradients, from sequences of up to `rows`?
inline bool is_short(BackwardParams const& p, int rows) {
  const auto whole = [](GradView const& view) { return view.data != nullptr && view.splits == 1; };
  return !is_packed(p.forward.sequences) && p.forward.queries <= rows && p.forward.keys <= rows &&
         p.heads_per_kv == 1 && whole(p.grad_query) && whole(p.grad_key) && whole(p.grad_value);
}

// Row: a BackwardRow. Starts the kernels of the gradients that are wanted.
template <typename Row>
Status launch_backward(BackwardParams const& p, cudaStream_t stream, const char* name) {
  ForwardParams const& f = p.forward;
  BackwardArgs args{};
  args.p = p;
  args.exponent = log2_factor(f.scale);
  const bool packed = is_packed(f.sequences);
  args.bias_pairs = f.bias.data != nullptr && bias_in_pairs(f.bias, f.sequences);
  args.write_bias = Row::kFull && is_sum_free(p.grad_bias) && (packed || p.grad_query.data != nullptr);
  const std::string where = name;
  const bool key = p.grad_key.data != nullptr, value = p.grad_value.data != nullptr;
  if constexpr (Row::kShort) {
    if (is_short(p, Row::kTileM)) {
      return launch_short<typename Row::template Short<1>>(p, args, stream, where + " (short)");
    }
    if (is_short(p, 2 * Row::kTileM)) {
      return launch_short<typename Row::template Short<2>>(p, args, stream, where + " (short)");
    }
  }
  Status status;
  if (p.grad_query.data != nullptr || args.write_bias) {
    status = launch_side<typename Row::Query>(p, args, f.head_dim, p.grad_query.splits, stream, where + " (dQ)");
  }
  if constexpr (Row::kFused) {
    if (status.ok() && (key || value)) {
      status = launch_side<typename Row::KeyValue>(p, args, f.head_dim > f.value_dim ? f.head_dim : f.value_dim,
                                                   key ? p.grad_key.splits : p.grad_value.splits, stream,
                                                   where + " (dK, dV)");
    }
  } else {
    if (status.ok() && key) {
      status = launch_side<typename Row::KeyValue>(p, args, f.head_dim, p.grad_key.splits, stream, where + " (dK)");
    }
    if (status.ok() && value) {
      status = launch_side<typename Row::Value>(p, args, f.value_dim, p.grad_value.splits, stream, where + " (dV)");
    }
  }
  if constexpr (Row::kFull) {
    if (status.ok() && p.grad_bias.data != nullptr && !args.write_bias) {
      status = launch_bias<typename Row::BiasGradient>(p, args, stream, where + " (dBias)");
    }
  }
  return status;
}

}  // namespace chained
}  // namespace memeff
