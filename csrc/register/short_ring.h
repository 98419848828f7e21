// Short sequences, many of them: a block stays and takes one (batch entry, head) after the other. Keys and values of
// the next heads are on their way while its warps take strips of queries from a common queue, so that neither copies
// nor the last strips of a head leave warps idle:
//
//   queue     [head 0: strip 0, 1, ..][head 1: strip 0, 1, ..][head 2: ..          a counter in shared memory
//   buffers   [head 0: K V][head 1: K V]                                           full: a barrier that copies arrive
//   at
//             the warp that ends the last strip of head 0 starts [head 2: K V]     done: strips ended, a counter each
//
// A strip is as in short.h, in parts of the keys.
#pragma once

#include "register/short.h"

namespace memeff {
namespace registers {

// kBuffers: heads whose keys and values are in shared memory. kAhead: the next strip's queries are loaded into
// registers before a strip is computed.
template <typename Element, int kKeys, int kMaxK, int kPart, int kStrips, int kWarps, int kBuffers_, bool kAhead_,
          int kBlocksPerSm>
struct RingTraits : ShortTraits<Element, kKeys, kMaxK, kPart, kStrips, kWarps, 1, false, false, kBlocksPerSm> {
  using Base = ShortTraits<Element, kKeys, kMaxK, kPart, kStrips, kWarps, 1, false, false, kBlocksPerSm>;
  static constexpr int kBuffers = kBuffers_;
  static constexpr bool kAhead = kAhead_;
  struct SharedStorage {
    alignas(128) char operands[kBuffers][2 * Base::kKeyBytes];
    alignas(8) uint64_t full[kBuffers];
    int done[kBuffers];
    int taken;
  };
  static constexpr int kSmemBytes = int(sizeof(SharedStorage));
  static_assert(!Base::kOnce, "strips are computed in parts of the keys");
  static_assert(kBuffers >= 2 && kBuffers <= kWarps, "a warp fills each buffer at first");
  static_assert(kSmemBytes <= 227 * 1024, "no GPU gives a thread block more than 227 KiB of shared memory");
};

struct RingArgs : ShortArgs {
  int heads;                      // B * H
  cutlass::FastDivmod by_strips;  // strips of a head
};

template <typename Traits>
struct RingBlock : ShortBlock<Traits> {
  using Block = ShortBlock<Traits>;
  using Block::at;
  using Block::keys;
  using Block::lane;
  using Block::p;
  using Block::query;
  using Block::rows;
  using Block::warp;
  using typename Block::Element;
  using typename Block::FragmentO;
  using typename Block::Query;
  using Layout = Rows<Traits::kMaxK>;
  static constexpr int kBuffers = Traits::kBuffers;

  RingArgs const& ring;
  typename Traits::SharedStorage& storage;
  int heads;   // of this block
  int strips;  // of a head

  CUTLASS_DEVICE RingBlock(RingArgs const& args_, typename Traits::SharedStorage& storage_)
      : Block(args_, storage_.operands[0]), ring(args_), storage(storage_) {
    heads = (ring.heads - int(blockIdx.x) + int(gridDim.x) - 1) / int(gridDim.x);
    strips = ring.by_strips.divisor;
  }

  CUTLASS_DEVICE TileCoord coord(int head) const { return locate(ring.map, blockIdx.x + uint32_t(head) * gridDim.x); }
  CUTLASS_DEVICE uint32_t full(int buffer) const { return ptx::shared_address(&storage.full[buffer]); }

  // One warp starts the copies of a head's keys and values.
  CUTLASS_DEVICE void start_copies(int head) const {
    const TileCoord of = coord(head);
    const int buffer = head % kBuffers;
    char* to = storage.operands[buffer];
    auto const* key = static_cast<Element const*>(p.key.data) + head_offset(p.key, of.batch, of.group, of.member);
    auto const* value = static_cast<Element const*>(p.value.data) + head_offset(p.value, of.batch, of.group, of.member);
    copy_rows<Layout, 32, Traits::kKeys>(to, key, p.key.stride_m, keys, p.head_dim, lane);
    copy_rows<Layout, 32, Traits::kKeys>(to + Traits::kKeyBytes, value, p.value.stride_m, keys, p.value_dim, lane);
    ptx::arrive_after_copies(full(buffer));
  }

  // The next strip of the queue.
  CUTLASS_DEVICE int take() const {
    int strip = 0;
    if (lane == 0) strip = atomicAdd(&storage.taken, 1);
    return __shfl_sync(0xffffffffu, strip, 0);
  }

  struct Place {
    int head, row;  // of this block's heads; the strip's first query
  };
  CUTLASS_DEVICE Place place(int number) const {
    Place found;
    int strip;
    ring.by_strips(found.head, strip, number);
    found.row = strip * Block::kStripRows;
    return found;
  }

  CUTLASS_DEVICE void load_query(Query& q, Place const& from) const {
    const TileCoord of = coord(from.head);
    auto const* first = static_cast<Element const*>(p.query.data) + head_offset(p.query, of.batch, of.group, of.member);
    q.load(first + offset(from.row, p.query.stride_m), p.query.stride_m, rows - from.row, p.head_dim, lane);
  }

  // A strip of the head is done. Returns the head to be copied into the place that this frees, or -1.
  CUTLASS_DEVICE int finish_strip(int head) const {
    int ended = 0;
    int& done = storage.done[head % kBuffers];
    __syncwarp();
    if (lane == 0) {
      __threadfence_block();  // reads of the buffer come before
      ended = atomicAdd(&done, 1) + 1;
      if (ended == strips) done = 0;
    }
    ended = __shfl_sync(0xffffffffu, ended, 0);
    return ended == strips && head + kBuffers < heads ? head + kBuffers : -1;
  }

  CUTLASS_DEVICE void compute(Query const& q, Place const& strip) {
    const int buffer = strip.head % kBuffers;
    at = coord(strip.head);
    this->smem = storage.operands[buffer];
    ptx::wait_for_phase(full(buffer), strip.head / kBuffers & 1);
    FragmentO o;
    o.clear();
    this->add_parts(o, q, strip.row);
    this->store(o, strip.row);
  }

  CUTLASS_DEVICE void run() {
    if (threadIdx.x == 0) {
      for (int buffer = 0; buffer < kBuffers; ++buffer) {
        ptx::start_barrier(full(buffer), 32);
        storage.done[buffer] = 0;
      }
      storage.taken = 0;
    }
    __syncthreads();  // the barriers are there
    int fill = warp < kBuffers && warp < heads ? warp : -1;
    const int all = heads * strips;
    int number = take();
    Query q;
    if (Traits::kAhead && number < all) load_query(q, place(number));
#pragma unroll 1
    while (true) {
      if (fill >= 0) start_copies(fill);
      if (number >= all) {
        cutlass::arch::cp_async_wait<0>();  // others wait for what this warp has started
        return;
      }
      const Place strip = place(number);
      if constexpr (Traits::kAhead) {
        const Query mine = q;
        number = take();
        if (number < all) load_query(q, place(number));
        compute(mine, strip);
      } else {
        load_query(q, strip);
        number = take();
        compute(q, strip);
      }
      fill = finish_strip(strip.head);
    }
  }
};

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kBlocksPerSm)
    ring_kernel(__grid_constant__ const RingArgs args) {
  extern __shared__ __align__(128) char memory[];
  RingBlock<Traits>(args, *reinterpret_cast<typename Traits::SharedStorage*>(memory)).run();
}

}  // namespace registers
}  // namespace memeff
