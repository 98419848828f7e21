// The backward kernels whose operands lie in shared memory as bf16 parts of fp32 numbers (split_parts.h). One step,
// time runs down, == a barrier of the block; the copies of one operand at a time pass through the staging area:
//
//   copies (cp.async)      tensor cores              other units
//   B2 of step j+1  |      S = A1 B1^T             |
//                   |      dP = A2 B2^T            |
//                   |                              | P = exp(S - lse), dS = P (dP - delta), split in registers
//                   |      second += P B2          |
//   ======================================================= every warp is done with B2, the statistics, the bias
//   B1 of step j+1  |                              | B2 of j+1: split; lse, delta, bias of j+1
//                   |      first += dS B1          |
//   ======================================================= every warp is done with B1
//                                                  | B1 of j+1: split
//   ======================================================= they are there
//
// P and dS stay in registers: operand A of the output products. Where kWarpsN warps share the owner's rows, each
// contracts its own rows of the loop and they add up at the end (SplitRegisterMma::share).
#pragma once

#include "chained/backward.h"

namespace memeff {
namespace chained {

template <typename Traits>
struct SplitBackwardBlock : BackwardBlock<Traits> {
  using Block = BackwardBlock<Traits>;
  using Tile = typename Block::Tile;
  using typename Block::FragmentO;
  using typename Block::FragmentS;
  using typename Block::OutMma;
  using typename Block::Side;
  using Wide = typename OutMma::Wide;
  using Block::args;
  using Block::Block;  // constructors
  using Block::f;
  using Block::lane;
  using Block::now;
  using Block::owner;
  using Block::p;
  using Block::smem;
  using Block::steps;
  using Block::thread;
  using Block::warp;
  static_assert(Traits::kBuffers == 1, "the staging area is the other buffer");
  static_assert(OutMma::kShareElements * 4 <= int(sizeof(typename Traits::Operands)), "sums pass through the operands");

  using OwnerLoader = typename Traits::QueryLoader;
  using LoopLoader = typename Traits::KeyLoader;

  CUTLASS_DEVICE auto loop_first() const { return Tile::score_b(smem.operands.loop[0].first); }
  CUTLASS_DEVICE auto loop_second() const { return Tile::score_b(smem.operands.loop[0].second); }
  CUTLASS_DEVICE void start_first(typename Block::Step const& step) const {
    this->template start_parts<LoopLoader>(this->loop_side(step).first, loop_first(), smem.operands.staging);
  }
  CUTLASS_DEVICE void start_second(typename Block::Step const& step) const {
    this->template start_parts<LoopLoader>(this->loop_side(step).second, loop_second(), smem.operands.staging);
  }
  CUTLASS_DEVICE void finish_first() const {
    this->template finish_parts<LoopLoader>(loop_first(), smem.operands.staging);
  }
  CUTLASS_DEVICE void finish_second() const {
    this->template finish_parts<LoopLoader>(loop_second(), smem.operands.staging);
  }

  // The owner's operands, through the place of the loop's, and those of the first step.
  CUTLASS_DEVICE void load_first_step() const {
    auto& pair = smem.operands.owner[0];
    char* place = reinterpret_cast<char*>(&smem.operands.loop[0]);
    const auto a1 = Tile::score_a(pair.first), a2 = Tile::score_a(pair.second);
    this->template start_parts<OwnerLoader>(owner.first, a1, place);
    this->template start_parts<OwnerLoader>(owner.second, a2, place + OwnerLoader::kStagingBytes);
    if (!Block::kOwnerKeys) this->load_statistics(smem.start, owner.row0);
    this->load_statistics_of(now);
    this->template finish_parts<OwnerLoader>(a1, place);
    this->template finish_parts<OwnerLoader>(a2, place + OwnerLoader::kStagingBytes);
    start_first(now);
    __syncthreads();  // every thread has read its copies where the loop's operands lie
    finish_first();
    start_second(now);
    this->start_bias_of(now);
    finish_second();
  }

  CUTLASS_DEVICE void run_steps(Wide& first, Wide& second) {
    if (steps == 0) return;
    load_first_step();
    for (;; --steps, this->advance()) {
      const bool more = steps > 1;
      __syncthreads();  // operands, statistics and bias are there
      if (more) start_second(this->next);
      const Side loop = this->loop_side(now);
      FragmentS s, dp;
      this->multiply_resident(s, dp, 0);
      this->weigh(s, dp, this->start_of(now), owner, loop);
      this->write_bias(dp, now.tile);
      auto& pair = smem.operands.loop[0];
      if constexpr (Traits::kSecond) {
        const OutMma product(Tile::out_b(pair.second), thread, warp, lane);
        product(second, s, loop.rows);
      }
      if (more) {
        __syncthreads();  // every warp is done with B2, the statistics and the bias
        finish_second();
        start_first(this->next);
        this->load_statistics_of(this->next);
        this->start_bias_of(this->next);
      }
      if constexpr (Traits::kFirst) {
        const OutMma product(Tile::out_b(pair.first), thread, warp, lane);
        product(first, dp, loop.rows);
      }
      if (!more) return;
      __syncthreads();  // every warp is done with B1
      finish_first();
    }
  }

  // The block's sums of one output, through the operands' place.
  CUTLASS_DEVICE FragmentO shared(Wide const& all) const {
    FragmentO mine;
    if constexpr (OutMma::kShares > 1) __syncthreads();  // every warp is done with the operands, or with other sums
    OutMma::share(mine, all, reinterpret_cast<float*>(&smem.operands), warp, lane);
    return mine;
  }

  CUTLASS_DEVICE void run() {
    if (this->stored <= 0) return;
    Wide wide_first, wide_second;
    wide_first.clear();
    wide_second.clear();
    this->set_scale(Traits::kFirst ? f.scale : f.dropout.keep_scale);
    run_steps(wide_first, wide_second);
    this->clear_bias();
    FragmentO first, second;
    if constexpr (Traits::kFirst) first = shared(wide_first);
    if constexpr (Traits::kSecond) second = shared(wide_second);
    __syncthreads();  // scales are there; the epilogues' storage overlaps the operands
    if constexpr (Traits::kFirst) {
      this->store_gradient(first, Block::kOwnerKeys ? p.grad_key : p.grad_query, f.head_dim);
    }
    if constexpr (Traits::kBoth) {
      __syncthreads();  // one epilogue's storage and scales serve both
      this->set_scale(f.dropout.keep_scale);
      __syncthreads();
    }
    if constexpr (Traits::kSecond) this->store_gradient(second, p.grad_value, f.value_dim);
  }
};

}  // namespace chained
}  // namespace memeff
